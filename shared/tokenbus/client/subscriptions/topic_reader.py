"""Reads partitions of a public topic, each after its own position, and detects entries that were trimmed unread.

A stream drops its oldest entries first. So as long as any entry up to the position is kept, all later ones are too. The
server is asked for that only if it is in doubt: when a partition is acquired, when a read returned as many entries as
it may, and when the reader came back late. Otherwise a short read is proof by itself, because a topic keeps many more
than `COUNT` entries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from tokenbus.bus.keys import Keys, SubscribedTopic
from tokenbus.bus.scripts.script import LuaScript, ScriptCall, script
from tokenbus.bus.server.run_scripts import run_scripts
from tokenbus.bus.server.server import Server, translated
from tokenbus.bus.server.stream_reader import MAX_BLOCK_MS, Entry, StreamReader
from tokenbus.client.subscriptions.cursor import OLDEST
from tokenbus.errors import CursorTrimmed

COUNT = 256
"""Maximum entries per partition and read. The settings do not allow a topic to keep as few."""
LATE_S = 1.0
_NOTHING = "none"
"""Replaces the oldest entry of an empty stream."""


_ENDS = script(
    "ends",
    """
-- Read the last id of each stream.
-- KEYS: 1 and further: streams.
-- ARGV: none.
-- Reply: the ids; 0-0 for an empty stream.
-- Atomic: all are of one moment.
local ends = {}
for i, key in ipairs(KEYS) do
  local last = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)
  ends[i] = last[1] and last[1][1] or '0-0'
end
return ends
""",
)
"""The last entry id of each stream; ``0-0`` if it is empty."""

_LOST = script(
    "lost",
    """
-- Find streams that were trimmed beyond a cursor.
-- KEYS: 1 and further: streams.
-- ARGV: 1 and further: the cursor in each.
-- Reply: for each stream '', or the oldest id that is left ('none': the stream is empty).
-- Atomic: nothing is trimmed between the checks of one stream.
local function next_id(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  if seq == '18446744073709551615' then return string.format('%.0f-0', ms + 1) end
  return ms .. '-' .. string.format('%.0f', seq + 1)
end
local lost = {}
for i, key in ipairs(KEYS) do
  local kept
  if ARGV[i] == '0-0' then
    kept = true
    if redis.call('EXISTS', key) == 1 then
      local info = redis.call('XINFO', 'STREAM', key)
      for j = 1, #info, 2 do
        if info[j] == 'entries-added' then kept = info[j + 1] == redis.call('XLEN', key) end
      end
    end
  else
    kept = #redis.call('XRANGE', key, '-', ARGV[i], 'COUNT', 1) > 0
  end
  local first = not kept and redis.call('XRANGE', key, '-', '+', 'COUNT', 1)
  local oldest = first and (first[1] and first[1][1] or 'none') or ''
  lost[i] = oldest ~= next_id(ARGV[i]) and oldest or ''
end
return lost
""",
)
"""For each stream and position: empty, or the oldest entry kept if entries after the position may be gone.

``0-0`` stands for a stream that had no entries yet; trimming since then is detectable from Redis 7 on (entries-added).
A position just before the oldest entry is the end of a gap that was already reported.
"""


async def ends(server: Server, keys: Keys, topic: SubscribedTopic) -> dict[int, str]:
    """Return the position of the newest entry of each partition. Raises ServerUnavailable."""
    streams = {keys.topic(p, topic): p for p in range(keys.partitions)}
    found = await _ask(server, _ENDS, dict.fromkeys(streams, ""))
    return {streams[stream]: end for stream, end in found.items()}


class TopicReader:
    """Reads some partitions of a topic, each after its own position. One caller at a time."""

    def __init__(self, server: Server, keys: Keys, topic: SubscribedTopic, *, most: int) -> None:
        """``most``: maximum entries per read over all partitions, but at least one from each."""
        self._server = server
        self._keys = keys
        self._most = most
        self._stream: Callable[[int], str] = lambda partition: keys.topic(partition, topic)
        self._reader = StreamReader(server, count=self._count)
        self._positions: dict[str, str] = {}
        self._partitions: dict[str, int] = {}
        self._unverified: set[str] = set()
        self._read_at = time.monotonic()

    @property
    def _count(self) -> int:
        """Maximum entries of each partition. It follows the number of partitions, which may change."""
        return max(1, min(COUNT, self._most // self._keys.partitions))

    def oldest_after(self, gap: CursorTrimmed) -> Iterator[tuple[int, str]]:
        """Yield the partition with the gap and its oldest entry. Yields nothing if it is no longer read or the
        stream was deleted.
        """
        partition = self._partitions.get(gap.key)
        if partition is not None and gap.oldest != _NOTHING:
            yield partition, gap.oldest

    def take(self, partition: int, position: str) -> None:
        """Start reading this partition after ``position``."""
        stream = self._stream(partition)
        self._positions[stream] = position
        self._partitions[stream] = partition
        self._unverified.add(stream)
        self._reader.wake()

    def drop(self, partition: int) -> None:
        """Stop reading this partition."""
        stream = self._stream(partition)
        self._positions.pop(stream, None)
        self._partitions.pop(stream, None)
        self._reader.wake()

    async def read(self) -> list[tuple[int, list[Entry]]]:
        """Return new entries by partition; empty after 2 seconds, or if `take`, `drop` or `close` ends the wait.

        Raises ServerUnavailable; and CursorTrimmed, after which the next read continues at the oldest entry that is
        kept.
        """
        if time.monotonic() - self._read_at > LATE_S:
            self._unverified.update(self._positions)
        positions = dict(self._positions)
        count = self._reader.count = self._count
        with translated(self._server):
            offsets = {stream: "0-0" if at == OLDEST else at for stream, at in positions.items()}
            found = await self._reader.read(offsets, block_ms=MAX_BLOCK_MS)
        self._unverified.update(stream for stream, entries in found if len(entries) >= count)
        await self._verify_positions({s: positions[s] for s, _ in found if s in positions and s in self._unverified})
        self._read_at = time.monotonic()
        # A partition may have been dropped, or dropped and re-acquired at another position, during the read.
        found = [(s, entries) for s, entries in found if s in positions and self._positions.get(s) == positions[s]]
        for stream, entries in found:
            self._positions[stream] = entries[-1][0].decode()
            if len(entries) < count:
                self._unverified.discard(stream)
        return [(self._partitions[stream], entries) for stream, entries in found]

    async def close(self) -> None:
        """Abort the waiting read and release its connection."""
        await self._reader.close()

    async def _verify_positions(self, positions: dict[str, str]) -> None:
        held = {stream: at for stream, at in positions.items() if at != OLDEST}
        for stream, oldest in (await _ask(self._server, _LOST, held)).items():
            if oldest and self._positions.get(stream) == positions[stream]:
                self._positions[stream] = OLDEST
                raise CursorTrimmed(stream, positions[stream], oldest)


async def _ask(server: Server, script: LuaScript, streams: dict[str, str]) -> dict[str, str]:
    """Run a script that answers per stream, in as few calls as the server's topology allows."""
    if not streams:
        return {}
    groups = server.read_groups(list(streams))
    with translated(server):
        replies: list[Any] = await run_scripts(
            server, [ScriptCall(script, group, [streams[stream] for stream in group]) for group in groups]
        )
    return {
        stream: answer.decode()
        for group, reply in zip(groups, replies, strict=True)
        for stream, answer in zip(group, reply, strict=True)
    }
