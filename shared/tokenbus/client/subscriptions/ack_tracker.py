"""Tracks how far the entries of one partition are done. They are delivered in order and finished in any order. Pure."""

from __future__ import annotations

from tokenbus.bus.keys import SubscribedTopic
from tokenbus.bus.server.stream_reader import Entry
from tokenbus.client.decode import TopicEvent, topic_event
from tokenbus.client.subscriptions.event_filter import Selection


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
        held = self._places.get((event.run, event.seq))
        if held:
            held[0].done(held[1])
        self._places[event.run, event.seq] = progress, entry_id
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

    def entry_of(self, run: str, seq: int) -> str:
        """The entry's id of an event in flight; empty if it is not, or is no event of the topic."""
        return self._places.get((run, seq), (None, ""))[1]

    def done(self, event: TopicEvent) -> bool:
        """Mark the event as done; return False if it was not in flight."""
        place = self._places.pop((event.run, event.seq), None)
        if place:
            place[0].done(place[1])
        return place is not None

    def drop(self) -> None:
        """Forget all events in flight; they stay undone."""
        self._places.clear()
