"""What a stage reads: its partitions' new entries, in rounds. A partition that lags downstream, rests or works is not
read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from redis.exceptions import ResponseError

from tokenbus.bus.keys import Keys
from tokenbus.bus.server.error_replies import is_alien
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import Entry, StreamReader
from tokenbus.bus.stage.background_tasks import BackgroundTasks
from tokenbus.bus.stage.partition import Partition
from tokenbus.bus.stage.read_buffer import Batch, ReadBuffer
from tokenbus.bus.stage_lag import read_lag
from tokenbus.bus.unreadable import read_one_by_one

log = logging.getLogger(__name__)

PAUSED_POLL_MS = 20
REST_POLL_MS = 50
"""How often a stage checks whether a paused partition may be read again."""


class StageInput:
    """The new entries of a stage's loaded partitions."""

    def __init__(
        self,
        server: Server,
        keys: Keys,
        parts: Mapping[str, Partition],
        background: BackgroundTasks,
        *,
        group: str,
        max_records: int,
        downstream: str | None,
        lag_bytes: int,
        on_alien_key: Callable[[Partition, str], None],
    ) -> None:
        """``parts``: the loaded partitions by stream, as the stage keeps them. ``background``: their tasks; a partition
        is not read while one runs. ``on_alien_key``: a partition's stream key has the wrong type.
        """
        self._server = server
        self._keys = keys
        self._parts = parts
        self._background = background
        self._group = group
        self._downstream = downstream
        self._lag_bytes = lag_bytes
        self._on_alien_key = on_alien_key
        self._is_cluster = server.topology == "cluster"
        self._resting: dict[str, float] = {}
        """Stream -> until when it is not read."""
        self._reader = StreamReader(server, count=max_records)
        self._buffer = ReadBuffer(most=max_records)

    async def close(self) -> None:
        """Stop reading."""
        await self._reader.close()

    def wake(self) -> None:
        """End a waiting `read`: the set of partitions that it can read has changed."""
        self._reader.wake()

    @property
    def count(self) -> int:
        """Number of entries that one read should request per stream."""
        return self._buffer.count

    def is_ready(self, part: Partition) -> bool:
        """Whether the partition can be processed now."""
        return not part.paused and part.number not in self._background

    def rest(self, stream: str, seconds: float) -> None:
        """Do not wait for entries of the stream for a while; 0: from now on."""
        if seconds <= 0.0:
            if self._resting.pop(stream, None):
                self._reader.wake()
        elif not self._is_cluster:  # in a Cluster each read waits separately
            self._resting[stream] = asyncio.get_running_loop().time() + seconds

    async def read(self, *, block_ms: int) -> list[Batch]:
        """See `Stage.read`."""
        if paused := [part for part in self._parts.values() if part.paused and part.number not in self._background]:
            if self._is_cluster:
                for part in paused:
                    self._background.start(part.number, partial(self._look_at_lag, [part]))
            else:
                await self._look_at_lag(paused)
            block_ms = min(block_ms, PAUSED_POLL_MS)
        for stream, part in self._parts.items():
            if part.unreadable and stream not in self._buffer:
                self._buffer.add(part, [part.unreadable.entry])
        if self._resting:
            now = asyncio.get_running_loop().time()
            self._resting = {stream: until for stream, until in self._resting.items() if until > now}
            block_ms = min(block_ms, REST_POLL_MS) if self._resting else block_ms
        offsets = {
            stream: part.offset
            for stream, part in self._parts.items()
            if stream not in self._buffer and stream not in self._resting and self.is_ready(part)
        }
        if offsets or not self._buffer.has_any(self.is_ready):
            self._reader.count = self._buffer.count
            try:
                found = await self._reader.read(
                    offsets, block_ms=0 if self._buffer.has_any(self.is_ready) else block_ms
                )
            finally:
                for stream in self._reader.pop_unreadable():
                    if (part := self._parts.get(stream)) and part.number not in self._background:
                        task = self._background.start(part.number, partial(self._look_for_unreadable, part))
                        task.add_done_callback(lambda _: self._reader.wake())
            for stream, entries in found:
                if (part := self._parts.get(stream)) and part.offset == offsets.get(stream):
                    self._buffer.add(part, entries)
        return self._buffer.next_round(self._parts, self.is_ready)

    def put_back(self, part: Partition, entries: Sequence[Entry]) -> None:
        """These entries of a batch, the last ones, are not applied yet: hand them out again."""
        self._buffer.put_back(part, entries)

    async def _look_for_unreadable(self, part: Partition) -> None:
        """Read this partition alone, entry by entry, because one of its entries may be what breaks each read. The
        others are read meanwhile.
        """
        if not await self._server.answers():
            return
        count = self._reader.count
        try:
            entries, found = await read_one_by_one(self._server, part.stream, after=part.offset, count=count)
        except ResponseError as e:
            if not is_alien(e):
                raise
            self._on_alien_key(part, f"{part.stream}: {e}")
            return
        if entries:
            self._buffer.add(part, entries)
        if found:
            part.unreadable = found
            entry_id = found.entry[0].decode()
            log.error("%s partition %d: entry %s: %s", self._group, part.number, entry_id, found.reason)

    async def _look_at_lag(self, paused: Sequence[Partition]) -> None:
        assert self._downstream
        for part in paused:
            lease = self._keys.lease(part.number, self._downstream)
            part.paused = await read_lag(self._server.client, lease) > self._lag_bytes // 2
