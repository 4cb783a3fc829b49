"""How far the entries of one partition are done, when they are given out in order and done in any order: pure."""

from __future__ import annotations

from tokenbus.bus.keys import SubscribedTopic
from tokenbus.bus.server.stream_reader import Entry
from tokenbus.client.decode import TopicEvent, topic_event
from tokenbus.client.subscriptions.event_filter import Selection


class OffsetTracker:
    """The position up to which all is done, and what was given out after it."""

    def __init__(self, position: str) -> None:
        self.position = position
        """The last entry before which nothing is open."""
        self.entries = 0
        """How many entries ``position`` has passed since `told`."""
        self.open = 0
        """How many entries are given out and not done."""
        self.in_gap = False
        """``position`` is no entry, but the end of a gap."""
        self._given: dict[str, bool] = {}
        """Entries after the position, in order; whether each is done."""
        self._gaps: set[str] = set()

    def delivered(self, entry_id: str) -> None:
        """The next entry is given out."""
        self._given[entry_id] = False
        self.open += 1

    def done(self, entry_id: str) -> None:
        """An entry that was given out is done. Twice is once."""
        if self._given.get(entry_id) is not False:
            return
        self._given[entry_id] = True
        self.open -= 1
        self._advance()

    def skip(self, entry_id: str) -> None:
        """Entries up to this one were trimmed before they were read: once what was given out is done, the position
        is here."""
        self._given[entry_id] = True
        self._gaps.add(entry_id)
        self._advance()
        self.entries = 0  # the lag is counted anew: see `lag.show`

    def _advance(self) -> None:
        while self._given and next(iter(self._given.values())):
            self.position = next(iter(self._given))
            del self._given[self.position]
            self.entries += 1
            self.in_gap = self.position in self._gaps
            self._gaps.discard(self.position)


class AckTracker:
    """The events that were given out and are not done."""

    def __init__(self, topic: SubscribedTopic) -> None:
        self._topic: SubscribedTopic = topic
        self._places: dict[tuple[str, int], tuple[OffsetTracker, str]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def delivered(self, event: TopicEvent, progress: OffsetTracker, entry_id: str) -> bool:
        """An event is given out, unless it is in hand already: what its end will be is then that of this entry."""
        held = self._places.get((event.run, event.seq))
        if held:
            held[0].done(held[1])
        self._places[event.run, event.seq] = progress, entry_id
        return held is None

    def take(self, source: str, entry: Entry, progress: OffsetTracker, selection: Selection) -> TopicEvent | None:
        """The event of the next entry, given out; None where it is not wanted, or in hand already.

        Raises Malformed, naming ``source``, and what the selection raises; the entry is done then.
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

    def done(self, event: TopicEvent) -> bool:
        """The event is done; False where it was not in hand."""
        place = self._places.pop((event.run, event.seq), None)
        if place:
            place[0].done(place[1])
        return place is not None

    def drop(self) -> None:
        """What is in hand stays undone."""
        self._places.clear()
