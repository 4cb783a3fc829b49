"""One play: a deployment, a few runs, faults, and the judge."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import structlog

from tests.e2e import judge
from tests.e2e.fleet import CHAINED, SEPARATE
from tests.simulated_faults.faults import Faults
from tests.simulated_faults.fleet import PARTITIONS, PROVIDER, Provider, Texts, Workers, settings_in, simulated
from tests.simulated_faults.virtual import PROCESS, VirtualLoop, VirtualServer, command
from tests.waiting import eventually
from tokenbus import Client
from tokenbus.bus.keys import DATA_FIELD, Keys
from tokenbus.bus.server.server import Server
from tokenbus.errors import ServerUnavailable

SETTLE_S = 60.0
"""Virtual seconds after the last fault within which all runs end."""
RUNS = 4
FAULTS_S = 20.0
KEYS = Keys("tokenbus", PARTITIONS)
Fleet = Literal["separate", "chained", "any"]
Event = dict[str, Any]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    fleet: Fleet = "any"
    faults: Sequence[str] = ()
    """Their names; empty: all."""
    show: bool = False
    """Print the workers' logs as they are written."""


class Played(msgspec.Struct, frozen=True, kw_only=True):
    problems: Sequence[str]
    """What the judge found, and the end of the workers' logs if it found anything."""
    trace: str
    """Of two plays of one seed it is the same."""
    seconds: float
    """Virtual time."""
    messages: int
    faults: Sequence[str]


def play(plan: Plan, server: VirtualServer, directory: Path) -> Played:
    """Play against the server, which is emptied first. Changes the process: play only once in each."""
    loop = VirtualLoop(plan.seed, server)
    loop.control(command("FLUSHALL"), command("SCRIPT", "FLUSH"))
    lines: list[str] = []
    _log_to(loop, lines, show=plan.show)
    random.seed(plan.seed)
    gc.disable()  # what is freed when would differ from play to play
    scene = _Scene(loop, plan, directory)
    try:
        with simulated(loop):
            asyncio.set_event_loop(loop)
            loop.run_until_complete(scene.play())
    except Exception:  # of the play itself, or a loop in which nothing can happen any more
        scene.problems.append(traceback.format_exc())
    logging.disable(logging.CRITICAL)  # what the end of this process cuts off
    problems = [*scene.problems, *lines[-60:]] if scene.problems else []
    return Played(
        problems=problems,
        trace=loop.trace.hexdigest()[:12],
        seconds=loop.now,
        messages=loop.messages,
        faults=scene.met,
    )


class _Scene:
    def __init__(self, loop: VirtualLoop, plan: Plan, directory: Path) -> None:
        self._loop, self._plan = loop, plan
        self._settings = settings_in(directory)
        chance = loop.chance
        self._texts: Texts = {
            f"run{n}": " ".join(f"w{n}.{word}" for word in range(chance.randint(20, 100))) for n in range(RUNS)
        }
        self.problems: list[str] = []
        self.met: Sequence[str] = ()

    async def play(self) -> None:
        """From the start of the workers to their end."""
        loop, chance = self._loop, self._loop.chance
        chained = self._plan.fleet == "chained" or (self._plan.fleet == "any" and chance.random() < 0.6)
        kinds = (CHAINED if chained else SEPARATE) * chance.randint(1, 2)
        provider = Provider(loop, self._texts)
        workers = Workers(loop, self._settings, kinds)
        url = self._settings.redis_url or ""
        async with Client(url, partitions=PARTITIONS) as client, Server(url) as server:
            await eventually(lambda: len(workers.alive) == len(kinds))
            faults = Faults(loop, workers, provider, only=self._plan.faults)
            self.met = faults.met
            asking = loop.create_task(self._ask(client))
            await faults.run(FAULTS_S)
            await asking
            until, logs = loop.now + SETTLE_S, await self._logs(server)
            while loop.now < until and not all(log and log[-1]["type"] in judge.TERMINAL for log in logs.values()):
                await asyncio.sleep(1.0)
                logs = await self._logs(server)
            await self._judge(server, logs)
            await workers.close()

    async def _ask(self, client: Client) -> None:
        for run in self._texts:
            message = {"role": "user", "content": f"say {run}"}
            request = {"id": run, "provider": PROVIDER, "model": "m", "on_failure": "restart", "messages": [message]}
            while True:
                try:
                    await client.publish(request)
                    break
                except ServerUnavailable:
                    await asyncio.sleep(0.5)
            await asyncio.sleep(self._loop.chance.uniform(0.0, 3.0))

    async def _logs(self, server: Server) -> dict[str, list[Event]]:
        return {run: await _events(server, KEYS.log(run)) for run in self._texts}

    async def _judge(self, server: Server, logs: dict[str, list[Event]]) -> None:
        """Each run completes, with the provider's text, once; and the topics have what the logs have."""
        published: dict[str, list[Event]] = {run: [] for run in self._texts}
        for partition in range(PARTITIONS):
            for topic in ("chunks", "blocks", "runs"):
                for event in await _events(server, KEYS.topic(partition, topic)):
                    published[event["run"]].append(event)
        for run, log in logs.items():
            try:
                assert log, "nothing in its log"
                judge.check(log)
                assert log[-1]["type"] == "completed", str(log[-1])
                said = "".join(content for kind, content in judge.blocks(log) if kind == "text")
                assert said == self._texts[run], f"it says {said!r}, and its provider said {self._texts[run]!r}"
                assert sorted(published[run], key=lambda event: event["seq"]) == log, "its topics differ from its log"
            except AssertionError as e:
                self.problems.append(f"{run}: {e}")
                self.problems += [f"      {str(event)[:160]}" for event in log]


async def _events(server: Server, stream: str) -> list[Event]:
    return [msgspec.json.decode(fields[DATA_FIELD.encode()]) for _, fields in await server.client.xrange(stream)]


def _log_to(loop: VirtualLoop, lines: list[str], *, show: bool) -> None:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = f"{loop.now:9.4f} {PROCESS.get()} {record.levelname} {record.getMessage()}"
            if record.exc_info and record.exc_info[1]:
                text += "\n" + "".join(traceback.format_exception(record.exc_info[1]))
            lines.append(text)
            if show:
                print(text, flush=True)

    level = logging.INFO if show else logging.WARNING
    root = logging.getLogger()
    root.handlers = [Handler()]
    root.setLevel(level)
    structlog.configure(
        processors=[structlog.processors.format_exc_info, structlog.processors.KeyValueRenderer()],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(level),
    )
