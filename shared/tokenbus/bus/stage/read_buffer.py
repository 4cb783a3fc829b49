"""Entries that a stage has read but not applied, handed out in rounds of bounded size.

One round becomes one commit. Partitions share a round equally, so a partition with a backlog of megabytes delays the
others by one round only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from tokenbus.bus.server.stream_reader import Entry
from tokenbus.bus.stage.partition import Partition

ROUND_BYTES = 128 * 1024
"""Approximate input of one round over all partitions; each partition contributes at least one entry."""
READ_BYTES = 512 * 1024
"""Target input of one read per stream."""


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

    def __init__(self, *, most: int) -> None:
        """``most``: maximum entries of one read per stream."""
        self._most = most
        self._reads: dict[str, _Read] = {}
        self._average = 0.0
        """Recent average size of an entry in bytes."""

    def __contains__(self, stream: str) -> bool:
        """Whether the stream has buffered entries and need not be read."""
        return stream in self._reads

    @property
    def count(self) -> int:
        """Number of entries that the next read should request per stream."""
        return max(1, min(self._most, int(READ_BYTES / self._average))) if self._average else self._most

    def add(self, part: Partition, entries: Sequence[Entry]) -> None:
        """Add entries read after the partition's current offset."""
        self._reads[part.stream] = _Read(part, part.offset, deque(entries))
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

    def _slice(self, stream: str, read: _Read, most: int) -> Batch:
        taken = [read.entries.popleft()]
        size = size_of(taken[0])
        while read.entries and (size := size + size_of(read.entries[0])) <= most:
            taken.append(read.entries.popleft())
        batch = Batch(read.part.number, read.begin, taken)
        read.begin = taken[-1][0].decode()
        if not read.entries:
            del self._reads[stream]
        return batch


def size_of(entry: Entry) -> int:
    """Size of an entry's frames in bytes."""
    return sum(map(len, entry[1].values()))
