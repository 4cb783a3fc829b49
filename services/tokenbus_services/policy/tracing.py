"""Which draft each outgoing event comes from, through a chain of policies that may put things off.

What comes of a draft must be known again after a crash, when policies are called once more and what they put off is
known sooner or later than it was. So every event has an origin that no timing changes: the draft, and which of the
things that were put off under it, if any. An event that a policy sends when it is called with one has that one's
origin; what it puts off then is a new part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from tokenbus.events.public import PublicEvent
from tokenbus.policy.dialect import Writer
from tokenbus.policy.processor import NewText, NewToolCall
from tokenbus.policy.public_events import PublicEvents, PublicReader, PublicWords


class Origin(msgspec.Struct, frozen=True):
    """Where an event comes from."""

    draft: int
    part: str = ""
    """Empty: from the call with the draft itself."""


class Trace:
    """What goes out of one stream, by origin, since it was last taken."""

    def __init__(self) -> None:
        self._origins: dict[int, tuple[PublicEvent, Origin]] = {}
        """By identity of events that a policy sent and the next one, or the taker, has not had yet."""
        self._parts: dict[Origin, int] = {}
        self._put_off: dict[Origin, list[str]] = {}
        self._touched: dict[Origin, None] = {}

    def draft(self, event: PublicEvent) -> None:
        """The stream is fed with this draft next."""
        self._origins[id(event)] = event, Origin(event.seq)
        self._touched[Origin(event.seq)] = None

    def origin_of(self, event: PublicEvent) -> Origin:
        """Where this event comes from, which is asked once."""
        return self._origins.pop(id(event))[1]

    def sent(self, event: PublicEvent, origin: Origin) -> None:
        """A policy sent it."""
        self._origins[id(event)] = event, origin

    def put_off(self, origin: Origin) -> Origin:
        """A new part of this origin's draft."""
        nth = self._parts[origin] = self._parts.get(origin, 0) + 1
        part = f"{origin.part}.{nth}" if origin.part else str(nth)
        self._put_off.setdefault(origin, []).append(part)
        return Origin(origin.draft, part)

    def taken_up(self, origin: Origin) -> None:
        """This part is known, whatever comes of it."""
        self._touched[origin] = None

    def take(self, out: Sequence[PublicEvent]) -> list[tuple[Origin, list[PublicEvent], list[str]]]:
        """Every origin that was worked on since the last call, what goes out of it, and the parts put off under it."""
        events: dict[Origin, list[PublicEvent]] = {origin: [] for origin in self._touched}
        for event in out:
            events.setdefault(self.origin_of(event), []).append(event)
        taken = [(origin, said, self._put_off.pop(origin, [])) for origin, said in events.items()]
        self._touched = {}
        return taken


class TracedEvents:
    """The dialect of the bus, with a trace of where everything comes from."""

    def __init__(self, events: PublicEvents, trace: Trace) -> None:
        self._events = events
        self._trace = trace

    @property
    def words(self) -> PublicWords:
        return self._events.words

    def reader(self) -> PublicReader:
        return self._events.reader()

    def writer(self) -> TracedWriter:
        return TracedWriter(self._events.writer(), self._trace)


class TracedWriter:
    """Of one policy."""

    def __init__(self, writer: Writer[PublicEvent], trace: Trace) -> None:
        self._writer = writer
        self._trace = trace
        self._now = Origin(0)

    def heard(self, chunk: PublicEvent) -> None:
        self._now = self._trace.origin_of(chunk)
        self._writer.heard(chunk)

    def put_off(self) -> object:
        return self._trace.put_off(self._now)

    def taken_up(self, mark: object) -> None:
        self._now = cast("Origin", mark)
        self._trace.taken_up(self._now)

    def write(self, sent: PublicEvent | NewText | NewToolCall) -> Sequence[PublicEvent]:
        return self._told(lambda: self._writer.write(sent))

    def terminate(self) -> Sequence[PublicEvent]:
        return self._told(self._writer.terminate)

    def _told(self, write: Callable[[], Sequence[PublicEvent]]) -> list[PublicEvent]:
        out = list(write())
        for event in out:
            self._trace.sent(event, self._now)
        return out
