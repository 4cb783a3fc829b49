"""The subscription with a group: several workers share a topic's runs among them.

Each partition belongs to one worker of the group at a time, by a lease; that worker reads it with plain XREAD from the
group's offset and moves the offset when events are done. So a run's events stay in order, and a worker that
dies takes none with it.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
import time
from collections import deque
from contextlib import suppress
from types import TracebackType
from typing import Generic, Literal, Self, TypeVar, cast

from tokenbus.bus.keys import Keys, PublicTopic
from tokenbus.bus.leases import Lease, Leases
from tokenbus.bus.reader import Entry
from tokenbus.bus.scripts import Call, Commit
from tokenbus.bus.send import send_many
from tokenbus.bus.server import translated
from tokenbus.client.cursor import OLDEST
from tokenbus.client.deployment import Deployment, Outage
from tokenbus.client.entries import public_event
from tokenbus.client.topic import TopicReader
from tokenbus.errors import ServerUnavailable
from tokenbus.events.public import PublicEvent

E = TypeVar("E", bound=PublicEvent)

ACK_S = 1.0
"""Done events are told to the server at least this often while more are taken."""
_GROUP = re.compile(r"[A-Za-z0-9._-]{1,64}")


class _Part:
    """A partition in hand, and how far its events are done and told."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.told = lease.offset
        self.done = lease.offset
        self.entries = 0
        """Done but not told."""


class SharedSubscription(Generic[E]):
    """Every event of a topic at least once for the whole group, those of one run in order, to one worker at a time.

    Taking the next event says that the one before is done. Done events are acknowledged when the worker runs out
    of events or a second has passed, and when the subscription is closed; a worker that dies gives out again what it
    had not acknowledged, so ``(event.run, event.seq)`` may come twice. The last event taken is done when ``async with``
    is left in order; it is not when that is left by an exception, or `aclose` ends the iteration.

    A new group begins with what comes from then on, or at the oldest entry that is kept. The group goes on where
    it stood when nobody was there. At most as many workers as there are partitions have something to do. A
    worker that blocks its event loop for longer than ``lease_s`` loses its partitions. Iterating raises
    CursorTrimmed, ServerUnavailable and Malformed as `OrderedSubscription` does. For one task at a time.
    """

    def __init__(
        self,
        deployment: Deployment,
        topic: PublicTopic,
        *,
        group: str,
        after: Literal["oldest"] | None,
        reconnect_s: float,
        lease_s: float = 3.0,
    ) -> None:
        """Raises ValueError for a group's name that is not 1 to 64 letters, digits, dots, dashes or underscores."""
        if not _GROUP.fullmatch(group):
            raise ValueError(f"group {group!r}: must be 1 to 64 letters, digits, dots, dashes or underscores")
        self._deployment = deployment
        self._topic: PublicTopic = topic
        self._group = f"{topic}:{group}"
        self._from_oldest = after == "oldest"
        self._lease_s = lease_s
        self._outage = Outage(reconnect_s)
        self._opened: tuple[Keys, TopicReader, Leases] | None = None
        self._parts: dict[int, _Part] = {}
        self._pending: deque[tuple[_Part, Entry]] = deque()
        self._in_hand: tuple[_Part, str] | None = None
        self._hand_free = asyncio.Event()
        self._telling = asyncio.Lock()
        self._told_at = time.monotonic()
        self._closed = False

    @property
    def partitions(self) -> list[int]:
        """The partitions that this worker has now."""
        return sorted(self._parts)

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._let_go(done=error is None)
        await self.aclose()

    async def aclose(self) -> None:
        """Acknowledge what is done, give the partitions to the group's other workers at once, end the iteration.

        Where the server is away nothing is acknowledged: those events come again.
        """
        self._let_go(done=False)
        self._closed = True
        self._pending.clear()
        if self._opened:
            _, reader, leases = self._opened
            await leases.close()
            await reader.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> E:
        self._let_go(done=True)
        while not self._closed:
            try:
                await self._tell()
                if self._pending:
                    break
                await self._refill()
                self._outage.over()
            except ServerUnavailable as e:
                await self._outage.wait(e)
        if self._closed:
            raise StopAsyncIteration
        part, entry = self._pending.popleft()
        self._in_hand = part, entry[0].decode()
        self._hand_free.clear()
        return cast("E", public_event(f"{self._topic} {part.lease.partition}", entry))

    def _let_go(self, *, done: bool) -> None:
        """The event in hand is done, or is to be given out again."""
        if self._in_hand and done:
            part, entry_id = self._in_hand
            part.done = entry_id
            part.entries += 1
        self._in_hand = None
        self._hand_free.set()

    async def _open(self) -> tuple[Keys, TopicReader, Leases]:
        server = self._deployment.server
        keys = await self._deployment.keys()
        reader = TopicReader(server, keys, self._topic)
        leases = Leases(
            server,
            keys,
            group=self._group,
            topic=self._topic,
            worker=f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}",
            taken=self._taken,
            gone=self._gone,
            ttl_s=self._lease_s,
            tick_s=self._lease_s / 12,
            start="0-0" if self._from_oldest else "$",
            mirror=False,  # a mirror's input is trimmed to its watermark; this one is others' too
        )
        self._opened = keys, reader, leases
        try:
            with translated(server):
                await leases.open()
        except BaseException:
            self._opened = None
            self._parts.clear()
            raise
        return self._opened

    async def _refill(self) -> None:
        keys, reader, _ = self._opened or await self._open()
        await self._deployment.still(keys)
        for partition, entries in await reader.read():
            part = self._parts[partition]
            self._pending.extend((part, entry) for entry in entries)

    # --- acknowledging ----------------------------------------------------------------------------------------

    async def _tell(self) -> None:
        """Move the group's offsets past what is done, when it is time. Raises ServerUnavailable."""
        if self._pending and time.monotonic() - self._told_at < ACK_S:
            return
        with translated(self._deployment.server):
            await self._commit(list(self._parts.values()))
        self._told_at = time.monotonic()

    async def _commit(self, parts: list[_Part]) -> None:
        """Raises what redis-py raises."""
        async with self._telling:
            calls = [(part, self._call(part), part.done, part.entries) for part in parts if part.done != part.told]
            if not calls:
                return
            replies = await send_many(self._deployment.server, [call for _, call, _, _ in calls])
            for (part, _, done, entries), reply in zip(calls, replies, strict=True):
                if reply[0] in (b"ok", b"already"):
                    part.told = done
                    part.entries -= entries
                elif self._parts.get(part.lease.partition) is part:
                    # Another worker has the partition by now, and gives these events out again.
                    self._forget(part)

    def _call(self, part: _Part) -> Call:
        assert self._opened
        keys, number = self._opened[0], part.lease.partition
        return Commit(keys.lease(number, self._group), keys.topic(number, self._topic)).call(
            token=part.lease.token,
            ttl_ms=int(self._lease_s * 1000),
            begin=part.told,
            end=part.done,
            watermark=part.done,
            entries=part.entries,
            size=0,
            mirror="",
            entries_read=False,
            topic_entries=0,
        )

    # --- partitions come and go -------------------------------------------------------------------------------

    def _taken(self, lease: Lease) -> None:
        assert self._opened
        self._parts[lease.partition] = _Part(lease)
        fresh = self._from_oldest and lease.offset == "0-0"
        self._opened[1].take(lease.partition, OLDEST if fresh else lease.offset)

    async def _gone(self, partition: int) -> None:
        part = self._parts.get(partition)
        if part is None:
            return
        self._remove(part)
        if self._in_hand and self._in_hand[0] is part:
            # Not for long, for no lease is renewed meanwhile; then the next worker gives the event out again.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s / 3):
                    await self._hand_free.wait()
        await self._commit([part])

    def _forget(self, part: _Part) -> None:
        assert self._opened
        self._opened[2].forget(part.lease.partition)
        self._remove(part)

    def _remove(self, part: _Part) -> None:
        assert self._opened
        del self._parts[part.lease.partition]
        self._opened[1].drop(part.lease.partition)
        self._pending = deque(item for item in self._pending if item[0] is not part)
