"""Commits the offsets of a group worker's partitions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from tokenbus.bus.keys import Keys, SubscribedTopic
from tokenbus.bus.leases import Lease
from tokenbus.bus.scripts import Commit, ScriptCall
from tokenbus.bus.scripts.topics import mirror_offset
from tokenbus.bus.server.run_scripts import run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.client.subscriptions.ack_tracker import OffsetTracker

ACK_S = 1.0
"""Longest time between commits while more events are taken."""


class OwnedPartition(OffsetTracker):
    """A partition that this worker owns: how far its events are done and committed."""

    def __init__(self, lease: Lease) -> None:
        super().__init__(lease.offset)
        self.lease = lease
        self.committed = lease.offset
        self.mirrored = False
        """Whether the mirroring consumer group has its entry count."""


class OffsetCommitter:
    """Commits a group's offsets."""

    def __init__(
        self, server: Server, keys: Keys, topic: SubscribedTopic, *, group: str, lease_s: float, entries_read: bool
    ) -> None:
        """``group``: name of the mirroring consumer group. ``entries_read``: whether the server counts the entries a
        group has read.
        """
        self._server = server
        self._keys = keys
        self._topic: SubscribedTopic = topic
        self._group = group
        self._lease_s = lease_s
        self._entries_read = entries_read
        self._lock = asyncio.Lock()
        self._committed_at = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether the last commit through `commit_and_mirror` was so long ago that another is due."""
        return time.monotonic() - self._committed_at >= ACK_S

    async def commit_and_mirror(self, parts: Sequence[OwnedPartition]) -> list[OwnedPartition]:
        """Commit the offsets up to what is done, and update the mirrors.

        Returns the partitions that another worker owns by now; that worker delivers their events again. Raises
        redis-py's errors.
        """
        await self._mirror([part for part in parts if not part.mirrored])
        refused = await self.commit(parts)
        self._committed_at = time.monotonic()
        return refused

    async def commit(self, parts: Sequence[OwnedPartition]) -> list[OwnedPartition]:
        """Like `commit_and_mirror`, without setting the entry counts of the mirrors."""
        async with self._lock:
            calls = [
                (part, self._call(part), part.position, part.entries)
                for part in parts
                if part.position != part.committed
            ]
            if not calls:
                return []
            refused: list[OwnedPartition] = []
            replies = await run_scripts(self._server, [call for _, call, _, _ in calls])
            for (part, _, done, entries), reply in zip(calls, replies, strict=True):
                if reply[0] in (b"ok", b"already"):
                    part.committed = done
                    part.entries = max(0, part.entries - entries)  # a gap may have reset it meanwhile
                else:
                    refused.append(part)
            return refused

    async def _mirror(self, new: list[OwnedPartition]) -> None:
        """Set the entry counts of new partitions' mirrors to the entries before the group's offset."""
        if not new:
            return
        counts: dict[OwnedPartition, tuple[str | bytes, int]] = {part: (part.committed, 0) for part in new}
        while counts:
            calls = [
                mirror_offset(
                    self._keys.lease(part.lease.partition, self._group),
                    self._keys.topic(part.lease.partition, self._topic),
                    group=self._group,
                    offset=part.committed,
                    after=after,
                    counted=counted,
                )
                for part, (after, counted) in counts.items()
            ]
            replies = await run_scripts(self._server, calls)
            counts = {part: (after, n) for part, (after, n) in zip(counts, replies, strict=True) if after}
        for part in new:
            part.mirrored = True

    def _call(self, part: OwnedPartition) -> ScriptCall:
        number = part.lease.partition
        return Commit(self._keys.lease(number, self._group), self._keys.topic(number, self._topic)).call(
            token=part.lease.token,
            ttl_ms=int(self._lease_s * 1000),
            begin=part.committed,
            end=part.position,
            watermark="0-0",  # a commit trims its input below this; other subscriptions read this input too
            entries=part.entries,
            size=0,
            # A commit that moves a mirror checks that its last entry still exists; the end of a gap never existed.
            mirror="" if part.in_gap else self._group,
            entries_read=self._entries_read,
            topic_entries=0,
        )
