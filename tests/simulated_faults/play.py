"""One play: a deployment, a few runs, faults, and the judge."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import traceback
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
import structlog

from tests.chaos.judging import talks as judge_of_talks
from tests.chaos.record import Talk
from tests.chaos.talks import Talks
from tests.e2e import judge
from tests.e2e.fleet import CHAINED, SEPARATE
from tests.simulated_faults.faults import Faults
from tests.simulated_faults.fleet import (
    DELEGATE,
    FOUND,
    LOOK,
    PARTITIONS,
    PAY,
    POLICY,
    PROVIDER,
    REPLACED,
    Case,
    Endpoints,
    Workers,
    settings_in,
    simulated,
)
from tests.simulated_faults.guards import Guard, remove
from tests.simulated_faults.virtual import PROCESS, VirtualLoop, VirtualServer
from tests.waiting import eventually
from tokenbus import Client
from tokenbus.bus.keys import DATA_FIELD, Keys
from tokenbus.bus.server.server import Server
from tokenbus.errors import AlreadyDecided, DecisionPending, RunError, ServerError, ServerUnavailable, WaitNotFound
from tokenbus.events.public import TERMINAL

SETTLE_S = 60.0
"""Virtual seconds after the last fault within which all runs end."""
_KEPT = Path(__file__).with_name("kept.json")
RUNS = 4
FAULTS_S = 12.0
KEYS = Keys("tokenbus", PARTITIONS)
_LOST = ("server_lost_writes", "frames_lost", "lost", "policy_silent")
"""Codes of the errors of runs that a server with lost writes may end."""
Fleet = Literal["separate", "chained", "any"]
Event = dict[str, Any]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    fleet: Fleet = "any"
    faults: Sequence[str] = ()
    """Their names; empty: all."""
    numbers: Sequence[int] | None = None
    """Of the faults of this seed; None: all."""
    without: Guard | None = None
    """A guard that the scripts lack."""
    show: bool = False
    """Print the workers' logs as they are written."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A play that went wrong once, and does no more."""

    plan: Plan
    why: str


def kept() -> list[Kept]:
    """Those that the tests play."""
    return msgspec.json.decode(_KEPT.read_bytes(), type=list[Kept])


def keep(plan: Plan, why: str) -> None:
    """Let the tests play it."""
    found = [*kept(), Kept(plan=plan, why=why)]
    _KEPT.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")


class Played(msgspec.Struct, frozen=True, kw_only=True):
    problems: Sequence[str]
    """What the judge found, and the end of the workers' logs if it found anything."""
    trace: str
    """Of two plays of one seed it is the same."""
    seconds: float
    """Virtual time."""
    messages: int
    faults: Mapping[int, str]
    """By number: when, and which."""
    ends: Sequence[str]
    """How each run ended; empty if it did not."""


def play(plan: Plan, server: VirtualServer, directory: Path) -> Played:
    """Play against the server, which is new. Changes the process: play only once in each."""
    if plan.without:
        remove(plan.without)
    loop = VirtualLoop(plan.seed, server)
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
        ends=scene.ends,
    )


class _Scene:
    def __init__(self, loop: VirtualLoop, plan: Plan, directory: Path) -> None:
        self._loop, self._plan = loop, plan
        self._settings = settings_in(directory)
        self._cases = [_case(loop.chance, f"run{n}") for n in range(RUNS)]
        self._endpoints = Endpoints(loop, self._cases)
        self._decided: list[tuple[str, str, str]] = []
        """Run, wait and decision of those who were told that their decision counts."""
        self._lost_writes = False
        self._seen: dict[str, Event] = {}
        """By durable run, its end as a reader had it."""
        self.problems: list[str] = []
        self.met: Mapping[int, str] = {}
        self.ends: list[str] = []

    async def play(self) -> None:
        """From the start of the workers to their end."""
        loop, chance = self._loop, self._loop.chance
        chained = self._plan.fleet == "chained" or (self._plan.fleet == "any" and chance.random() < 0.6)
        kinds = (*(CHAINED if chained else SEPARATE), "tools", "policy") * chance.randint(1, 2)
        workers = Workers(loop, self._settings, kinds)
        url = self._settings.redis_url or ""
        async with Client(url, partitions=PARTITIONS) as client, Server(url) as server:
            await eventually(lambda: len(workers.alive) == len(kinds))
            faults = Faults(
                *(loop, workers, self._endpoints),
                seed=self._plan.seed,
                only=self._plan.faults,
                numbers=self._plan.numbers,
            )
            self.met = faults.met
            talking = Talks(
                *(server.client, url, KEYS.prefix, chance),
                sessions=chance.randint(0, 1),
                most=chance.randint(2, 8),
                provider=PROVIDER,
                partitions=PARTITIONS,
            )
            await talking.__aenter__()
            people = [loop.create_task(self._decide(client, choice)) for choice in ("allow", "deny")]
            asking = [loop.create_task(self._ask(client, case)) for case in self._cases]
            people += [loop.create_task(self._read(client, case.run)) for case in self._cases if case.durable]
            await faults.run(FAULTS_S)
            await asyncio.gather(*asking)
            until, logs = loop.now + SETTLE_S, await self._logs(server)
            while loop.now < until and not all(log and log[-1]["type"] in judge.TERMINAL for log in logs.values()):
                await asyncio.sleep(1.0)
                logs = await self._logs(server)
                if faults.lost_writes:
                    for case in self._cases:
                        if not (logs[case.run] or case.durable):
                            await _until_served(lambda case=case: client.publish(case.request))
            for person in people:
                person.cancel()
            self.ends = [log[-1]["type"] if log else "" for log in logs.values()]
            self._lost_writes = faults.lost_writes
            for talk in await talking.finish(PARTITIONS, SETTLE_S):
                await self._judge_talk(server, talk)
            await self._judge(server, logs)
            await self._judge_children(server)
            await workers.close()

    async def _ask(self, client: Client, case: Case) -> None:
        chance = self._loop.chance
        await asyncio.sleep(chance.uniform(0.0, FAULTS_S / 2))
        await _until_served(lambda: client.publish(case.request))
        if case.cancelled:
            await asyncio.sleep(chance.uniform(0.0, 8.0))
            await _until_served(lambda: client.cancel(case.run))

    async def _read(self, client: Client, run: str) -> None:
        """Read the run until its end."""
        while run not in self._seen:
            with suppress(ServerError, RunError):
                async for event in client.follow(run, wait_s=None):
                    if isinstance(event, TERMINAL):
                        self._seen[run] = msgspec.to_builtins(event)
            await asyncio.sleep(0.1)

    async def _decide(self, client: Client, choice: str) -> None:
        """Be a person who decides what waits, if the choice is theirs; at times twice."""
        mine = {case.run for case in self._cases if case.decision in (choice, "both")}
        decide = client.approve if choice == "allow" else client.deny
        while True:
            await asyncio.sleep(self._loop.chance.uniform(0.2, 2.0))
            with suppress(ServerUnavailable, WaitNotFound, AlreadyDecided, DecisionPending):
                for wait in [wait async for wait in client.waiting() if wait.run in mine]:
                    await decide(wait.run, wait.wait, wait_s=2.0)
                    self._decided.append((wait.run, wait.wait, choice))

    async def _logs(self, server: Server) -> dict[str, list[Event]]:
        return {case.run: await _events(server, KEYS.log(case.run)) for case in self._cases}

    async def _judge(self, server: Server, logs: dict[str, list[Event]]) -> None:
        """Each run ends with what it was to say, once; and the topics have what the logs have."""
        published: defaultdict[str, list[Event]] = defaultdict(list)
        for partition in range(PARTITIONS):
            for topic in ("chunks", "blocks", "runs"):
                for event in await _events(server, KEYS.topic(partition, topic)):
                    published[event["run"]].append(event)
        for case in self._cases:
            log = logs[case.run]
            try:
                assert log, "nothing in its log"
                judge.check(log)
                assert sorted(published[case.run], key=lambda event: event["seq"]) == log, (
                    "its topics differ from its log"
                )
                self._judge_words(case, log)
            except AssertionError as e:
                self.problems.append(f"{case}: {e}")
                self.problems += [f"      {str(event)[:200]}" for event in log]

    async def _judge_talk(self, server: Server, talk: Talk) -> None:
        runs = dict.fromkeys(event["run"] for event in talk.log if event.get("run"))
        logs = {run: await _events(server, KEYS.log(run)) for run in runs}
        for log in logs.values():
            self.ends.append(log[-1]["type"] if log else "")
        found = judge_of_talks.problems_of(talk, logs, lossy=self._lost_writes)
        self.problems += [f"{talk.session}: {problem}" for problem in found]

    async def _judge_children(self, server: Server) -> None:
        """Each ends, and no call has two."""
        children: Counter[str] = Counter()
        for key in await server.client.keys("*:log:*~*"):
            log = await _events(server, key.decode())
            children[log[0]["run"].partition("~")[0]] += 1
            self.ends.append(log[-1]["type"])
            try:
                judge.check(log)
            except AssertionError as e:
                self.problems.append(f"{log[0]['run']}: {e}")
                self.problems += [f"      {str(event)[:200]}" for event in log]
        for case in self._cases:
            most = len(case.texts) - 1 if case.tool == DELEGATE else 0
            if children[case.run] > most and not self._lost_writes:
                self.problems.append(f"{case.run} has {children[case.run]} child runs for {most} calls")
            await self._judge_tree(server, case)

    async def _judge_tree(self, server: Server, case: Case) -> None:
        """All events of the tree have one order."""
        order = await server.client.xrange(KEYS.tree(case.run))
        if not order or self._lost_writes:
            return
        entries = [(run.decode(), value.decode()) for _, fields in order for run, value in fields.items()]
        logs = {run: await _events(server, KEYS.log(run)) for run in {case.run, *(run for run, _ in entries)}}
        try:
            judge.check_tree(entries, logs)
        except AssertionError as e:
            self.problems.append(f"{case.run}: its tree: {e}: {entries}")

    def _judge_words(self, case: Case, log: list[Event]) -> None:
        ended = log[-1]["type"]
        seen = self._seen.get(case.run)
        assert not seen or _of_end(seen) == _of_end(log[-1]), f"a reader had the end {seen}"
        lost = self._lost_writes and log[-1].get("error", {}).get("code") in _LOST
        assert ended == "completed" or (case.cancelled and ended == "cancelled") or lost, str(log[-1])
        blocks = judge.blocks(log)
        said = "".join(content for kind, content in blocks if kind == "text")
        whole = "".join(case.texts)
        expected = whole.replace(FOUND, REPLACED) if case.policies else whole
        assert (said == expected) if ended == "completed" else expected.startswith(said), f"it says {said!r}"
        resumed = [(event["wait"], event["decision"]) for event in log if event["type"] == "resumed"]
        decisions = [decision for _, decision in resumed]
        decided = [(wait, decision) for run, wait, decision in self._decided if run == case.run]
        # A cancel skips the policies: drafts that wait for them are not published.
        unjudged = bool(case.policies) and ended == "cancelled"
        assert self._lost_writes or unjudged or set(decided) <= set(resumed), (
            f"decided were {resumed}, and people were told {decided}"
        )
        results = [content for kind, content in blocks if kind == "tool_result"]
        for turn, result in enumerate(results):
            allowed = case.tool != PAY or "allow" in decisions[turn : turn + 1]
            if allowed and result == "ReadError: simulated":
                continue  # its answer was cut
            if self._lost_writes and case.tool == DELEGATE and "child" in result:
                continue  # so was the child run
            real = result == case.result(turn)
            assert real == allowed or (ended != "completed" and not real), f"turn {turn} has the result {result!r}"
        for turn in range(len(case.texts) - 1):
            keys = self._endpoints.called[case.run, turn]
            lossy = (
                self._lost_writes and not case.durable
            )  # what led to a call may be lost, and the call asked for anew
            assert len(keys) <= 1 or lossy, f"the call of turn {turn} had the keys {keys}"
            asked = turn < len(resumed) or unjudged
            assert not keys or case.tool != PAY or asked, f"the tool of turn {turn} waited for nobody"
            decided_anew = lossy and case.decision == "both"
            assert decided_anew or not keys or "deny" not in decisions[turn : turn + 1], (
                f"the denied tool of turn {turn} was called"
            )
        if ended == "completed":
            turns = len(case.texts) - 1
            assert len(results) == turns
            assert len(resumed) == len({wait for wait, _ in resumed}) == (turns if case.tool == PAY else 0)


def _case(chance: random.Random, run: str) -> Case:
    turns = chance.choice((1, 1, 2, 3))
    texts = [" ".join(f"{run}.{turn}.{word}" for word in range(chance.randint(4, 24))) for turn in range(turns)]
    return Case(
        run=run,
        texts=tuple(texts),
        tool=chance.choice((LOOK, PAY, DELEGATE)),
        decision=chance.choice(("allow", "deny", "both")),
        policies=(POLICY,) if chance.random() < 0.3 else (),
        cancelled=chance.random() < 0.15,
        durable=chance.random() < 0.5,
    )


def _of_end(event: Event) -> Event:
    """What a reader of the end relies on. Its number is another one if neighbouring chunks are joined otherwise."""
    return {name: event.get(name) for name in ("run", "type", "finish", "error", "turn", "attempt", "usage")}


async def _until_served(ask: Callable[[], Awaitable[object]]) -> None:
    while True:
        try:
            await ask()
            return
        except ServerUnavailable:
            await asyncio.sleep(0.5)


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
