"""A toy stage: small enough that a test computes its outputs by itself, with everything that a real one does.

A frame ``+5`` adds to the run's sum and emits the sum; ``end`` emits ``end`` and closes the run; any other
frame is poison. Each saying goes to the run's log, to `runs` and to `events`. It is numbered when it is committed,
as the parser does it: so a replay cannot know the number reached.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
from redis.exceptions import RedisError

from tests.waiting import eventually
from tokenbus.bus.keys import DATA_FIELD, Keys
from tokenbus.bus.liveness import Liveness
from tokenbus.bus.scripts import Commit
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage.logic import RunPosition, StageLogic
from tokenbus.bus.stage.stage import Stage, StageOptions
from tokenbus.events.error_info import ErrorInfo

GROUP = "toy"
NEXT = "next"
"""The group that reads the toy's `events`."""
TTL_MS = 60_000

Frames = dict[str, bytes]
Says = int | str | list[int | str]


class Tally(msgspec.Struct, array_like=True):
    """The state of a run."""

    total: int = 0
    frames: int = 0
    seq: int = 0


class ToyLogic(StageLogic):
    def __init__(self, partition: int, keys: Keys) -> None:
        self.runs: dict[str, Tally] = {}
        self._keys = keys
        self._partition = partition
        self._said: list[tuple[str, Tally, Says]] = []

    @property
    def outputs(self) -> int:
        return len(self._said)

    def apply(self, run: str, frame: bytes) -> None:
        if frame == b"end":
            if run in self.runs:
                self._say(run, "end")
                del self.runs[run]
            return
        value = int(frame)
        tally = self.runs.setdefault(run, Tally())
        tally.total += value
        tally.frames += 1
        self._say(run, tally.total)

    def fail(self, run: str, error: ErrorInfo) -> None:
        if run in self.runs:
            self._say(run, error.code)
            del self.runs[run]

    def abandon(self, run: str, error: ErrorInfo) -> None:
        self.fail(run, error)

    def is_open(self, run: str) -> bool:
        return run in self.runs

    def flush(self, commit: Commit) -> None:
        outputs, size = self._said, 0
        self.discard_outputs()
        for run, tally, what in outputs:
            data = saying(run, tally.seq, what)
            size += len(data)
            commit.publish(self._keys.log(run), f"1-{tally.seq}", data, [self._keys.topic(self._partition, "runs")])
            commit.append(self._keys.topic(self._partition, "events"), [run, data])
            tally.seq += 1
            commit.put(self._keys.run(run), "seq", tally.seq)
            commit.expire(self._keys.run(run), TTL_MS)
            commit.expire(self._keys.log(run), TTL_MS)
        if size:
            commit.arrived(self._keys.lease(self._partition, NEXT), size)

    def discard_outputs(self) -> None:
        self._said = []

    def snapshot(self, run: str) -> bytes:
        return msgspec.msgpack.encode(self.runs[run])

    def restore(self, run: str, state: bytes) -> None:
        self.runs[run] = msgspec.msgpack.decode(state, type=Tally)

    def recall(self, run: str, seq: int) -> None:
        self.runs[run].seq = seq

    def _say(self, run: str, what: Says) -> None:
        self._said.append((run, self.runs[run], what))


class JoiningLogic(ToyLogic):
    """Says once a commit and run what it could say one by one: so its numbers depend on how the input was cut."""

    def flush(self, commit: Commit) -> None:
        joined: dict[str, tuple[Tally, list[Any]]] = {}
        for run, tally, what in self._said:
            joined.setdefault(run, (tally, []))[1].append(what)
        self._said = [(run, tally, says) for run, (tally, says) in joined.items()]
        super().flush(commit)


class EndingLogic(ToyLogic):
    """Can end a run of which it knows its number alone."""

    def fail_unreadable(self, run: str, error: ErrorInfo, position: RunPosition) -> None:
        self.runs[run] = Tally(seq=position.seq)
        self.fail(run, error)


def saying(run: str, seq: int, what: Says) -> bytes:
    return msgspec.json.encode({"run": run, "seq": seq, "says": what})


@dataclass
class Outputs:
    """The outputs of the stage in one partition: those written, and those expected in every case."""

    topic: list[bytes] = field(default_factory=list[bytes])
    events: list[tuple[str, bytes]] = field(default_factory=list[tuple[str, bytes]])
    logs: defaultdict[str, list[tuple[str, bytes]]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def expected(cls, entries: Sequence[Frames]) -> Outputs:
        """Of these entries, from the first on."""
        self, sums = cls(), dict[str, int]()
        for run, frame in (pair for entry in entries for pair in entry.items()):
            if frame.startswith(b"+"):
                sums[run] = sums.get(run, 0) + int(frame)
                self._say(run, sums[run])
            elif run in sums:
                del sums[run]
                self._say(run, "end" if frame == b"end" else "poison")
        return self

    def _say(self, run: str, what: Says) -> None:
        seq = len(self.logs[run])
        data = saying(run, seq, what)
        self.topic.append(data)
        self.events.append((run, data))
        self.logs[run].append((f"1-{seq}", data))

    @classmethod
    async def of(cls, server: Server, keys: Keys, partition: int) -> Outputs:
        self, client = cls(), server.client
        for _, fields in await client.xrange(keys.topic(partition, "runs")):
            self.topic.append(fields[DATA_FIELD.encode()])
        for _, fields in await client.xrange(keys.topic(partition, "events")):
            self.events += [(run.decode(), data) for run, data in fields.items()]
        for run in {run for run, _ in self.events}:
            log = await client.xrange(keys.log(run))
            self.logs[run] = [(entry_id.decode(), fields[DATA_FIELD.encode()]) for entry_id, fields in log]
        return self


class Bench:
    """A group of toy workers over a few partitions: feeds them, and says when they are through."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self.server = server
        self.keys = keys
        self.entries: dict[int, list[Frames]] = {p: [] for p in range(keys.partitions)}
        self.last: dict[int, str] = dict.fromkeys(range(keys.partitions), "0-0")

    def runs(self, partition: int, number: int, prefix: str = "r") -> list[str]:
        names = (f"{prefix}{i}" for i in count())
        of_partition = (name for name in names if self.keys.partition_of(name) == partition)
        return [name for name, _ in zip(of_partition, range(number), strict=False)]

    async def feed(self, partition: int, *entries: Frames) -> None:
        """Write input, and count it as arrived."""
        pipe = self.server.client.pipeline(transaction=True)
        for entry in entries:
            pipe.xadd(self.keys.topic(partition, "raw"), entry)
        size = sum(len(frame) for entry in entries for frame in entry.values())
        pipe.hincrby(self.keys.lease(partition, GROUP), "arrived", size)
        *ids, _ = await pipe.execute()
        self.last[partition] = ids[-1].decode()
        self.entries[partition] += entries

    def stage(self, worker: str, server: Server | None = None, **options: Any) -> Stage:
        """A worker, not open yet; quick to notice a dead one. ``logics``: where to put what it makes, by partition."""
        logics: dict[int, ToyLogic] = options.pop("logics", {})
        kind: type[ToyLogic] = options.pop("logic", ToyLogic)
        liveness: Liveness | None = options.pop("liveness", None)

        def logic(partition: int) -> ToyLogic:
            made = logics[partition] = kind(partition, self.keys)
            return made

        quick: dict[str, Any] = {"lease_s": 0.4, "tick_s": 0.02, "max_records": 3}
        how = StageOptions(group=GROUP, topic="raw", worker=worker, downstream=NEXT, **quick | options)
        return Stage(server or self.server, self.keys, how, logic, liveness=liveness)

    async def offset(self, partition: int, server: Server | None = None) -> str:
        found = await (server or self.server).client.hget(self.keys.lease(partition, GROUP), "offset")
        return found.decode() if found else "0-0"

    async def through(self, server: Server | None = None) -> bool:
        """Whether all that was fed is committed, and nothing of it is owed."""
        client = (server or self.server).client
        for partition, last in self.last.items():
            offset, owed = await client.hmget(self.keys.lease(partition, GROUP), "offset", "owed")
            if offset != last.encode() or owed:
                return False
        return True

    async def finish(self, worker: str = "last", **options: Any) -> None:
        """Let a worker do what is left."""
        async with working(self.stage(worker, **options)):
            await eventually(self.through)

    async def dead_letter(self) -> None:
        """The time in which dead workers' leases run out, made short."""
        await self.server.client.delete(self.keys.members(GROUP))
        for partition in range(self.keys.partitions):
            await self.server.client.hset(self.keys.lease(partition, GROUP), "until", 0)

    async def check(self) -> None:
        """The outputs are those of an undisturbed stage."""
        for partition, entries in self.entries.items():
            assert await Outputs.of(self.server, self.keys, partition) == Outputs.expected(entries)

    async def check_joined(self) -> None:
        """However they are cut, the sayings are those of an undisturbed stage, once each and without a gap."""
        for partition, entries in self.entries.items():
            found = await Outputs.of(self.server, self.keys, partition)
            for run, undisturbed in Outputs.expected(entries).logs.items():
                ids, written = zip(*found.logs[run], strict=True)
                assert ids == tuple(f"1-{n}" for n in range(len(ids)))
                assert [data for name, data in found.events if name == run] == list(written)
                events = [msgspec.json.decode(data) for data in written]
                assert [event["seq"] for event in events] == list(range(len(events)))
                expected = [msgspec.json.decode(data)["says"] for _, data in undisturbed]
                assert [what for event in events for what in event["says"]] == expected


@asynccontextmanager
async def working(stage: Stage, *, opened: bool = False) -> AsyncGenerator[Stage]:
    """The stage at work until the block ends; then closed in order."""
    if not opened:
        await stage.open()
    task = asyncio.create_task(work(stage))
    try:
        yield stage
    finally:
        await stage.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def work(stage: Stage) -> None:
    while True:
        try:
            await stage.process(await stage.read())
        except (RedisError, OSError):
            await asyncio.sleep(0.01)


class Toiler:
    """A stage that a test can stop at any step."""

    def __init__(self, stage: Stage) -> None:
        self.open = stage.open
        self.close = stage.close
        self._stage = stage

    async def work(self) -> None:
        await work(self._stage)
