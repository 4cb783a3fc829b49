"""The subscription without a group: an independent reader, for a screen or a log."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Literal, TypeVar, cast

from tokenbus.bus.keys import Keys, SubscribedTopic
from tokenbus.bus.server.stream_reader import Entry, id_key
from tokenbus.client.deployment import Deployment, Outage
from tokenbus.client.subscriptions.ack_tracker import AckTracker, OffsetTracker, each
from tokenbus.client.subscriptions.cursor import (
    NOTHING_YET,
    OLDEST,
    Cursor,
    EnteredOrIterated,
    Gaps,
    OnTrimmed,
    just_before,
    until_stopped,
)
from tokenbus.client.subscriptions.topic_reader import Selection, TopicReader, ends
from tokenbus.errors import CursorAhead, CursorTrimmed, DeploymentMismatch, Malformed, ServerUnavailable
from tokenbus.events.topics import TopicEvent

E = TypeVar("E", bound=TopicEvent)

PREFETCH = 1024
"""Maximum entries that a subscription holds: those read and not delivered, and those in handlers."""


class OrderedSubscription(EnteredOrIterated[E]):
    """Delivers every wanted event of a topic exactly once; events of one run in order, different runs in any order.

    Iterate with ``async for``, or call `each`. Inside ``async with`` an iteration may be left and resumed; without it,
    the subscription is closed when the iteration ends or is left.

    Starts when it is entered (``async with``) or first iterated: after a cursor, at the oldest entry that is kept, or
    with new events only. Iterating raises

    - CursorTrimmed, once, if events after the position were trimmed before they were read, unless ``on_trimmed`` is
      set. Iterating again continues at the oldest entry that is kept, and so does `cursor` (Redis 6.2 cannot detect
      this for a topic that was empty at the position);
    - CursorAhead if the starting cursor is past the newest entry;
    - ServerUnavailable if the server is unavailable for longer than the client's ``reconnect_s``; until then the
      subscription waits, then continues where it was. Iterating again tries again.

    Entries that are not events are logged, counted in ``malformed`` and skipped. Use from one task at a time.
    """

    def __init__(
        self,
        deployment: Deployment,
        topic: SubscribedTopic,
        *,
        begin: Cursor | Literal["now", "start"],
        selection: Selection,
        ack: Literal["auto", "explicit"],
        prefetch: int,
        reconnect_s: float,
        on_trimmed: OnTrimmed | None = None,
    ) -> None:
        self._deployment = deployment
        self._topic: SubscribedTopic = topic
        self._begin_at = begin
        self._selection = selection
        self._auto = ack == "auto"
        self._prefetch = prefetch
        self._outage = Outage(reconnect_s)
        self._keys: Keys | None = None
        self._reader: TopicReader | None = None
        self._parts: dict[int, OffsetTracker] = {}
        self._pending: deque[tuple[int, Entry]] = deque()
        self._tracker = AckTracker(topic)
        self._closed = False
        self.gaps = Gaps(on_trimmed)
        """Counts trimmed unread entries, and entries skipped because they are not events."""

    @property
    def cursor(self) -> Cursor:
        """The position after the last delivered event, from which another subscription can continue.

        With `each`: the position before the first event whose handler has not returned. With ``ack="explicit"``: before
        the first event that was not acknowledged.
        Raises RuntimeError if the subscription has not started.
        """
        if self._keys is None:
            raise RuntimeError("the subscription has not begun: enter it, or take an event first")
        return Cursor(self._topic, tuple(self._parts[p].position for p in sorted(self._parts)))

    async def _start(self) -> None:
        await self._open()

    async def aclose(self) -> None:
        """End the subscription: iteration ends and the connection is released. `cursor` stays usable."""
        self._closed = True
        self._pending.clear()
        if self._reader:
            await self._reader.close()

    async def __anext__(self) -> E:
        event = await self._take()
        if self._auto:
            self._tracker.done(event)
        return event

    def ack(self, event: E) -> None:
        """Let `cursor` pass the event (``ack="explicit"``). Does nothing if it is not in flight."""
        self._tracker.done(event)

    async def each(self, handler: Callable[[E], Awaitable[None]], *, concurrency: int = 1) -> None:
        """Call the handler with each event, for up to ``concurrency`` runs in parallel, in order within a run.

        Returns when the subscription is closed. Trimmed events are logged unless ``on_trimmed`` is set. If a handler or
        the iteration raises, the other handlers are cancelled and the error propagates; `cursor` then stays before the
        events that were not handled.
        """
        self.gaps.log_by_default()
        async with aclosing(until_stopped(self._take)) as events:
            await each(events, handler, self.ack, concurrency=concurrency, most=self._prefetch)

    async def _take(self) -> E:
        while not self._closed:
            while self._pending:
                partition, entry = self._pending.popleft()
                source = f"{self._topic} {partition}"
                try:
                    event = self._tracker.take(source, entry, self._parts[partition], self._selection)
                except Malformed as e:
                    self.gaps.was_malformed(e)
                    continue
                if event is not None:
                    return cast("E", event)
            try:
                await self._refill()
                self._outage.over()
            except ServerUnavailable as e:
                await self._outage.wait(e)
        raise StopAsyncIteration

    async def _refill(self) -> None:
        reader = self._reader or await self._open()
        if self._keys:
            await self._deployment.still(self._keys)
            for partition in range(len(self._parts), self._keys.partitions):
                self._add(reader, partition, NOTHING_YET)
        try:
            found = await reader.read()
        except CursorTrimmed as e:
            for partition, oldest in reader.oldest_after(e):
                self._parts[partition].skip(just_before(oldest))
            self.gaps.was_trimmed(e)
            return
        for partition, entries in found:
            self._pending.extend((partition, entry) for entry in entries)

    async def _open(self) -> TopicReader:
        deployment = self._deployment
        keys = await (deployment.keys() if self._begin_at == "start" else deployment.keys_of_now())
        positions = await self._begin(keys)
        self._keys, self._parts = keys, {}
        self._reader = TopicReader(self._deployment.server, keys, self._topic, most=self._prefetch)
        for partition, position in positions.items():
            self._add(self._reader, partition, position)
        return self._reader

    def _add(self, reader: TopicReader, partition: int, position: str) -> None:
        self._parts[partition] = OffsetTracker(position)
        reader.take(partition, position)

    async def _begin(self, keys: Keys) -> dict[int, str]:
        if isinstance(self._begin_at, Cursor):
            positions = self._begin_at.positions
            if len(positions) > keys.partitions or len(positions) < min(keys.ever):
                raise DeploymentMismatch("partitions", str(len(positions)), str(keys.partitions))
            await self._check_not_ahead(self._begin_at, keys)
            # Partitions that were added after the cursor was made had no entries then.
            return dict.fromkeys(range(keys.partitions), NOTHING_YET) | dict(enumerate(positions))
        if self._begin_at == "start":
            return dict.fromkeys(range(keys.partitions), OLDEST)
        return await ends(self._deployment.server, keys, self._topic)

    async def _check_not_ahead(self, cursor: Cursor, keys: Keys) -> None:
        newest = await ends(self._deployment.server, keys, self._topic)
        for partition, position in enumerate(cursor.positions):
            if position != OLDEST and id_key(position) > id_key(newest[partition]):
                raise CursorAhead(keys.topic(partition, self._topic), position, newest[partition])
