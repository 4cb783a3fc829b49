"""What a stage reads: its partitions' new entries, in rounds of bounded size.

One round becomes one commit. Partitions share a round equally, so a partition with a backlog of megabytes delays the
others by one round only. A partition that lags downstream, rests or works is not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
from redis.exceptions import ResponseError

from tokenbus.bus.keys import Keys
from tokenbus.bus.leases import read_lag
from tokenbus.bus.server.error_replies import is_alien
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import Entry, StreamReader
from tokenbus.bus.stage.commits import StageOptions
from tokenbus.bus.stage.partition import Partition
from tokenbus.bus.stage.partitions import Partitions
from tokenbus.bus.unreadable import read_one_by_one

log = logging.getLogger(__name__)

ROUND_BYTES = 128 * 1024
"""Approximate input of one round over all partitions; each partition contributes at least one entry."""
READ_BYTES = 512 * 1024
"""Target input of one read per stream."""
PAUSED_POLL_MS = 20
REST_POLL_MS = 50
"""How often a stage checks whether a paused partition may be read again."""


class Batch(msgspec.Struct, frozen=True):
    """Consecutive entries of one partition after offset ``begin``."""

    partition: int
    begin: str
    entries: Sequence[Entry]


class _Read(msgspec.Struct):
    part: Partition
    begin: str
    entries: deque[Entry]


class ReadBuffer:
    """Buffered entries by stream, each stream in order. Add with `add`; take with `next_round`."""

    def __init__(self, *, max_entries: int) -> None:
        """``max_entries``: of one read per stream."""
        self._max_entries = max_entries
        self._reads: dict[str, _Read] = {}
        self._average = 0.0
        """Recent average size of an entry in bytes."""

    def __contains__(self, stream: str) -> bool:
        """Whether the stream has buffered entries and need not be read."""
        return stream in self._reads

    @property
    def count(self) -> int:
        """Number of entries that the next read should request per stream."""
        return max(1, min(self._max_entries, int(READ_BYTES / self._average))) if self._average else self._max_entries

    def add(self, part: Partition, begin: str, entries: Sequence[Entry]) -> None:
        """Add entries that were read after offset ``begin``."""
        self._reads[part.stream] = _Read(part, begin, deque(entries))
        average = sum(map(size_of, entries)) / len(entries)
        self._average = max(average, (self._average + average) / 2)

    def put_back(self, part: Partition, entries: Sequence[Entry]) -> None:
        """Hand out the last entries of the partition's latest batch again. Its offset is that before them.

        What is buffered stays only if it follows them. It does not if another reader (chain.py) read the batch.
        """
        read = self._reads.get(part.stream)
        if read and read.part is part and read.begin == entries[-1][0].decode():
            read.begin = part.offset
            read.entries.extendleft(reversed(entries))
        else:
            self._reads[part.stream] = _Read(part, part.offset, deque(entries))

    def has_any(self, ready: Callable[[Partition], bool]) -> bool:
        """Whether any ``ready`` partition has buffered entries."""
        return any(ready(read.part) for read in self._reads.values())

    def next_round(self, parts: Mapping[str, Partition], ready: Callable[[Partition], bool]) -> list[Batch]:
        """The next entries of all ``ready`` partitions. ``parts``: the owned partitions by stream.

        Discards the entries of a partition that was dropped or whose offset changed since; they are read again.
        """
        for stream, read in list(self._reads.items()):
            if parts.get(stream) is not read.part or read.part.offset != read.begin:
                del self._reads[stream]
        reads = [(stream, read) for stream, read in self._reads.items() if ready(read.part)]
        return [self._slice(stream, read, ROUND_BYTES // len(reads)) for stream, read in reads]

    def _slice(self, stream: str, read: _Read, max_bytes: int) -> Batch:
        taken = [read.entries.popleft()]
        size = size_of(taken[0])
        while read.entries and (size := size + size_of(read.entries[0])) <= max_bytes:
            taken.append(read.entries.popleft())
        batch = Batch(read.part.number, read.begin, taken)
        read.begin = taken[-1][0].decode()
        if not read.entries:
            del self._reads[stream]
        return batch


def size_of(entry: Entry) -> int:
    """Size of an entry's frames in bytes."""
    return sum(map(len, entry[1].values()))


class Input:
    """The new entries of a stage's loaded partitions."""

    def __init__(self, server: Server, keys: Keys, options: StageOptions, partitions: Partitions) -> None:
        self._server = server
        self._keys = keys
        self._options = options
        self._partitions = partitions
        self._parts = partitions.parts
        self._is_cluster = server.topology == "cluster"
        self._resting: dict[str, float] = {}
        """Stream -> until when it is not read."""
        self._reader = StreamReader(server, count=options.max_records)
        self._buffer = ReadBuffer(max_entries=options.max_records)
        self.close = self._reader.close
        self.wake = self._reader.wake
        """Ends a waiting `read`: the set of partitions that it can read has changed."""
        self.put_back = self._buffer.put_back
        partitions.on_change = self.wake

    @property
    def count(self) -> int:
        """Number of entries that one read should request per stream."""
        return self._buffer.count

    def rest(self, stream: str, seconds: float) -> None:
        """Do not wait for entries of the stream for a while; 0: from now on."""
        if seconds <= 0.0:
            if self._resting.pop(stream, None):
                self._reader.wake()
        elif not self._is_cluster:  # in a Cluster each read waits separately
            self._resting[stream] = asyncio.get_running_loop().time() + seconds

    async def read(self, *, block_ms: int) -> list[Batch]:
        is_ready, start = self._partitions.is_ready, self._partitions.start
        if paused := [part for part in self._parts.values() if part.paused and not self._partitions.is_busy(part)]:
            if self._is_cluster:
                for part in paused:
                    start(part.number, partial(self._look_at_lag, [part]))
            else:
                await self._look_at_lag(paused)
            block_ms = min(block_ms, PAUSED_POLL_MS)
        for stream, part in self._parts.items():
            if part.unreadable and stream not in self._buffer:
                self._buffer.add(part, part.offset, [part.unreadable.entry])
        if self._resting:
            now = asyncio.get_running_loop().time()
            self._resting = {stream: until for stream, until in self._resting.items() if until > now}
            block_ms = min(block_ms, REST_POLL_MS) if self._resting else block_ms
        offsets = {
            stream: part.offset
            for stream, part in self._parts.items()
            if stream not in self._buffer and stream not in self._resting and is_ready(part)
        }
        if offsets or not self._buffer.has_any(is_ready):
            self._reader.count = self._buffer.count
            try:
                found = await self._reader.read(offsets, block_ms=0 if self._buffer.has_any(is_ready) else block_ms)
            finally:
                for stream in self._reader.pop_unreadable():
                    if (part := self._parts.get(stream)) and not self._partitions.is_busy(part):
                        task = start(part.number, partial(self._look_for_unreadable, part))
                        task.add_done_callback(lambda _: self._reader.wake())
            for stream, entries in found:
                if (part := self._parts.get(stream)) and part.offset == offsets.get(stream):
                    self._buffer.add(part, part.offset, entries)
        return self._buffer.next_round(self._parts, is_ready)

    async def _look_for_unreadable(self, part: Partition) -> None:
        """Read this partition alone, entry by entry, because one of its entries may be what breaks each read. The
        others are read meanwhile.
        """
        if not await self._server.answers():
            return
        count, begin = self._reader.count, part.offset
        try:
            entries, found = await read_one_by_one(self._server, part.stream, after=begin, count=count)
        except ResponseError as e:
            if not is_alien(e):
                raise
            self._partitions.block(part, f"{part.stream}: {e}")
            return
        if part.offset != begin:
            return  # a chained flush, which was on its way, has written and applied what was read here
        if entries:
            self._buffer.add(part, begin, entries)
        if found:
            part.unreadable = found
            entry_id = found.entry[0].decode()
            log.error("%s partition %d: entry %s: %s", self._options.group, part.number, entry_id, found.reason)

    async def _look_at_lag(self, paused: Sequence[Partition]) -> None:
        assert self._options.downstream
        for part in paused:
            lease = self._keys.lease(part.number, self._options.downstream)
            part.paused = await read_lag(self._server.client, lease) > self._options.lag_bytes // 2
