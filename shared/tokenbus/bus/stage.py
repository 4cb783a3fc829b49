"""The ordered stage: one live owner a partition, exactly-once commits, state by replay.

A stage reads each partition it owns with plain XREAD from the committed offset, feeds the entries to the
partition's pure `Logic`, and commits outputs and offset with one script. What the logic holds in memory is a
function of the entries from the low watermark on, so a new owner re-reads them with output off and goes on where
its predecessor stood. Long open runs are checkpointed with a commit now and then, so that a replay stays short.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from redis.exceptions import ResponseError

from tokenbus.bus import scripts
from tokenbus.bus.dead import DeadEntry, bury
from tokenbus.bus.keys import InternalTopic, Keys
from tokenbus.bus.leases import Lease, Leases
from tokenbus.bus.outage import outlast
from tokenbus.bus.partition import Logic, Partition, Poison, Work
from tokenbus.bus.reader import Entry, Reader
from tokenbus.bus.send import send, send_many
from tokenbus.bus.server import Server

__all__ = ["Batch", "Logic", "Stage"]

log = logging.getLogger(__name__)

REPLAY_PAGE = 200
PAUSED_POLL_MS = 20
DEAD_BYTES = 64 * 1024
"""So much of a poison frame is kept."""


class Batch(msgspec.Struct, frozen=True):
    """What one read gave of one partition, after offset ``begin``."""

    partition: int
    begin: str
    entries: list[Entry]


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
        self._lease_s = lease_s
        self._topic_entries = topic_entries
        self._dead_entries = dead_entries
        self._entries_read = entries_read
        self._parts: dict[str, Partition] = {}
        """By stream: the partitions that are loaded."""
        self._loading: dict[int, asyncio.Task[None]] = {}
        self._working = asyncio.Lock()
        self._closed = False
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
        return sorted(part.number for part in self._parts.values())

    @property
    def healthy(self) -> bool:
        """Whether the worker reaches the server."""
        return self._leases.healthy

    async def open(self) -> None:
        """Sign on and take a first share of the partitions. Raises what redis-py raises."""
        await self._leases.open()

    async def close(self) -> None:
        """Commit what is in hand, give the partitions up at once, stop reading.

        Takes no longer than a lease lasts: what cannot be committed by then, another worker does.
        """
        await self._leases.close()
        self._closed = True
        self._parts.clear()
        loading = list(self._loading.values())
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
        await self._reader.close()

    async def read(self, *, block_ms: int = 2000) -> list[Batch]:
        """New entries by partition, empty after ``block_ms`` or a change of partitions. Raises what redis-py raises."""
        if paused := [part for part in self._parts.values() if part.paused]:
            await self._look_at_lag(paused)
            block_ms = min(block_ms, PAUSED_POLL_MS)
        offsets = {stream: part.offset for stream, part in self._parts.items() if not part.paused}
        found = await self._reader.read(offsets, block_ms=block_ms)
        return [
            Batch(part.number, offsets[stream], entries)
            for stream, entries in found
            if stream in offsets and (part := self._parts.get(stream))
        ]

    async def process(self, batches: Sequence[Batch]) -> None:
        """Work the batches of `read` in and commit it; returns when it is committed or its lease is lost.

        While the server is away the same commit is tried again: it writes once, whatever was lost.
        """
        async with self._working:
            worked: list[tuple[Partition, Batch, Work]] = []
            for batch in batches:
                part = self._parts.get(self._keys.topic(batch.partition, self._topic))
                # The partition may have gone, and even come back, since the read.
                if part and part.offset == batch.begin and (work := self._work(part, batch)):
                    worked.append((part, batch, work))
            try:
                for part, _, work in worked:
                    for poison in work.poison:
                        await self._bury(part, poison)
                replies = await self._commit([self._call(*each) for each in worked])
            except BaseException:
                for part, _, _ in worked:
                    self._drop(part)  # what it remembers is ahead of what is committed
                raise
            for (part, _, _), reply in zip(worked, replies, strict=True):
                self._committed(part, reply)

    # --- one batch --------------------------------------------------------------------------------------------

    def _work(self, part: Partition, batch: Batch) -> Work | None:
        try:
            return part.work(batch.entries)
        except Exception:
            log.exception("%s partition %d: the logic failed", self._group, part.number)
            self._drop(part, shun_s=2 * self._lease_s)
            return None

    def _call(self, part: Partition, batch: Batch, work: Work) -> scripts.Call:
        return work.commit.call(
            token=part.token,
            ttl_ms=round(self._lease_s * 1000),
            begin=batch.begin,
            end=part.offset,
            watermark=part.watermark,
            entries=len(batch.entries),
            size=work.size,
            mirror=self._group,
            entries_read=self._entries_read,
            topic_entries=self._topic_entries,
        )

    async def _bury(self, part: Partition, poison: Poison) -> None:
        """Poison goes to the dead stream before the commit: a crash between may show it twice, never lose it."""
        entry = DeadEntry(
            reason=poison.reason,
            stage=self._group,
            stream=part.stream,
            entry=poison.entry_id,
            bytes=poison.frame[:DEAD_BYTES],
            run=poison.run,
        )
        await bury(self._server, self._keys, entry, most=self._dead_entries)

    async def _commit(self, calls: list[scripts.Call]) -> list[Any]:
        """The reply to each. Raises what redis-py raises once the stage is closed."""
        what, closed = f"commit of {self._group}", lambda: self._closed
        try:
            return await outlast(lambda: send_many(self._server, calls), what=what, unless=closed)
        except ResponseError:
            if self._closed:
                raise
        # One of them is at fault, and the others shall not suffer: those that are in already say so.
        replies: list[Any] = []
        for call in calls:
            try:
                replies.append(await outlast(lambda call=call: send(self._server, call), what=what, unless=closed))
            except ResponseError as e:
                replies.append([b"refused", str(e)])
        return replies

    def _committed(self, part: Partition, reply: list[Any]) -> None:
        if reply[0] in (b"ok", b"already"):
            part.paused = any(lag > self._lag_bytes for lag in reply[2:])
            return
        # Another owner wrote on, or nobody can: what this worker remembers of the partition is void.
        log.warning("%s partition %d: dropped: %s", self._group, part.number, reply)
        self._drop(part, shun_s=2 * self._lease_s if reply[0] == b"refused" else 0)

    async def _look_at_lag(self, paused: list[Partition]) -> None:
        assert self._downstream
        for part in paused:
            lease = self._keys.lease(part.number, self._downstream)
            arrived, done = await self._server.client.hmget(lease, ["arrived", "done"])
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

    def _drop(self, part: Partition, *, shun_s: float = 0.0) -> None:
        """Forget the partition, so that it is loaded anew, here or elsewhere."""
        self._leases.forget(part.number, shun_s=shun_s)
        self._remove(part.number)

    def _remove(self, partition: int) -> None:
        if self._parts.pop(self._keys.topic(partition, self._topic), None):
            self._reader.wake()

    async def _load(self, lease: Lease) -> None:
        """Rebuild the partition's state, then begin to read it."""
        try:
            part = await outlast(lambda: self._replay(lease), what=f"replay of {self._group}")
        except Exception:
            # Nothing that is known to happen; another worker may fare better once the lease runs out.
            log.exception("replay of partition %d of %s failed", lease.partition, self._group)
            self._leases.forget(lease.partition, shun_s=2 * self._lease_s)
            return
        finally:
            self._loading.pop(lease.partition, None)
        self._parts[part.stream] = part
        self._reader.wake()

    async def _replay(self, lease: Lease) -> Partition:
        part = Partition(lease, self._logic(lease.partition), keys=self._keys, topic=self._topic, group=self._group)
        client = self._server.client
        part.restore(await client.hgetall(part.state_key))
        while part.offset != lease.offset:
            page: list[Entry] = await client.xrange(part.stream, f"({part.offset}", lease.offset, count=REPLAY_PAGE)
            if not page:
                log.error("%s partition %d: entries are gone that a replay needs", self._group, lease.partition)
                break
            part.replay(page)
            await asyncio.sleep(0)  # other partitions go on meanwhile
        runs = part.settle(lease.offset)
        pipe = client.pipeline(transaction=False)
        for run in runs:
            pipe.hget(self._keys.run(run), "seq")
        for run, seq in zip(runs, await pipe.execute() if runs else (), strict=True):
            if seq:
                part.logic.recall(run, int(seq))
        return part
