"""The short way: a flush, and what two stages commit on it, in one script; and what happens if the script refuses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import ResponseError

from tests.contract.bus.faults import Doomed, Fault
from tests.contract.bus.state import everything, put_back
from tests.contract.bus.toys import GROUP, NEXT, ToyLogic, work
from tests.waiting import eventually
from tokenbus.bus.keys import DATA_FIELD, Keys
from tokenbus.bus.scripts import Commit, RawPart, append_raw, cancel
from tokenbus.bus.scripts.script import declared
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage import input as stage_input
from tokenbus.bus.stage import partition
from tokenbus.bus.stage.chain import Chain, Flush
from tokenbus.bus.stage.commits import LOST_WRITES
from tokenbus.bus.stage.stage import Batch, Stage, StageLogic, StageOptions
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import Control, encode


class PassingOn(StageLogic):
    """The first stage: hands each frame on, and knows how many of a run came."""

    def __init__(self, partition: int, keys: Keys) -> None:
        self.runs: dict[str, int] = {}
        self._events, self._lease = keys.topic(partition, "events"), keys.lease(partition, NEXT)
        self._said: list[tuple[str, bytes]] = []

    def apply(self, run: str, frame: bytes) -> None:
        if frame == b"poison":
            raise ValueError(frame)
        self.runs[run] = self.runs.get(run, 0) + 1
        if frame != b"nothing":
            self._said.append((run, frame))
        if frame == b"end":
            del self.runs[run]

    @property
    def outputs(self) -> int:
        return len(self._said)

    def fail(self, run: str, error: ErrorInfo) -> None:
        self._said.append((run, b"end"))
        self.runs.pop(run, None)

    abandon = fail

    def is_open(self, run: str) -> bool:
        return run in self.runs

    def flush(self, commit: Commit) -> None:
        for run, frame in self._said:
            commit.append(self._events, [run, frame])
            commit.arrived(self._lease, len(frame))
        self._said = []

    def discard_outputs(self) -> None:
        self._said = []

    def snapshot(self, run: str) -> bytes:
        return str(self.runs[run]).encode()

    def restore(self, run: str, state: bytes) -> None:
        self.runs[run] = int(state)


class Summing(ToyLogic):
    """The second stage: what it says goes to logs and to `runs`."""

    def flush(self, commit: Commit) -> None:
        for run, tally, what in self._said:
            data = f"{what}".encode()
            commit.publish(self._keys.log(run), f"1-{tally.seq}", data, [self._keys.topic(self._partition, "runs")])
            tally.seq += 1
            commit.put(self._keys.run(run), "seq", tally.seq)
        self.discard_outputs()


class Scene:
    """One partition, its two stages in one worker, and runs that are open."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self.server = server
        self.keys = keys
        self.frames: dict[str, int] = {}
        self.raw, self.events = keys.topic(0, "raw"), keys.topic(0, "events")

    def stages(self, worker: str, server: Server | None = None) -> tuple[Stage, Stage]:
        server = server or self.server
        first = StageOptions(group=GROUP, topic="raw", worker=worker, tick_s=0.02)
        second = StageOptions(group=NEXT, topic="events", worker=worker, tick_s=0.02)
        return (
            Stage(server, self.keys, first, lambda p: PassingOn(p, self.keys)),
            Stage(server, self.keys, second, lambda p: Summing(p, self.keys)),
        )

    async def open_runs(self, *runs: str) -> None:
        for run in runs:
            await self.server.client.hset(self.keys.run(run), mapping={"status": "open", "attempt": 1, "raw": 0})
            self.frames[run] = 0

    def part(self, run: str, frame: bytes, n: int | None = None, writer: str = "w") -> RawPart:
        n = self.frames[run] if n is None else n
        return RawPart(run, self.keys.run(run), 1, n, frame == b"end", frame, writer)

    async def long_way(self, *parts: RawPart) -> list[Any]:
        return await run_script(self.server, append_raw(self.raw, self.keys.lease(0, GROUP), parts))

    async def log(self, run: str) -> list[str]:
        found = await self.server.client.xrange(self.keys.log(run))
        return [fields[DATA_FIELD.encode()].decode() for _, fields in found]

    async def offsets(self) -> list[str]:
        """Of both stages, with the last entry of both inputs."""
        client, found = self.server.client, list[str]()
        for stream, group in ((self.raw, GROUP), (self.events, NEXT)):
            found.append((await client.hget(self.keys.lease(0, group), "offset")).decode())
            last = await client.xrevrange(stream, count=1)
            found.append(last[0][0].decode() if last else "0-0")
        return found

    async def at_rest(self) -> bool:
        raw, last_raw, events, last_event = await self.offsets()
        return raw == last_raw and events == last_event

    @asynccontextmanager
    async def worker(
        self, name: str = "both", server: Server | None = None, *, driven: bool = False
    ) -> AsyncGenerator[Chained]:
        """``driven``: the test itself calls `read` and `process`."""
        first, second = self.stages(name, server)
        await second.open()
        await first.open()
        await eventually(lambda: first.owned == second.owned == [0])
        tasks = [asyncio.create_task(work(stage)) for stage in (first, second) if not driven]
        counted: list[tuple[Stage, int]] = []
        chain = Chain(
            server or self.server,
            self.keys,
            first,
            second,
            on_commit=lambda stage, entries, seconds: counted.append((stage, entries)),
        )
        try:
            yield Chained(self, chain, first, second, counted)
        finally:
            await first.close()
            await second.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Chained:
    """A worker of both stages."""

    def __init__(
        self, scene: Scene, chain: Chain, first: Stage, second: Stage, counted: list[tuple[Stage, int]]
    ) -> None:
        self.scene, self.chain, self.first, self.second = scene, chain, first, second
        self.counted = counted

    async def write(self, **frames: bytes) -> str:
        """Write the runs' next frames as a fetcher does: the short way, else the long way. Which it was."""
        parts = [self.scene.part(run, frame) for run, frame in frames.items()]
        [reply] = await self.chain.write([Flush(0, parts)])
        way = "short"
        if reply is None:
            way, reply = "long", await self.scene.long_way(*parts)
        for part, verdict in zip(parts, reply, strict=False):
            if verdict in (b"ok", b"already"):
                self.scene.frames[part.run] += 1
        return way

    async def until_short(self, **frames: bytes) -> None:
        """Write the same frames until they go the short way."""

        async def short() -> bool:
            return await self.write(**frames) == "short"

        await eventually(short)


@pytest.fixture
async def scene(server: Server, keys: Keys) -> Scene:
    made = Scene(server, Keys(f"{keys.prefix}-{uuid4().hex[:6]}", 1))
    await made.open_runs("a", "b")
    return made


def before_script(server: Server, do: Callable[[], Awaitable[object]], name: str = "chain") -> None:
    """Once, just before the script of this name is sent: do this."""
    client, waiting = server.client, [do]
    send = client.execute_command

    async def execute_command(*args: Any, **options: Any) -> Any:
        if waiting and script_of(args) == name:
            await waiting.pop()()
        return await send(*args, **options)

    client.execute_command = execute_command


def script_of(args: tuple[Any, ...]) -> str:
    """The name of the script that the command runs, if any."""
    found = (name for name, one in declared.items() if args[1:] and args[1] in (one.script.sha, one.script.text))
    return next(found, "")


async def test_a_flush_is_written_with_what_both_stages_make_of_it(scene: Scene) -> None:
    async with scene.worker() as both:
        await both.until_short(a=b"+1")
        assert await both.write(a=b"+2", b=b"+5") == "short"
        assert await both.write(a=b"nothing") == "short"
        assert await scene.at_rest(), "offsets stand at what was written"
        assert await both.write(a=b"end") == "short"
        assert (await scene.log("a"))[-2:] == [str(1 * (scene.frames["a"] - 3) + 2), "end"]
        assert await scene.log("b") == ["5"]
        lease = await scene.server.client.hmget(scene.keys.lease(0, GROUP), "arrived", "done")
        assert lease[0] == lease[1]
        lease = await scene.server.client.hmget(scene.keys.lease(0, NEXT), "arrived", "done")
        assert lease[0] == lease[1]


async def test_what_a_flush_commits_is_counted_for_both_stages(scene: Scene) -> None:
    async with scene.worker() as both:
        await both.until_short(a=b"+1")
        both.counted.clear()
        assert await both.write(a=b"+2", b=b"+5") == "short"
        assert both.counted == [(both.first, 1), (both.second, 2)], "the first stage hands on an entry a run"
        assert await both.write(a=b"nothing") == "short"
        assert both.counted[2:] == [(both.first, 1), (both.second, 0)]


async def test_entries_of_other_runs_that_came_in_between_are_taken_in(scene: Scene) -> None:
    async with scene.worker() as both:
        await both.until_short(a=b"+1")
        before = scene.frames["a"]

        async def others() -> None:
            await scene.long_way(scene.part("b", b"+7"))
            await scene.server.client.xadd(scene.events, {"b": b"+3"})

        # The stages read them too; whichever is first, each is applied once.
        before_script(scene.server, others)
        assert await both.write(a=b"+1") == "short"
        await eventually(scene.at_rest)
        assert (await scene.log("a"))[-1] == str(before + 1)
        assert await scene.log("b") == ["3", "10"]


async def test_a_second_entry_of_the_run_sends_the_flush_through_the_stream(scene: Scene) -> None:
    async with scene.worker() as both:
        await both.until_short(a=b"+1")
        before = scene.frames["a"]
        before_script(scene.server, lambda: scene.server.client.xadd(scene.events, {"a": b"+100"}))
        assert await both.write(a=b"+1") == "long"
        await eventually(scene.at_rest)
        await both.until_short(b=b"+1")
        assert (await scene.log("a"))[-2:] == [str(before + 100), str(before + 101)], "in the order of the log"


async def test_a_run_that_was_cancelled_is_refused_and_its_state_rebuilt(scene: Scene) -> None:
    keys = scene.keys
    async with scene.worker() as both:
        await both.until_short(a=b"+1")
        before = scene.frames["a"]
        call = cancel(
            keys.run("a"),
            scene.events,
            scene.raw,
            keys.topic(0, "control"),
            parser_lease=keys.lease(0, NEXT),
            normalizer_lease=keys.lease(0, GROUP),
            run="a",
            awaited_ms=1000,
            frame=b"end",
            control_frame=encode(Control("a")),
        )
        before_script(scene.server, lambda: run_script(scene.server, call))
        assert await both.write(a=b"+1", b=b"+4") == "long"
        await eventually(scene.at_rest)
        assert (await scene.log("a"))[-2:] == [str(before), "end"], "the frame after the cancel was not applied"
        await both.until_short(b=b"+1")
        assert (await scene.log("b"))[0] == "4"


async def test_a_fail_over_that_a_rebuild_finds_ends_the_runs_whose_lost_events_were_seen(scene: Scene) -> None:
    async with scene.worker() as both:
        await both.until_short(a=b"+1", b=b"+1")
        past = await everything(scene.server, scene.keys)
        assert await both.write(a=b"+1") == "short"
        before = await scene.log("a")

        async def fail_over() -> None:
            await put_back(scene.server, scene.keys, past)
            raise ResponseError("WRONGTYPE simulated")  # the flush is given up, and says nothing of the offset

        before_script(scene.server, fail_over)
        assert await both.write(a=b"+1") == "long"

        async def ended() -> bool:
            return await scene.log("a") == [*before, LOST_WRITES.code]

        await eventually(ended)
        await both.write(b=b"+1")
        await eventually(scene.at_rest)
        assert await scene.log("b") == ["1", "2"]


async def test_another_writer_of_the_attempt_is_refused(scene: Scene) -> None:
    async with scene.worker() as both:
        await both.until_short(a=b"+1")
        other = [scene.part("a", b"+1", writer="other")]
        assert await both.chain.write([Flush(0, other)]) == [None]
        assert (await scene.long_way(*other))[0].startswith(b"writer ")
        await both.until_short(a=b"+1")


async def test_a_lost_reply_is_answered_already(scene: Scene) -> None:
    async with scene.worker() as both:
        await both.until_short(a=b"+1")
        before = scene.frames["a"]
        client, lost = scene.server.client, [True]
        send = client.execute_command

        async def execute_command(*args: Any, **options: Any) -> Any:
            reply = await send(*args, **options)
            if lost and script_of(args) == "chain":
                lost.pop()
                raise ConnectionLost("the reply is lost")
            return reply

        client.execute_command = execute_command
        assert await both.write(a=b"+1") == "short"
        assert not lost
        assert await both.write(a=b"+1") == "short"
        assert (await scene.log("a"))[-2:] == [str(before + 1), str(before + 2)]


@pytest.mark.parametrize("group", [GROUP, NEXT])
async def test_a_fenced_stage_loses_the_partition_and_the_attempt_continues(scene: Scene, group: str) -> None:
    async with scene.worker() as both:
        await both.until_short(a=b"+1")
        before = scene.frames["a"]
        lease = scene.keys.lease(0, group)
        before_script(
            scene.server,
            lambda: scene.server.client.hset(
                lease, mapping={"token": "9999999999999:other", "owner": "other", "until": 0}
            ),
        )
        assert await both.write(a=b"+1") == "long"
        await both.until_short(b=b"+1")  # once the lease is taken again
        assert (await scene.log("a"))[-1] == str(before + 1)


async def test_poison_takes_the_long_path_and_ends_only_its_run(scene: Scene) -> None:
    async with scene.worker() as both:
        await both.until_short(a=b"+1")
        assert await both.write(a=b"+1", b=b"poison") == "long"
        await eventually(lambda: scene.server.client.xlen(scene.keys.dead))
        await eventually(scene.at_rest)
        await both.until_short(a=b"+1")
        assert (await scene.log("a"))[-1] == str(scene.frames["a"])


async def test_a_key_of_another_type_delays_nothing(scene: Scene) -> None:
    async with scene.worker() as both:
        await both.until_short(a=b"+1")
        await scene.server.client.set(scene.keys.log("b"), "alien")
        assert await both.write(a=b"+1", b=b"+1") == "long"
        await eventually(scene.at_rest)
        assert (await scene.log("a"))[-1] == str(scene.frames["a"])


async def test_another_worker_follows_at_any_entry(scene: Scene) -> None:
    for n in range(4):
        async with scene.worker(f"w{n}") as both:
            await both.until_short(a=b"+1")
            assert await both.write(a=b"+1", b=b"+2") == "short"
    assert (await scene.log("a"))[-1] == str(scene.frames["a"])
    assert await scene.log("b") == ["2", "4", "6", "8"]


FAULTS: list[Fault] = ["dies after", "freezes before", "freezes after", "is not sent", "loses its reply"]
WRITTEN = [{"a": b"+1"}, {"a": b"+2", "b": b"+3"}, {"b": b"+4"}, {"a": b"+5", "b": b"+6"}, {"a": b"end", "b": b"end"}]
MOST_COMMANDS = 10_000


class Writing:
    """A worker that writes everything by the short path if possible, and reports its current frame."""

    def __init__(self, scene: Scene, server: Server, frames: dict[str, int]) -> None:
        self._made = Scene(server, scene.keys)
        self._made.frames = frames
        self._worker: Any = None

    async def open(self) -> None:
        self._worker = self._made.worker("doomed", self._made.server)
        self._both = await self._worker.__aenter__()

    async def work(self) -> None:
        for frames in WRITTEN:
            await self._both.write(**frames)

    async def close(self) -> None:
        await self._worker.__aexit__(None, None, None)


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_worker_that_is_stopped_at_any_command_is_followed(server: Server, keys: Keys, fault: Fault) -> None:
    """Another worker then has exactly what was written, once; the frames that were not are the fetcher's to close."""

    async def stopped_at(at: int) -> int:
        scene = Scene(server, Keys(f"{keys.prefix}-{at}", 1))
        await scene.open_runs("a", "b")
        doomed = Doomed(server.url.safe, fault, at)

        async def over(observer: Server) -> bool:
            return await observer.client.hget(scene.keys.run("a"), "closed") == b"1"

        victim = dict(scene.frames)
        running = asyncio.create_task(doomed.run(lambda own: Writing(scene, own, victim), over))
        await eventually(lambda: running.done() or doomed.reached.is_set())

        async def follow(name: str) -> None:
            for group in (GROUP, NEXT):
                await server.client.delete(scene.keys.members(group))
                await server.client.hset(scene.keys.lease(0, group), "until", 0)
            async with scene.worker(name):
                await eventually(scene.at_rest)

        if fault.startswith("freezes") and doomed.reached.is_set():
            await follow("other")
            doomed.thaw()
        await running
        await follow("last")
        await _as_written(scene)
        return doomed.commands

    commands = await stopped_at(MOST_COMMANDS)
    assert 10 < commands < MOST_COMMANDS
    at_once = asyncio.Semaphore(4)

    async def one(at: int) -> None:
        async with at_once:
            try:
                await stopped_at(at)
            except AssertionError as e:
                raise AssertionError(f"stopped at command {at}") from e

    async with asyncio.TaskGroup() as group:
        for at in range(commands):
            group.create_task(one(at))


async def _as_written(scene: Scene) -> None:
    """Everything in `raw` was applied once: for each run it is a prefix of the frames to write."""
    client = scene.server.client
    for run in ("a", "b"):
        frames = int(await client.hget(scene.keys.run(run), "raw"))
        expected, total = list[str](), 0
        for frame in [entry[run] for entry in WRITTEN if run in entry][:frames]:
            total += 0 if frame == b"end" else int(frame)
            expected.append("end" if frame == b"end" else str(total))
        assert await scene.log(run) == expected
        published = [fields[DATA_FIELD.encode()] for _, fields in await client.xrange(scene.keys.topic(0, "runs"))]
        assert len(published) == len(await scene.log("a")) + len(await scene.log("b"))


@pytest.mark.parametrize("seed", range(12))
async def test_each_entry_is_applied_once_and_in_order_however_reads_and_flushes_alternate(
    scene: Scene, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs by itself here: the seed decides when each stage reads, when it processes what it read, and what is
    written meanwhile, by the short path or into either stream. Batches end after two outputs, rounds after a few bytes.
    """
    monkeypatch.setattr(partition, "ROUND_OUTPUTS", 2)
    monkeypatch.setattr(stage_input, "ROUND_BYTES", 8)
    chance, runs = random.Random(seed), [f"r{n}" for n in range(4)]
    await scene.open_runs(*runs)
    sums: dict[str, int] = dict.fromkeys(runs, 0)
    expected: dict[str, list[str]] = {run: [] for run in runs}
    held: dict[Stage, list[Batch]] = {}
    ways: list[str] = []

    def frame(run: str) -> bytes:
        number = chance.randint(1, 9)
        sums[run] += number
        expected[run].append(str(sums[run]))
        return b"+%d" % number

    async def step(both: Chained) -> None:
        stage = chance.choice([both.first, both.second])
        match chance.choice(("read", "read", "process", "short", "raw", "raw", "raw")):
            case "read":
                held[stage] = await stage.read(block_ms=1)
            case "process":
                await stage.process(held.pop(stage, []))
            case "short":
                names = chance.sample(runs, chance.randint(1, 3))
                ways.append(await both.write(**{run: frame(run) for run in names}))
            case _:  # what another fetcher writes
                for _ in range(chance.randint(1, 4)):
                    run = chance.choice(runs)
                    [verdict, *_] = await scene.long_way(scene.part(run, frame(run)))
                    assert verdict == b"ok"
                    scene.frames[run] += 1

    async def drained(both: Chained) -> bool:
        for stage in (both.first, both.second):
            await stage.process(await stage.read(block_ms=1))
        return await scene.at_rest()

    async with scene.worker(driven=True) as both:
        for _ in range(150):
            await step(both)
        await eventually(lambda: drained(both))
        await both.until_short(a=b"+1")
    assert {run: await scene.log(run) for run in runs} == expected
    assert {"short", "long"} >= set(ways)
