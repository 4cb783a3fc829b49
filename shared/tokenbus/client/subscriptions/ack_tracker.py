"""Tracks how far the entries of one partition are done. They are delivered in order and finished in any order. Pure."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

from tokenbus.bus.keys import SubscribedTopic
from tokenbus.bus.liveness import is_cancelled
from tokenbus.bus.server.stream_reader import Entry
from tokenbus.client.decode import OfRun, order_of, topic_event
from tokenbus.client.subscriptions.topic_reader import Selection
from tokenbus.events.sessions import SessionEvent
from tokenbus.events.topics import TopicEvent


class OffsetTracker:
    """The offset up to which every entry is done, and the entries delivered after it."""

    def __init__(self, position: str) -> None:
        self.position = position
        """The last entry up to which every entry is done."""
        self.entries = 0
        """How many entries ``position`` has passed since the last commit."""
        self.open = 0
        """How many entries are delivered and not done."""
        self.in_gap = False
        """Whether ``position`` is the end of a gap rather than an entry."""
        self._given: dict[str, bool] = {}
        """Entries delivered after the position, in order, and whether each is done."""
        self._gaps: set[str] = set()

    def delivered(self, entry_id: str) -> None:
        """Record that the next entry was delivered."""
        self._given[entry_id] = False
        self.open += 1

    def done(self, entry_id: str) -> None:
        """Mark a delivered entry as done. Idempotent."""
        if self._given.get(entry_id) is not False:
            return
        self._given[entry_id] = True
        self.open -= 1
        self._advance()

    def skip(self, entry_id: str) -> None:
        """Record a gap: entries up to this one were trimmed unread. The position moves here once earlier entries are
        done.
        """
        self._given[entry_id] = True
        self._gaps.add(entry_id)
        self._advance()
        self.entries = 0  # the lag is counted again: see `mirror_offset`

    def _advance(self) -> None:
        while self._given and next(iter(self._given.values())):
            self.position = next(iter(self._given))
            del self._given[self.position]
            self.entries += 1
            self.in_gap = self.position in self._gaps
            self._gaps.discard(self.position)


class AckTracker:
    """The events that were delivered and are not done."""

    def __init__(self, topic: SubscribedTopic) -> None:
        self._topic: SubscribedTopic = topic
        self._places: dict[tuple[str, int], tuple[OffsetTracker, str]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def delivered(self, event: TopicEvent, progress: OffsetTracker, entry_id: str) -> bool:
        """Record a delivered event. Returns False if it is already in flight; it is then done together with this newer
        entry.
        """
        place = order_of(event), event.seq
        held = self._places.get(place)
        if held:
            held[0].done(held[1])
        self._places[place] = progress, entry_id
        return held is None

    def take(self, source: str, entry: Entry, progress: OffsetTracker, selection: Selection) -> TopicEvent | None:
        """Decode and deliver the next entry; None if it is filtered out or already in flight.

        Raises Malformed, naming ``source``, and whatever the selection raises; the entry counts as done then.
        """
        place = entry[0].decode()
        progress.delivered(place)
        try:
            event = topic_event(self._topic, source, entry)
            wanted = selection.wants(event)
        except BaseException:
            progress.done(place)
            raise
        if not wanted:
            progress.done(place)
            return None
        return event if self.delivered(event, progress, place) else None

    def entry_of(self, order: str, seq: int) -> str:
        """The entry's id of an event in flight; empty if it is not, or is no event of the topic."""
        return self._places.get((order, seq), (None, ""))[1]

    def done(self, event: TopicEvent) -> bool:
        """Mark the event as done; return False if it was not in flight."""
        place = self._places.pop((order_of(event), event.seq), None)
        if place:
            place[0].done(place[1])
        return place is not None

    def drop(self) -> None:
        """Forget all events in flight; they stay undone."""
        self._places.clear()


E = TypeVar("E", bound=OfRun | SessionEvent)


class Again(NamedTuple):
    """What a handler returns for an event that it must get again."""

    pause_s: float | None
    """None: another process gets it."""


async def each(
    events: AsyncIterator[E],
    handler: Callable[[E], Awaitable[object]],
    done: Callable[[E], object],
    *,
    concurrency: int,
    most: int,
) -> None:
    """Handle all events, up to ``concurrency`` runs in parallel. Calls ``done`` with each event whose handler has
    returned. If it returned `Again`, only the event's run waits, and takes no place of the ``concurrency`` meanwhile.

    Holds at most ``most`` events. Returns when the events end. On the first error of a handler or of the events,
    cancels all other handlers and raises it. Raises ValueError for bounds below 1.
    """
    if concurrency < 1 or most < 1:
        raise ValueError("concurrency and prefetch: at least 1")
    lanes = _Lanes(handler, done, concurrency, most)
    try:
        async with asyncio.TaskGroup() as group:
            try:
                async for event in events:
                    await lanes.put(group, event)
            finally:
                lanes.ended.set()
    except BaseExceptionGroup as e:
        raise e.exceptions[0] from None


class _Lanes(Generic[E]):
    def __init__(
        self, handler: Callable[[E], Awaitable[object]], done: Callable[[E], object], concurrency: int, most: int
    ) -> None:
        self._handler = handler
        self._done = done
        self.ended = asyncio.Event()
        """Set when no more events come: then no run waits to try one again."""
        self._free = asyncio.Semaphore(concurrency)
        self._room = asyncio.Semaphore(most)
        self._lanes: dict[str, deque[E]] = {}
        """Per run or session: events queued behind the one being handled."""

    async def put(self, group: asyncio.TaskGroup, event: E) -> None:
        await self._room.acquire()
        order = order_of(event)
        lane = self._lanes.get(order)
        if lane is None:
            await self._free.acquire()
            lane = self._lanes[order] = deque([event])
            group.create_task(self._work(order, lane))
        else:
            lane.append(event)

    async def _work(self, order: str, lane: deque[E]) -> None:
        while lane:
            event = lane[0]
            try:
                result = await self._handler(event)
            except asyncio.CancelledError as e:
                if is_cancelled():
                    raise
                # A task group takes it for an end in order, and the run's further events would wait for ever.
                raise RuntimeError(f"the handler of an event of run {order} awaited what was cancelled") from e
            if isinstance(result, Again) and result.pause_s is not None:
                self._free.release()
                with suppress(TimeoutError):
                    async with asyncio.timeout(result.pause_s):
                        await self.ended.wait()
                await self._free.acquire()
                if self.ended.is_set():
                    break
                continue
            lane.popleft()
            if not isinstance(result, Again):
                self._done(event)
            self._room.release()
        del self._lanes[order]
        self._free.release()
