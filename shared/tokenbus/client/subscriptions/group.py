"""The subscription with a group: several workers share a topic's runs.

A lease gives each partition to one worker of the group at a time. That worker reads it with plain XREAD from the
group's offset and moves the offset as events are done. So a run's events stay in order, and no event is lost if a
worker dies.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any, Literal, NamedTuple, TypeVar, cast

from redis.exceptions import RedisError

from tokenbus.bus.keys import Keys, SubscribedTopic
from tokenbus.bus.leases import Lease, Leases
from tokenbus.bus.liveness import beat, liveness_of_caller
from tokenbus.bus.scripts import Commit, ScriptCall
from tokenbus.bus.scripts.topics import mirror_offset
from tokenbus.bus.server.run_scripts import run_scripts
from tokenbus.bus.server.server import Server, translated
from tokenbus.bus.server.stream_reader import Entry
from tokenbus.client.decode import order_of, topic_event
from tokenbus.client.deployment import Deployment, Outage
from tokenbus.client.subscriptions.ack_tracker import AckTracker, Again, OffsetTracker, each
from tokenbus.client.subscriptions.cursor import OLDEST, EnteredOrIterated, Gaps, OnTrimmed, just_before, until_stopped
from tokenbus.client.subscriptions.poison import Poison, Returned
from tokenbus.client.subscriptions.topic_reader import Selection, TopicReader
from tokenbus.errors import CursorTrimmed, Malformed, ServerUnavailable
from tokenbus.events.topics import TopicEvent

E = TypeVar("E", bound=TopicEvent)

_GROUP = re.compile(r"[A-Za-z0-9._-]{1,64}")


class _Opened(NamedTuple):
    keys: Keys
    reader: TopicReader
    leases: Leases
    acknowledging: OffsetCommitter
    returned: Returned[Any]


class SharedSubscription(EnteredOrIterated[E]):
    """Delivers every wanted event of a topic to one worker of a group, at least once, in order within a run.

    A run's events go to one worker at a time.

    - ``ack="auto"``: taking the next event acknowledges the one before it. The last event is acknowledged if ``async
      with`` exits normally, but not if it exits by an exception or `aclose` ends the iteration.
    - ``ack="explicit"``: `ack` acknowledges an event, in any order. At most ``prefetch`` events are unacknowledged.
    - `each`: an event is acknowledged when its handler has returned.

    Acknowledgements are sent when the worker runs out of events, after a second, and when the subscription is closed.
    If a worker dies, its unacknowledged events are delivered again, so ``(event.run, event.seq)`` may come twice.

    A new group starts with new events or at the oldest entry that is kept. An existing group continues where it
    stopped, even if it had no workers meanwhile. Workers beyond the number of partitions stay idle. A worker that
    blocks its event loop for longer than ``lease_s`` loses its partitions. An iteration outside of ``async with``
    closes the subscription on exit. Iterating raises CursorTrimmed and ServerUnavailable as `OrderedSubscription` does;
    a gap is reported once, to one worker, because it is acknowledged with the events before it. Entries that are not
    events are logged, counted and skipped. Use from one task at a time, except `ack`.

    The offset is mirrored into a consumer group ``<topic>:<group>`` of each partition's stream, so that standard tools
    can show the lag; nothing reads from that consumer group.
    """

    def __init__(
        self,
        deployment: Deployment,
        topic: SubscribedTopic,
        *,
        group: str,
        begin: Literal["now", "start"],
        selection: Selection,
        ack: Literal["auto", "explicit"],
        prefetch: int,
        max_unacknowledged: int | None = None,
        reconnect_s: float,
        on_trimmed: OnTrimmed | None = None,
        lease_s: float = 3.0,
    ) -> None:
        """``max_unacknowledged``: maximum events delivered and not done; None: same as ``prefetch``.

        Raises ValueError if the group's name is not 1 to 64 letters, digits, dots, dashes or underscores.
        """
        if not _GROUP.fullmatch(group):
            raise ValueError(f"group {group!r}: must be 1 to 64 letters, digits, dots, dashes or underscores")
        self._deployment = deployment
        self._topic: SubscribedTopic = topic
        self._group = f"{topic}:{group}"
        self._from_oldest = begin == "start"
        self._selection = selection
        self._auto = ack == "auto"
        self._prefetch = prefetch
        self._max_unacknowledged = max_unacknowledged or prefetch
        self._lease_s = lease_s
        self._outage = Outage(reconnect_s)
        self._opened: _Opened | None = None
        self._parts: dict[int, OwnedPartition] = {}
        self._leaving: dict[int, OwnedPartition] = {}
        """Partitions that are lost or about to be released, while handlers may finish."""
        self._pending: deque[tuple[OwnedPartition, Entry]] = deque()
        self._tracker = AckTracker(topic)
        self._last: E | None = None
        """Acknowledged when the next event is taken."""
        self._acked = asyncio.Event()
        self._closed = False
        self._poison: Poison[Any] | None = None
        self.decode_returned: Callable[[str, Entry], Any] = lambda stream, entry: topic_event(topic, stream, entry)
        """Decodes what `tokenbus dead retry` gave back to this group."""
        self.gaps = Gaps(on_trimmed)
        """Counts trimmed unread entries, and entries skipped because they are not events."""

    @property
    def partitions(self) -> list[int]:
        """The partitions that this worker owns now."""
        return sorted(self._parts)

    async def _start(self) -> None:
        await self._open()

    async def aclose(self) -> None:
        """Acknowledge what is done, release the partitions to the group's other workers, and end the iteration.

        If the server is unavailable, nothing is acknowledged and those events are delivered again.
        """
        self._closed = True
        self._pending.clear()
        self._tracker.drop()
        self._acked.set()
        if self._opened:
            await self._opened.leases.close()
            await self._opened.reader.close()
            with suppress(RedisError, OSError):  # else it is given back again
                await self._opened.returned.close()

    def ack(self, event: E) -> None:
        """Mark the event as done (``ack="explicit"``). Does nothing if it is not in flight.

        Sent to the server in batches, within a second or two. If another worker owns the partition by then, the event
        is delivered again there.
        """
        if not (self._opened and self._opened.returned.done(event)):
            self._tracker.done(event)
        self._acked.set()

    async def each(
        self, handler: Callable[[E], Awaitable[None]], *, concurrency: int = 1, tries: int | None = None
    ) -> None:
        """Call the handler with each event, for up to ``concurrency`` runs in parallel, in order within a run.

        An event is done when its handler has returned. Returns when the subscription is closed, and closes it on exit
        in any case. Trimmed events are logged unless ``on_trimmed`` is set. If the iteration raises, or without
        ``tries`` a handler, the other handlers are cancelled and the error propagates.

        With ``tries``, an event whose handler raises is handled again after a pause of 0.5 s that doubles up to 30 s.
        Only its run waits. The group's processes count the tries together, on the server. After so many, the event
        becomes a dead letter, which `tokenbus dead retry` gives back to the group, and its run goes on.
        """
        self._auto = False
        self.gaps.log_by_default()
        try:
            async with aclosing(until_stopped(self.__anext__)) as events:
                await each(
                    events, self._guarded(handler, tries), self.ack, concurrency=concurrency, most=self._prefetch
                )
        finally:
            await self.aclose()

    async def __anext__(self) -> E:
        self._last_is_done()
        event = await self._take()
        if self._auto:
            self._last = event
        return event

    def _guarded(
        self, handler: Callable[[Any], Awaitable[None]], tries: int | None
    ) -> Callable[[Any], Awaitable[Again | None]]:
        if tries is not None and tries < 1:
            raise ValueError("tries: at least 1")

        async def handle(event: Any) -> Again | None:
            assert self._opened
            keys, parts, order = self._opened.keys, self._parts | self._leaving, order_of(event)
            lease = next((parts[p].lease for p in keys.places(order) if p in parts), None)
            if lease is None:
                return Again(None)  # its partition is another worker's now
            if tries is None:
                await handler(event)
                return None
            if self._poison is None:
                self._poison = Poison(
                    self._deployment.server,
                    keys,
                    self._group,
                    handler,
                    tries=tries,
                    in_hand=self._max_unacknowledged,
                    stop_if=lambda: self._closed,
                )
            return await self._poison.handle(event, lease, self._tracker.entry_of(order, event.seq))

        return handle

    def _last_is_done(self) -> None:
        if self._last is not None:
            self.ack(self._last)
            self._last = None

    async def _take(self) -> E:
        while not self._closed:
            beat()  # of a worker's task, if this is one
            try:
                await self._commit_offsets()
                await self._look_for_returned()
                if len(self._tracker) >= self._max_unacknowledged:
                    await self._wait_for_ack()
                elif not self._pending and not (self._opened and self._opened.returned.waiting):
                    await self._refill()
                self._outage.over()
            except ServerUnavailable as e:
                await self._outage.wait(e)
                continue
            if len(self._tracker) < self._max_unacknowledged and (event := self._deliver()) is not None:
                return event
        raise StopAsyncIteration

    def _deliver(self) -> E | None:
        """Return the next wanted event that was given back or has been read."""
        while self._opened and self._opened.returned.waiting:
            try:
                return self._opened.returned.take()
            except Malformed as e:
                self.gaps.was_malformed(e)
        while self._pending:
            part, entry = self._pending.popleft()
            source = f"{self._topic} {part.lease.partition}"
            try:
                event = self._tracker.take(source, entry, part, self._selection)
            except Malformed as e:
                self.gaps.was_malformed(e)
                continue
            if event is not None:
                return cast("E", event)
        return None

    async def _wait_for_ack(self) -> None:
        self._acked.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(ACK_S):  # then send the acknowledgements
                await self._acked.wait()

    async def _open(self) -> _Opened:
        server = self._deployment.server
        keys = await self._deployment.keys_of_now()
        reader = TopicReader(server, keys, self._topic, most=self._prefetch)
        leases = Leases(
            server,
            keys,
            group=self._group,
            topic=self._topic,
            worker=f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}",
            on_acquired=self._on_acquired,
            on_revoked=self._on_revoked,
            ttl_s=self._lease_s,
            tick_s=self._lease_s / 12,
            start="0-0" if self._from_oldest else "$",
            liveness=liveness_of_caller(),
        )
        counts = (await server.check()).entries_read
        acknowledging = OffsetCommitter(
            server, keys, self._topic, group=self._group, lease_s=self._lease_s, entries_read=counts
        )
        returned = Returned[Any](server, keys, self._group, self.decode_returned)
        self._opened = _Opened(keys, reader, leases, acknowledging, returned)
        try:
            with translated(server):
                await leases.open()
        except BaseException:
            self._opened = None
            self._parts.clear()
            raise
        return self._opened

    async def _refill(self) -> None:
        opened = self._opened or await self._open()
        opened.leases.check()
        await self._deployment.still(opened.keys)
        try:
            found = await opened.reader.read()
        except CursorTrimmed as e:
            for part in self._parts.values():
                part.mirrored = False  # trimmed entries count as read
            for partition, oldest in opened.reader.oldest_after(e):
                self._parts[partition].skip(just_before(oldest))
            self.gaps.was_trimmed(e)
            return
        for partition, entries in found:
            part = self._parts[partition]
            self._pending.extend((part, entry) for entry in entries)

    async def _commit_offsets(self) -> None:
        """Send due acknowledgements. Raises ServerUnavailable."""
        if not self._opened or (self._pending and not self._opened.acknowledging.due):
            return
        with translated(self._deployment.server):
            for part in await self._opened.acknowledging.commit_and_mirror(list(self._parts.values())):
                if self._parts.get(part.lease.partition) is part:
                    self._forget(part)

    async def _look_for_returned(self) -> None:
        """Take up dead letters that were given back. Raises ServerUnavailable."""
        if self._opened:
            with translated(self._deployment.server):
                await self._opened.returned.look(self._parts)

    # --- partitions come and go -------------------------------------------------------------------------------

    def _on_acquired(self, lease: Lease) -> None:
        assert self._opened
        self._parts[lease.partition] = OwnedPartition(lease)
        fresh = self._from_oldest and lease.offset == "0-0"
        self._opened.reader.take(lease.partition, OLDEST if fresh else lease.offset)

    async def _on_revoked(self, partition: int) -> None:
        part = self._parts.get(partition)
        if part is None:
            return
        self._remove(part)
        # Give handlers a short time to finish; no lease is renewed meanwhile. The next worker redelivers events still
        # in flight.
        self._leaving[partition] = part
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s / 3):
                    while part.open and not self._closed:
                        self._acked.clear()
                        await self._acked.wait()
        finally:
            del self._leaving[partition]
        assert self._opened
        await self._opened.acknowledging.commit([part])
        if self._poison:
            await self._poison.leave(part.lease)

    def _forget(self, part: OwnedPartition) -> None:
        assert self._opened
        self._opened.leases.forget(part.lease.partition)
        self._remove(part)

    def _remove(self, part: OwnedPartition) -> None:
        assert self._opened
        del self._parts[part.lease.partition]
        self._opened.reader.drop(part.lease.partition)
        self._pending = deque(item for item in self._pending if item[0] is not part)


def guarded(
    subscription: SharedSubscription[Any], handler: Callable[[Any], Awaitable[None]], tries: int | None
) -> Callable[[Any], Awaitable[Again | None]]:
    """The handler for the events of partitions that are still owned, with the tries of `SharedSubscription.each`.

    Raises ValueError for less than 1.
    """
    return subscription._guarded(handler, tries)  # pyright: ignore[reportPrivateUsage]


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
