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
from tokenbus.policy.processor import Decision, NewText, NewToolCall
from tokenbus.policy.public.format import PublicChunkAccess, PublicEvents, PublicReader
from tokenbus.policy.stream_format import Writer


class Origin(msgspec.Struct, frozen=True):
    """Where an event comes from."""

    draft: int
    part: str = ""
    """Empty: from the call with the draft itself."""


class Known(msgspec.Struct):
    """What became of an origin: all that goes out of it."""

    origin: Origin
    events: list[PublicEvent] = []
    later: list[str] = []
    """Parts that were put off under it."""
    decisions: list[Decision] = []
    """That policies took there."""
    ends: bool = False
    """A policy ended the stream there."""


class Trace:
    """What goes out of one stream, by origin, since it was last taken."""

    def __init__(self) -> None:
        self._origins: dict[int, tuple[PublicEvent, Origin]] = {}
        """By identity of events that a policy sent and the next one, or the taker, has not had yet."""
        self._parts: dict[Origin, int] = {}
        self._known: dict[Origin, Known] = {}
        """Of the origins that were worked on and are not taken yet."""

    def draft(self, event: PublicEvent) -> None:
        """The stream is fed with this draft next."""
        self._origins[id(event)] = event, Origin(event.seq)
        self.of(Origin(event.seq))

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
        self.of(origin).later.append(part)
        return Origin(origin.draft, part)

    def of(self, origin: Origin) -> Known:
        """What is known of this origin now; it is worked on, whatever comes of it."""
        return self._known.setdefault(origin, Known(origin))

    def take(self, out: Sequence[PublicEvent]) -> list[Known]:
        """Every origin that was worked on since the last call.

        They stand in the order in which the last of each goes out. What must not overtake anything, a retry or an end,
        is the last of its origin: so nothing that goes out before it stands behind it.
        """
        last: dict[Origin, int] = {}
        for n, event in enumerate(out):
            origin = self.origin_of(event)
            self.of(origin).events.append(event)
            last[origin] = n
        known, self._known = self._known, {}
        return sorted(known.values(), key=lambda each: last.get(each.origin, -1))


class TracedEvents:
    """The dialect of the bus, with a trace of where everything comes from."""

    def __init__(self, events: PublicEvents, trace: Trace) -> None:
        self._events = events
        self._trace = trace

    @property
    def words(self) -> PublicChunkAccess:
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

    def before_chunk(self, chunk: PublicEvent) -> None:
        self._now = self._trace.origin_of(chunk)
        self._writer.before_chunk(chunk)

    def defer(self) -> object:
        return self._trace.put_off(self._now)

    def resume_deferred(self, mark: object) -> None:
        self._now = cast("Origin", mark)
        self._trace.of(self._now)

    def decided(self, decision: Decision) -> None:
        self._trace.of(self._now).decisions.append(decision)

    def write(self, sent: PublicEvent | NewText | NewToolCall) -> Sequence[PublicEvent]:
        return self._told(lambda: self._writer.write(sent))

    def terminate(self, decision: Decision) -> Sequence[PublicEvent]:
        self._trace.of(self._now).ends = True
        return self._told(lambda: self._writer.terminate(decision))

    def _told(self, write: Callable[[], Sequence[PublicEvent]]) -> list[PublicEvent]:
        out = list(write())
        for event in out:
            self._trace.sent(event, self._now)
        return out
