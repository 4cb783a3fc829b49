"""One round: a deployment from its start to its orderly end, with runs and chaos in between. Its result is a
`Record`."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import msgspec

from tests.chaos import guards, hostile, ledger, observer, rogue, talks, trees
from tests.chaos.crowd import MODEL, SETTINGS, Crowd
from tests.chaos.deployment.inside import LEFT_BEHIND
from tests.chaos.deployment.proxy import Proxy
from tests.chaos.deployment.servers import KINDS, Deployed, Kind, Single
from tests.chaos.deployment.workers import BESIDE, FLEETS, Workers
from tests.chaos.faults import Chaos, Rates
from tests.chaos.lost_connections import is_lost
from tests.chaos.record import Entry, Record, place, places_of
from tests.chaos.repartition import NUMBER, Repartition
from tests.chaos.stories import CONTINUING, LOOK, Scene, Stage
from tests.e2e.fleet import BASE_PATHS, SEPARATE, provider_table
from tests.e2e.fleet import Kind as WorkerKind
from tests.waiting import eventually
from tokenbus_services.mock_provider import MockProvider

PARTITIONS = 4
SETTLE_S = 90.0
"""Seconds that a run may take to end after the last fault."""
LOST_S = 4.0
"""A run is lost if it is open while no work happens anywhere for this long: every run that could continue is in a
queue, in a stream, or in a call that holds its queue's entry. But a run that policies are judging is in no queue, so a
run with policies may rest for as long as the policies may take.
"""
LATE_S = 10.0
"""No run is open this long after the last fault, plus its undisturbed duration."""
SILENT_S, TOOL_SLACK_S, POLICY_SLACK_S = 6.0, 3.0, 2.0
"""If the server may lose writes: after this long without an event, a run, a tool call or a draft is lost."""
FOUND_S = 2 * SILENT_S + 10.0
"""Within this time after its last event, or after its parser continued, a run whose queue was deleted is found."""
FRESH = 4
"""Number of runs that are requested after a change of the number of partitions."""
REST_S = 20.0
"""Seconds until queues and counters are at rest after the last run."""
_POLL_S = 0.3
_TWICE = 0.15
"""Share of requests that are sent a second time, with the same id."""
_ENDED = {b"completed", b"incomplete", b"failed", b"cancelled"}

T = TypeVar("T")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    seed: str
    seconds: float
    """Seconds of chaos; repair and judging come on top."""
    open_runs: int = 16
    """Number of runs open at any time."""
    guarded: float = 0.35
    """The share of the runs that have policies."""
    hostile: float = 0.1
    """The share of the runs whose provider is hostile."""
    harmful: float = 0.0
    """The share of the runs with a policy that sleeps, exits, raises, allocates or returns late."""
    clocks: bool = True
    """A third of the workers have clocks that jump."""
    rates: Rates = Rates()
    build: str | None = None
    """One of `tests.chaos.broken`."""
    settle_s: float = SETTLE_S
    server: Kind = "single"
    fleet: int | None = None
    """One of `FLEETS`; None: random."""
    clients: int = 0
    """Number of concurrent clients of gateways."""
    talks: int = 2
    """Number of sessions in which people talk."""
    trees: int = 1
    """Number of runs with child runs that are open at any time."""
    changes: bool = False
    """The number of partitions changes during the round."""

    @property
    def ballast(self) -> bool:
        """Whether the server's public topics have a past, and workers make room on a full server. Else a full server
        stays full.
        """
        weights = self.rates.weights
        both = "memory limit" in weights
        return self.server == "single" and "full server" in weights and (not both or crc32(self.seed.encode()) % 2 == 0)


async def play(plan: Plan, directory: Path) -> Record:
    """Play the round. ``directory`` exists, and receives the workers' logs."""
    prefix = "chaos"
    stage = Stage(plan.seed, prefix, plan.guarded, plan.hostile, plan.harmful)
    written = directory / "ledger.jsonl"
    async with AsyncExitStack() as stack:
        server: Deployed = await stack.enter_async_context(KINDS[plan.server](directory))
        provider = await stack.enter_async_context(MockProvider(choose=stage.script_for))
        harmful = await stack.enter_async_context(hostile.hostile_provider())
        to_provider = await stack.enter_async_context(Proxy(int(provider.url.rpartition(":")[2])))
        config = await _prepare(plan, prefix, directory, server, to_provider.port, harmful)
        env = {"TOKENBUS_CONFIG": str(config), ledger.PATH: str(written)}
        clocks = random.Random(f"{plan.seed}:clocks") if plan.clocks else None
        # The code that a broken build changes is in the stages' own commits: pipelines would seldom run it.
        chosen = random.Random(f"{plan.seed}:fleet").choice(FLEETS) if plan.fleet is None else FLEETS[plan.fleet]
        fleet = SEPARATE if plan.build else chosen
        kinds: tuple[WorkerKind, ...] = (*fleet, *BESIDE, *(("gateway",) if plan.clients else ()))
        workers = await stack.enter_async_context(
            Workers(directory / "logs", env, plan.build, kinds=kinds, clocks=clocks)
        )
        client = server.client
        await workers.start_ready(*workers.kinds * 2)
        tokens = ledger.tokens_of(written)
        audience = Audience(client, prefix, stage, plan.open_runs, lossy=server.lossy)
        chaos = Chaos(
            random.Random(f"{plan.seed}:faults"),
            plan.rates,
            workers,
            server,
            to_provider,
            tokens,
            audience.ask_huge,
            ballast=plan.ballast,
        )
        publishing = asyncio.create_task(audience.keep_asking())
        crowd = Crowd(workers, random.Random(f"{plan.seed}:crowd"), clients=plan.clients)
        visiting = asyncio.create_task(crowd.keep_coming())
        repartition = Repartition(client, prefix, {**os.environ, **env}, random.Random(f"{plan.seed}:change"))
        talking, planting = await _beside(stack, plan, client, server.url, prefix)
        changing = asyncio.create_task(repartition.begin(plan.seconds / 3)) if plan.changes else None
        await chaos.run(plan.seconds)
        audience.last_fault = asyncio.get_running_loop().time()
        if chaos.tally["a queue of turns deleted"]:
            audience.late_s += FOUND_S
        fresh: list[str] = []
        if changing:
            await changing
            audience.change_to(NUMBER)
            if await repartition.finish():
                fresh = await audience.ask_more(FRESH)
        audience.enough.set()
        crowd.close()
        await asyncio.gather(publishing, visiting, audience.keep_looking(until=visiting))
        said, planted = await asyncio.gather(
            talking.finish(audience.spread, plan.settle_s), planting.finish(audience.numbers, plan.settle_s)
        )
        if not await audience.all_ended(plan.settle_s):
            for worker in workers.well():
                worker.report_tasks()
        with suppress(AssertionError):  # the judge reports what still changes
            await eventually(
                lambda: observer.at_rest(client, prefix, audience.spread), timeout=min(REST_S, plan.settle_s)
            )
        keys = await observer.keys_of(client, prefix)
        living = [worker.pid for worker in workers.well()]
        await workers.stop()
        placed = places_of(keys)
        logs = {
            run: await observer.log_of(client, prefix, next(iter(placed.get(run, [])), _partition(run)), run)
            for run in dict.fromkeys([*stage.scenes, *placed])
        }
        return Record(
            seed=plan.seed,
            prefix=prefix,
            partitions=PARTITIONS,
            lossy=server.lossy,
            stories=[scene.story for scene in stage.scenes.values()],
            logs={run: log for run, log in logs.items() if run in stage.scenes or _is_of_others(log)},
            topics=await observer.topics_of(client, prefix, audience.spread),
            executions=ledger.read(written),
            holders=ledger.read(ledger.holders_of(written)),
            keys=keys,
            living=living,
            keys_after=await observer.keys_of(client, prefix),
            exits=[worker.exit() for worker in workers.all],
            complaints=_complaints(worker.log for worker in workers.all if worker.task_fault_at is None),
            provider_connections=await _none_left(lambda: provider.open_connections),
            server_connections=await _none_left(lambda: server.proxy.connections if server.proxy else 0),
            late=audience.late,
            delays=audience.delays,
            without_room=chaos.without_room,
            provider_stood_s=audience.provider_stood_s,
            huge_requests=audience.huge_requests,
            faults=dict(chaos.tally),
            change=await repartition.result(fresh) if changing else None,
            visits=crowd.visits,
            talks=said,
            trees=planted,
        )


async def _beside(
    stack: AsyncExitStack, plan: Plan, client: Any, url: str, prefix: str
) -> tuple[talks.Talks, trees.Trees]:
    """The sessions and the trees of the round."""

    def chance(what: str) -> random.Random:
        return random.Random(f"{plan.seed}:{what}")

    talking = talks.Talks(client, url, prefix, chance("talks"), sessions=plan.talks, judged=plan.guarded > 0)
    planting = trees.Trees(client, url, prefix, chance("trees"), places=plan.trees)
    return await stack.enter_async_context(talking), await stack.enter_async_context(planting)


class Audience:
    """Requests runs, cancels some, and detects when all have ended. Every command is retried until the server accepts
    it.
    """

    def __init__(self, client: Any, prefix: str, stage: Stage, open_runs: int, *, lossy: bool) -> None:
        """``lossy``: a request that the server has lost is sent again."""
        self._client = client
        self._prefix = prefix
        self._stage = stage
        self._most = open_runs
        self._lossy = lossy
        self._open: set[str] = set()
        self._asked_at: dict[str, float] = {}
        self._asked_ran_s: dict[str, float] = {}
        """The same by `_ran_s`."""
        self._waited_s = 0.0
        self._numbers = [PARTITIONS]
        self._cancelling: list[asyncio.Task[None]] = []
        self._chance = random.Random(stage.seed)
        self.enough = asyncio.Event()
        """Set: no further runs are requested."""
        self.last_fault: float | None = None
        """When all faults were repaired, by the event loop's clock."""
        self.late_s = LATE_S
        self.late: dict[str, float] = {}
        """Runs that ended too late, or had not ended when the wait timed out."""
        self.delays: dict[str, float] = {}
        self.huge_requests = 0
        self.provider_stood_s = 0.0
        """The longest pass of this process's event loop until there were enough runs."""

    @property
    def spread(self) -> int:
        """Number of partitions that may have entries."""
        return max(self._numbers)

    @property
    def numbers(self) -> list[int]:
        """The numbers of partitions that the deployment had."""
        return self._numbers

    def change_to(self, number: int) -> None:
        """Runs may be placed by this number too."""
        self._numbers.append(number)

    async def ask_more(self, count: int) -> list[str]:
        """Request this many more runs; return their names."""
        scenes = [self._stage.next() for _ in range(count)]
        for scene in scenes:
            await self._ask(scene)
        return [scene.story.run for scene in scenes]

    async def ask_huge(self, server: Single, size: int) -> bool:
        """Request a run with an entry of this size, one at a time. False if the server refused it."""
        if any(self._stage.scenes[run].story.fate == "huge" for run in self._open):
            return False
        scene, unsure, accepted = self._stage.huge(self.huge_requests), False, False
        while not accepted:
            self.huge_requests += 1
            try:
                accepted = await hostile.send_huge(server.port, f"{self._prefix}:requests", scene.request, size)
                if not accepted and not unsure:
                    return False
            except OSError:
                unsure = True  # it may have been accepted
            if not accepted:
                await asyncio.sleep(1)
        self._stage.add(scene)
        self._open.add(scene.story.run)
        self._asked_at[scene.story.run] = asyncio.get_running_loop().time()
        self._asked_ran_s[scene.story.run] = self._ran_s()
        return True

    async def keep_asking(self) -> None:
        """Keep this many runs open until enough have been published."""
        measuring = asyncio.create_task(self._measure_passes())
        while not self.enough.is_set():
            while len(self._open) < self._most:
                await self._ask(self._stage.next())
            await asyncio.sleep(_POLL_S)
            await self._look()
        measuring.cancel()
        await asyncio.gather(*self._cancelling)

    async def _measure_passes(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + 0.05
            await asyncio.sleep(0.05)
            self._waited_s += clock() - due
            self.provider_stood_s = max(self.provider_stood_s, clock() - due)

    def _ran_s(self) -> float:
        """A clock without the time in which this process waited for a processor, as its workers did."""
        return asyncio.get_running_loop().time() - self._waited_s

    async def keep_looking(self, *, until: asyncio.Task[None]) -> None:
        """Note late runs while another condition is awaited."""
        while not until.done():
            await self._look()
            await asyncio.sleep(_POLL_S)

    async def all_ended(self, seconds: float) -> bool:
        """Wait until the open runs end, until the time is over, or until no work is done for them."""
        clock = asyncio.get_running_loop().time
        until = clock() + seconds
        if self._lossy:
            self._open.update(self._stage.scenes)  # the end of a run may have been lost too
        rested_from: float | None = None
        while clock() < until:
            await self._look()
            if not self._open:
                return True
            if not await observer.at_rest(self._client, self._prefix, self.spread):
                rested_from = None
            elif rested_from is None:
                rested_from = clock()
            elif clock() - rested_from > self._lost_s():
                return False  # no worker processes them: the judge reports these runs
            await asyncio.sleep(_POLL_S)
        return False

    def _lost_s(self) -> float:
        if self._lossy:  # the longest time in which the bus detects the loss
            return LOST_S + max(ledger.TIMEOUT_S + TOOL_SLACK_S, guards.LONGEST_S + POLICY_SLACK_S)
        judged = any(self._stage.scenes[run].story.guarded for run in self._open)
        return LOST_S + FOUND_S + (guards.LONGEST_S if judged else 0.0)  # work that was deleted is found by then

    async def _ask(self, scene: Scene) -> None:
        for _ in range(2 if self._chance.random() < _TWICE else 1):
            await self._send(scene.request)
        self._open.add(scene.story.run)
        self._asked_at[scene.story.run] = asyncio.get_running_loop().time()
        self._asked_ran_s[scene.story.run] = self._ran_s()
        if scene.cancel_after_s is not None:
            self._cancelling.append(asyncio.create_task(self._cancel(scene.story.run, scene.cancel_after_s)))

    async def _cancel(self, run: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self._send({"type": "cancel", "run": run, "reason": "enough"})

    async def _send(self, request: dict[str, Any]) -> None:
        data = json.dumps(request)
        await _until_accepted(lambda: self._client.xadd(f"{self._prefix}:requests", {"__data__": data}))

    async def _look(self) -> None:
        runs = list(self._open)

        places = [(run, number) for run in runs for number in {_partition(run, n) for n in (PARTITIONS, NUMBER)}]

        async def ask() -> list[bytes | None]:
            pipe = self._client.pipeline(transaction=False)
            for run, number in places:
                pipe.hget(f"{self._prefix}:{{{number}}}:run:{run}", "status")
            return await pipe.execute()

        found: dict[str, bytes | None] = dict.fromkeys(runs)
        for (run, _), status in zip(places, await _until_accepted(ask), strict=True):
            found[run] = found[run] if found[run] in _ENDED else status or found[run]
        for run, status in found.items():
            if status in _ENDED:
                self._open.discard(run)
                if self.last_fault is None:
                    took_s = self._ran_s() - self._asked_ran_s[run]
                    self.delays[run] = round(took_s - self._stage.scenes[run].longest_s, 1)
                continue
            self._note_late(run)
            if status is None and self._lossy:
                await self._send(self._stage.scenes[run].request)

    def _note_late(self, run: str) -> None:
        """If the server may lose writes, count a run as late only after the time in which the loss is noticed."""
        if self.last_fault is None or self._lossy:
            return
        since_s = asyncio.get_running_loop().time() - max(self.last_fault, self._asked_at[run])
        if since_s > self.late_s + self._stage.scenes[run].longest_s:
            self.late[run] = round(since_s, 1)


async def _until_accepted(command: Callable[[], Awaitable[T]]) -> T:
    while True:
        try:
            return await command()
        except Exception as e:
            if not is_lost(e):
                raise
            await asyncio.sleep(0.1)


def _partition(run: str, number: int = PARTITIONS) -> int:
    return place(run, number)


def _is_of_others(log: list[Entry]) -> bool:
    """Of a run that a client of a gateway began, of a session or a tree, or in which policies judge what goes in."""
    begun = log[0].event if log else {}
    models = (MODEL, talks.MODEL, *trees.MODELS)
    return begun.get("model") in models or "judges_input_of" in (begun.get("metadata") or {})


async def _none_left(count: Callable[[], int]) -> int:
    with suppress(AssertionError):
        await eventually(lambda: count() == 0, timeout=5)
    return count()


def _complaints(logs: Iterable[Path]) -> list[str]:
    """Lines of the workers' logs that report a defect."""
    marks = (LEFT_BEHIND, "Traceback", "Task was destroyed")
    return [
        f"{log.name}: {line[:1500]}"
        for log in sorted(logs)
        for line in log.read_text(errors="replace").splitlines()
        if line.startswith(marks) or '"level": "error"' in line
    ]


async def _prepare(
    plan: Plan, prefix: str, directory: Path, server: Deployed, provider_port: int, harmful: str
) -> Path:
    """Write the settings, and the past of the server's topics; the path of the settings."""
    config = directory / "tokenbus.toml"
    config.write_text(_settings(prefix, directory, server, provider_port, harmful, ballast=plan.ballast))
    if plan.ballast and isinstance(server, Single):
        await server.put_ballast(prefix, PARTITIONS)
    return config


def _settings(
    prefix: str, directory: Path, server: Deployed, provider_port: int, harmful: str, *, ballast: bool
) -> str:
    provider = f"http://127.0.0.1:{provider_port}"
    patience = "connect_timeout_s = 2.0\nfirst_event_timeout_s = 5.0\nidle_timeout_s = 4.0"
    tables = [provider_table(api, api, provider, patience) for api in BASE_PATHS]
    tables.append(
        provider_table(CONTINUING, "openai-chat", provider, f'{patience}\nquirks = {{ continues = "message" }}')
    )
    hasty = f"{patience}\n{hostile.PATIENCE}"
    tables += [provider_table(name, api, harmful, hasty) for api, name in hostile.NAMES.items()]
    return f"""
redis_url = "{server.url}"
prefix = "{prefix}"
partitions = {PARTITIONS}
data_dir = "{directory}"
{"".join(tables)}
[tools.{LOOK["name"]}]
kind = "python"
call = "tests.chaos.ledger:look"
timeout_s = {ledger.TIMEOUT_S}

{trees.SETTINGS}
{guards.settings()}
{SETTINGS}
[retry]
max_attempts = 100
max_losses = 100
base_delay_s = 0.05
max_delay_s = 1.0

[stages]
lease_s = 1.5
tick_s = 0.15
drain_s = 2.0

[retention]
topic_entries = 10000000
full_share = {0.9 if ballast else 1.0}

[limits]
tool_slack_s = {TOOL_SLACK_S if server.lossy else 120.0}
silent_run_s = {SILENT_S}
policy_slack_s = {POLICY_SLACK_S if server.lossy else 120.0}
policy_memory_bytes = {rogue.MEMORY_BYTES}
"""
