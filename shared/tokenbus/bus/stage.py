"""The ordered stage: one live owner a partition, exactly-once commits, state by replay.

A stage reads each partition it owns with plain XREAD from the committed offset, feeds the entries to the
partition's pure `Logic`, and commits outputs and offset with one script (scripts.py). What the logic holds in
memory is a function of the entries from the low watermark on, so a new owner re-reads them with output off and
goes on where its predecessor stood. Long open runs are checkpointed with a commit now and then, so that a replay
stays short; the work of that is linear in the input.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from tokenbus.bus import scripts
from tokenbus.bus.keys import DATA_FIELD, InternalTopic, Keys
from tokenbus.bus.leases import Lease, Leases
from tokenbus.bus.outage import outlast
from tokenbus.bus.reader import Entry, Reader, id_key
from tokenbus.bus.scripts import Commit
from tokenbus.bus.send import send_many
from tokenbus.bus.server import Server
from tokenbus.events.failure import ErrorInfo

log = logging.getLogger(__name__)

REPLAY_PAGE = 200
CHECKPOINT_SPAN = 2 * 2**20
MAX_CHECKPOINT_SPAN = 8 * 2**20
PAUSED_POLL_MS = 20


class Logic(Protocol):
    """What a stage does with one partition's entries: pure, deterministic, no clock."""

    def take(self, run: str, frame: bytes) -> None:
        """Work one frame of a run into the state and the outputs. May raise: then `fail` follows."""
        ...

    def fail(self, run: str, error: ErrorInfo) -> None:
        """The run's frame was poison: end it, within the state. Must not raise."""
        ...

    def is_open(self, run: str) -> bool:
        """Whether anything is remembered of the run, so that a replay must begin before it."""
        ...

    def flush(self, commit: Commit) -> None:
        """Put the outputs gathered since the last flush or `mute` into the commit."""
        ...

    def mute(self) -> None:
        """Forget the outputs gathered: they were committed by an earlier owner."""
        ...

    def snapshot(self, run: str) -> bytes:
        """The state of an open run."""
        ...

    def restore(self, run: str, state: bytes) -> None:
        """The opposite of `snapshot`."""
        ...

    def recall(self, run: str, seq: int) -> None:
        """What the run's hash says was the next ``seq`` at the committed offset: a replay cannot know it."""
        ...


class Batch(msgspec.Struct, frozen=True):
    """What one read gave of one partition, after offset ``begin``."""

    partition: int
    begin: str
    entries: list[Entry]


class _Partition:
    """A partition in hand: its lease, its logic, and since when each open run must be replayed."""

    def __init__(self, lease: Lease, logic: Logic) -> None:
        self.number = lease.partition
        self.token = lease.token
        self.offset = lease.offset
        self.logic = logic
        self.consumed = 0
        self.since: OrderedDict[str, tuple[str, int]] = OrderedDict()
        """Run -> (offset before its first entry or its checkpoint, bytes consumed by then), oldest first."""
        self.saved: dict[str, int] = {}
        """Run -> size of its checkpoint."""
        self.changed: set[str] = set()
        """Runs with entries after their checkpoint."""
        self.paused = False

    @property
    def watermark(self) -> str:
        return next(iter(self.since.values()))[0] if self.since else self.offset


class Stage:
    """One worker's part of an ordered stage. Call `open`, then `read` and `process` in turn, then `close`."""

    def __init__(
        self,
        server: Server,
        keys: Keys,
        *,
        group: str,
        topic: InternalTopic,
        worker: str,
        logic: Callable[[int], Logic],
        downstream: str | None = None,
        lag_bytes: int = 8 * 2**20,
        lease_s: float = 3.0,
        tick_s: float = 0.25,
        max_records: int = 256,
        topic_entries: int = 50_000,
        dead_entries: int = 10_000,
        entries_read: bool = True,
    ) -> None:
        """``downstream`` names the group that reads the outputs: while it lags by more than ``lag_bytes``, its
        partition is not read. ``entries_read``: the server knows XGROUP SETID … ENTRIESREAD (Redis 7)."""
        self._server = server
        self._keys = keys
        self._group = group
        self._topic: InternalTopic = topic
        self._logic = logic
        self._downstream = downstream
        self._lag_bytes = lag_bytes
        self._ttl_ms = int(lease_s * 1000)
        self._topic_entries = topic_entries
        self._dead_entries = dead_entries
        self._entries_read = entries_read
        self._parts: dict[int, _Partition] = {}
        self._by_stream: dict[str, int] = {}
        self._loading: dict[int, asyncio.Task[None]] = {}
        self._working = asyncio.Lock()
        self._reader = Reader(server, count=max_records)
        self._leases = Leases(
            server,
            keys,
            group=group,
            topic=topic,
            worker=worker,
            taken=self._taken,
            gone=self._gone,
            ttl_s=lease_s,
            tick_s=tick_s,
        )

    @property
    def owned(self) -> list[int]:
        """The partitions that this worker works on now."""
        return sorted(self._parts)

    @property
    def healthy(self) -> bool:
        """Whether the worker reaches the server."""
        return self._leases.healthy

    async def open(self) -> None:
        """Sign on and take a first share of the partitions. Raises what redis-py raises."""
        await self._leases.open()

    async def close(self) -> None:
        """Commit what is in hand, give the partitions up at once, stop reading."""
        await self._leases.close()
        for task in self._loading.values():
            task.cancel()
        await asyncio.gather(*self._loading.values(), return_exceptions=True)
        await self._reader.close()

    async def read(self, *, block_ms: int = 2000) -> list[Batch]:
        """New entries by partition, empty after ``block_ms`` or a change of partitions. Raises what redis-py raises."""
        paused = [p for p in self._parts.values() if p.paused]
        if paused:
            await self._look_at_lag(paused)
            block_ms = min(block_ms, PAUSED_POLL_MS)
        offsets = {self._stream(p.number): p.offset for p in self._parts.values() if not p.paused}
        found = await self._reader.read(offsets, block_ms=block_ms)
        return [
            Batch(self._by_stream[stream], offsets[stream], entries)
            for stream, entries in found
            if stream in offsets and stream in self._by_stream
        ]

    async def process(self, batches: Sequence[Batch]) -> None:
        """Work the batches of `read` in and commit it; returns when it is committed or its lease is lost.

        While the server is away the same commit is tried again: it writes once, whatever was lost.
        """
        async with self._working:
            commits = [
                (part, self._work(part, batch.entries))
                for batch in batches
                # The partition may have gone, and even come back, since the read.
                if (part := self._parts.get(batch.partition)) and part.offset == batch.begin
            ]
            for part, poison in [(p, dead) for p, (_, dead) in commits if dead]:
                await self._bury(part, poison)
            await self._commit([(part, call) for part, (call, _) in commits])

    # --- one batch --------------------------------------------------------------------------------------------

    def _work(self, part: _Partition, entries: list[Entry]) -> tuple[scripts.Call, list[tuple[str, str, bytes, str]]]:
        begin, touched, size, dead = part.offset, set[str](), 0, list[tuple[str, str, bytes, str]]()
        for entry_id, fields in entries:
            size += self._feed(part, entry_id.decode(), fields, touched, dead)
        end = entries[-1][0].decode()
        commit = Commit(self._keys.lease(part.number, self._group), self._stream(part.number))
        part.logic.flush(commit)
        self._follow(part, touched, begin, commit)
        part.offset = end
        part.consumed += size
        self._checkpoint(part, commit)
        call = commit.call(
            token=part.token,
            ttl_ms=self._ttl_ms,
            begin=begin,
            end=end,
            watermark=part.watermark,
            entries=len(entries),
            size=size,
            mirror=self._group,
            entries_read=self._entries_read,
            topic_entries=self._topic_entries,
        )
        return call, dead

    def _feed(
        self,
        part: _Partition,
        entry_id: str,
        fields: dict[bytes, bytes],
        touched: set[str],
        dead: list[tuple[str, str, bytes, str]] | None,
    ) -> int:
        size = 0
        for name, frame in fields.items():
            run = name.decode(errors="replace")
            size += len(frame)
            if dead is None and (kept := part.since.get(run)) and id_key(entry_id) <= id_key(kept[0]):
                continue  # a replay, and the run's checkpoint holds this entry already
            touched.add(run)
            try:
                part.logic.take(run, frame)
            except Exception as e:  # whatever a poison frame raises must not stop the partition
                reason = f"{type(e).__name__}: {e}"
                part.logic.fail(run, ErrorInfo(code="poison", kind="internal", message=reason, where=f"{self._topic} {entry_id}"))
                if dead is not None:
                    dead.append((run, entry_id, frame, reason))
        return size

    def _follow(self, part: _Partition, touched: set[str], begin: str, commit: Commit) -> None:
        """Keep account of which runs are open since when."""
        for run in touched:
            if part.logic.is_open(run):
                part.since.setdefault(run, (begin, part.consumed))
                part.changed.add(run)
                continue
            part.since.pop(run, None)
            part.changed.discard(run)
            if part.saved.pop(run, None) is not None:
                commit.drop(self._keys.state(part.number, self._group), run)

    def _checkpoint(self, part: _Partition, commit: Commit) -> None:
        """Move the watermark on where a replay would grow long, oldest runs first.

        The span between checkpoints grows with the state there is to write, so that the writing stays
        linear in the input; the cap keeps a replay under a second.
        """
        span = min(max(CHECKPOINT_SPAN, sum(part.saved.values())), MAX_CHECKPOINT_SPAN)
        while part.since:
            run, (_, consumed) = next(iter(part.since.items()))
            if part.consumed - consumed <= span:
                return
            if run in part.changed:
                state = part.logic.snapshot(run)
                saved = msgspec.msgpack.encode((part.offset, state))
                commit.put(self._keys.state(part.number, self._group), run, saved)
                part.saved[run] = len(saved)
                part.changed.discard(run)
            part.since[run] = (part.offset, part.consumed)
            part.since.move_to_end(run)

    async def _bury(self, part: _Partition, dead: list[tuple[str, str, bytes, str]]) -> None:
        """Poison goes to the dead stream before the commit: a crash between may show it twice, never lose it."""
        for run, entry_id, frame, reason in dead:
            entry = {
                "run": run,
                "reason": reason,
                "stage": self._group,
                "stream": self._stream(part.number),
                "entry": entry_id,
                "bytes": frame,
            }
            data = msgspec.json.encode(entry)
            await outlast(
                lambda data=data: self._server.client.xadd(
                    self._keys.dead, {DATA_FIELD: data}, maxlen=self._dead_entries, approximate=True
                ),
                what=f"dead entry of {self._group}",
            )

    async def _commit(self, commits: list[tuple[_Partition, scripts.Call]]) -> None:
        if not commits:
            return
        calls = [call for _, call in commits]
        replies = await outlast(lambda: send_many(self._server, calls), what=f"commit of {self._group}")
        for (part, _), reply in zip(commits, replies, strict=True):
            if reply[0] in (b"fenced", b"moved"):
                # Another owner wrote on: what this worker remembers of the partition is void.
                self._leases.forget(part.number)
                self._remove(part.number)
            elif any(lag > self._lag_bytes for lag in reply[2:]):
                part.paused = True

    async def _look_at_lag(self, paused: list[_Partition]) -> None:
        assert self._downstream
        for part in paused:
            arrived, done = await self._server.client.hmget(
                self._keys.lease(part.number, self._downstream), ["arrived", "done"]
            )
            part.paused = int(arrived or 0) - int(done or 0) > self._lag_bytes // 2

    # --- partitions come and go -------------------------------------------------------------------------------

    def _taken(self, lease: Lease) -> None:
        task = asyncio.create_task(self._load(lease), name=f"replay {self._group} {lease.partition}")
        self._loading[lease.partition] = task

    async def _gone(self, partition: int) -> None:
        if task := self._loading.pop(partition, None):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        async with self._working:
            self._remove(partition)

    def _remove(self, partition: int) -> None:
        if self._parts.pop(partition, None):
            del self._by_stream[self._stream(partition)]
            self._reader.wake()

    async def _load(self, lease: Lease) -> None:
        """Rebuild the partition's state, then begin to read it."""
        try:
            part = await outlast(lambda: self._replay(lease), what=f"replay of {self._group}")
        except Exception:
            # Nothing that is known to happen; another worker may fare better once the lease runs out.
            log.exception("replay of partition %d of %s failed", lease.partition, self._group)
            self._leases.forget(lease.partition)
            return
        finally:
            self._loading.pop(lease.partition, None)
        self._parts[lease.partition] = part
        self._by_stream[self._stream(lease.partition)] = lease.partition
        self._reader.wake()

    async def _replay(self, lease: Lease) -> _Partition:
        part = _Partition(lease, self._logic(lease.partition))
        client = self._server.client
        states: dict[bytes, bytes] = await client.hgetall(self._keys.state(lease.partition, self._group))
        for name, saved in states.items():
            run = name.decode()
            offset, state = msgspec.msgpack.decode(saved, type=tuple[str, bytes])
            part.logic.restore(run, state)
            part.since[run] = (offset, 0)
            part.saved[run] = len(saved)
        at, stream = lease.watermark, self._stream(lease.partition)
        while at != lease.offset:
            page: list[Entry] = await client.xrange(stream, f"({at}", lease.offset, count=REPLAY_PAGE)
            if not page:
                break
            for entry_id, fields in page:
                touched = set[str]()
                part.consumed += self._feed(part, entry_id.decode(), fields, touched, None)
                self._follow(part, touched, at, _NOWHERE)
                at = entry_id.decode()
            part.logic.mute()
            await asyncio.sleep(0)  # other partitions go on meanwhile
        part.since = OrderedDict(sorted(part.since.items(), key=lambda item: id_key(item[1][0])))
        pipe = client.pipeline(transaction=False)
        for run in part.since:
            pipe.hget(self._keys.run(run), "seq")
        for run, seq in zip(part.since, await pipe.execute() if part.since else (), strict=True):
            if seq:
                part.logic.recall(run, int(seq))
        return part

    def _stream(self, partition: int) -> str:
        return self._keys.topic(partition, self._topic)


class _Nowhere(Commit):
    """A replay's commits: all that they would write is written."""

    def __init__(self) -> None:
        super().__init__("", "")

    def drop(self, key: str, field: str) -> None:
        return


_NOWHERE = _Nowhere()
