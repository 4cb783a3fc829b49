"""Traces each outgoing event to its draft, through a chain of policies that may defer work.

After a crash, policies are called again and deferred work finishes in another order, but outputs must still match their
drafts. So every event has an origin that does not depend on timing: the draft, and which work item deferred under it,
if any. An event sent during a call inherits the origin of that call's event; work deferred there is a new part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from tokenbus.events.public import PublicEvent
from tokenbus.policy.processor import Decision, NewText, NewToolCall
from tokenbus.policy.public import PublicChunkAccess, PublicEvents, PublicReader
from tokenbus.policy.stream_format import Writer


class Origin(msgspec.Struct, frozen=True):
    draft: int
    part: str = ""
    """Empty: from the call with the draft itself."""


class OriginOutput(msgspec.Struct):
    """The result for an origin: everything that goes out for it."""

    origin: Origin
    events: list[PublicEvent] = []
    later: list[str] = []
    """Parts deferred under it."""
    decisions: list[Decision] = []
    """Decisions made there."""
    ends: bool = False
    """Whether a policy terminated the stream there."""


class Provenance:
    """What goes out of one stream, by origin, since it was last taken."""

    def __init__(self) -> None:
        self._origins: dict[int, tuple[PublicEvent, Origin]] = {}
        """By identity: events that a policy sent and that no one has consumed yet."""
        self._parts: dict[Origin, int] = {}
        self._known: dict[Origin, OriginOutput] = {}
        """Origins worked on and not taken yet."""

    def draft(self, event: PublicEvent) -> None:
        """Note the draft that is fed next."""
        self._origins[id(event)] = event, Origin(event.seq)
        self.of(Origin(event.seq))

    def origin_of(self, event: PublicEvent) -> Origin:
        """Return this event's origin. Can be called once per event."""
        return self._origins.pop(id(event))[1]

    def sent(self, event: PublicEvent, origin: Origin) -> None:
        """Note the origin of an event that a policy sent."""
        self._origins[id(event)] = event, origin

    def add_part(self, origin: Origin) -> Origin:
        """Create a new part of this origin's draft."""
        nth = self._parts[origin] = self._parts.get(origin, 0) + 1
        part = f"{origin.part}.{nth}" if origin.part else str(nth)
        self.of(origin).later.append(part)
        return Origin(origin.draft, part)

    def of(self, origin: Origin) -> OriginOutput:
        """Return the current result for this origin, and mark it as worked on."""
        return self._known.setdefault(origin, OriginOutput(origin))

    def take(self, out: Sequence[PublicEvent]) -> list[OriginOutput]:
        """Return and clear every origin worked on since the last call.

        They are ordered by the last event of each. An event that must not overtake anything, a retry or an end, is the
        last of its origin: so everything that goes out before it is ordered before it.
        """
        last: dict[Origin, int] = {}
        for n, event in enumerate(out):
            origin = self.origin_of(event)
            self.of(origin).events.append(event)
            last[origin] = n
        known, self._known = self._known, {}
        return sorted(known.values(), key=lambda each: last.get(each.origin, -1))


class TracedEvents:
    """The bus's stream format, with a trace of origins."""

    def __init__(self, events: PublicEvents, trace: Provenance) -> None:
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
    def __init__(self, writer: Writer[PublicEvent], trace: Provenance) -> None:
        self._writer = writer
        self._trace = trace
        self._now = Origin(0)

    def before_chunk(self, chunk: PublicEvent) -> None:
        self._now = self._trace.origin_of(chunk)
        self._writer.before_chunk(chunk)

    def defer(self) -> object:
        return self._trace.add_part(self._now)

    def resume_deferred(self, mark: object) -> None:
        self._now = cast("Origin", mark)
        self._trace.of(self._now)

    def decided(self, decision: Decision) -> None:
        self._trace.of(self._now).decisions.append(decision)

    def write(self, sent: PublicEvent | NewText | NewToolCall) -> Sequence[PublicEvent]:
        return self._traced(lambda: self._writer.write(sent))

    def terminate(self, decision: Decision) -> Sequence[PublicEvent]:
        self._trace.of(self._now).ends = True
        return self._traced(lambda: self._writer.terminate(decision))

    def _traced(self, write: Callable[[], Sequence[PublicEvent]]) -> list[PublicEvent]:
        out = list(write())
        for event in out:
            self._trace.sent(event, self._now)
        return out
