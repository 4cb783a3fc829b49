"""Entries that a stage has read and not yet worked in, handed out a bounded round at a time.

One round becomes one commit. Its size is bounded, and the partitions share it in equal parts: a partition with
megabytes waiting delays the others by a round, not by its whole backlog.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from tokenbus.bus.server.stream_reader import Entry
from tokenbus.bus.stage.partition import Partition

ROUND_BYTES = 256 * 1024
"""Input of one round over all partitions, about: each partition gives at least one entry."""
READ_BYTES = 512 * 1024
"""Input that one read should give of one stream."""


class Batch(msgspec.Struct, frozen=True):
    """Entries of one partition that follow on offset ``begin``."""

    partition: int
    begin: str
    entries: Sequence[Entry]


class _Read(msgspec.Struct):
    part: Partition
    begin: str
    entries: deque[Entry]


class ReadBuffer:
    """Entries by stream, each stream's in order. Add with `keep`; take with `next_round`."""

    def __init__(self, *, most: int) -> None:
        """``most``: entries that one read may give of one stream."""
        self._most = most
        self._reads: dict[str, _Read] = {}
        self._average = 0.0
        """Bytes of an entry, lately."""

    def __contains__(self, stream: str) -> bool:
        """Whether the stream has entries here, so that it need not be read."""
        return stream in self._reads

    @property
    def count(self) -> int:
        """How many entries the next read should ask for of each stream."""
        return max(1, min(self._most, int(READ_BYTES / self._average))) if self._average else self._most

    def add(self, part: Partition, entries: Sequence[Entry]) -> None:
        """These were read after the partition's offset."""
        self._reads[part.stream] = _Read(part, part.offset, deque(entries))
        average = sum(map(size_of, entries)) / len(entries)
        self._average = max(average, (self._average + average) / 2)

    def has_any(self, ready: Callable[[Partition], bool]) -> bool:
        """Whether a partition that is ``ready`` has entries here."""
        return any(ready(read.part) for read in self._reads.values())

    def next_round(self, parts: Mapping[str, Partition], ready: Callable[[Partition], bool]) -> list[Batch]:
        """The next entries of all partitions that are ``ready``. ``parts``: those that are owned, by stream.

        A partition that was dropped or stands elsewhere by now is read again: what is here of it is forgotten.
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
    """Bytes of an entry's frames."""
    return sum(map(len, entry[1].values()))
