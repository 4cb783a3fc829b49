"""The normalizer's logic for one partition: one attempt reader per run, whose events go to `events`."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts import Arg, Commit
from tokenbus.bus.stage.logic import RunPosition, StageLogic
from tokenbus.core.attempt_decoder import AttemptReader
from tokenbus.core.run.attempts import WORKER_LOST
from tokenbus.core.run.outbox import JOIN_LIMIT
from tokenbus.events import normalized as n
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import CONTROL_ATTEMPT, BusEvent, EventFrame, decode_raw, encode
from tokenbus_services.normalizer.image_offload import ImageKeeper, belongs_in_blob
from tokenbus_services.telemetry import NO_TRACER, RunTracer, Span

EVENTS_A_WRITE = 8
"""Events that become one entry, about."""
RUNS_AN_ENTRY = 1000
"""Maximum runs in one entry: a Lua script can unpack a few thousand values."""


class NormalizerLogic(StageLogic):
    """The normalizer's stage logic. Images are stored before the events that refer to them are emitted."""

    def __init__(
        self,
        partition: int,
        keys: Keys,
        images: ImageKeeper | None = None,
        tracer: RunTracer = NO_TRACER,
        now_ms: Callable[[], int] = int,
    ) -> None:
        """``images``: None leaves all images in their events. ``now_ms``: the workers' clock, for spans."""
        self._tracer, self._now_ms = tracer, now_ms
        self._events = keys.topic(partition, "events")
        self._parser_lease = keys.lease(partition, "parser")
        self._readers: dict[str, AttemptReader] = {}
        self._frames: dict[str, list[EventFrame]] = {}
        self._keeper = images
        self.outputs = 0
        self._large: list[tuple[list[BusEvent], int]] = []
        """Events since the last flush that need offloading, by list and index."""

    def apply(self, run: str, frame: bytes) -> None:
        raw = decode_raw(frame)
        reader = self._readers.get(run)
        if reader and raw.attempt < reader.attempt:
            return  # an outdated copy
        if reader is None or raw.attempt > reader.attempt:
            reader = self._readers[run] = AttemptReader(raw.attempt)
        if events := reader.read(raw):
            emitted = self._emit(run, EventFrame(raw.turn, raw.attempt, raw.at_ms, events))
            if self._keeper:
                places = range(len(emitted) - len(events), len(emitted))
                self._large += [
                    (emitted, place)
                    for place in places
                    if belongs_in_blob(emitted[place], images=not reader.images.inline)
                ]
        if reader.over:
            record_decoded(self._tracer, run, raw.turn, reader, self._now_ms)
            del self._readers[run]

    @property
    def replay_unfinished(self) -> bool:
        return bool(self._keeper and self._large)

    async def finish_replay(self) -> None:
        """Move the frames' images and large opaque data to the blob store."""
        waiting, self._large = self._large, []
        if self._keeper and waiting:
            large = [cast("n.Image | n.Audio | n.Opaque", events[place]) for events, place in waiting]
            replacements = await self._keeper.keep(large)
            # From the end, so that earlier indexes stay valid.
            for (events, place), instead in reversed(list(zip(waiting, replacements, strict=True))):
                events[place : place + 1] = instead

    def fail(self, run: str, error: ErrorInfo) -> None:
        # Addressed to the run rather than an attempt, because the attempt number may be unreadable.
        self._emit(run, EventFrame(0, CONTROL_ATTEMPT, 0, [n.Failed(error)]))
        self._readers.pop(run, None)

    def abandon(self, run: str, error: ErrorInfo) -> None:
        self._readers.pop(run, None)  # the normalizer publishes nothing itself

    def fail_unreadable(self, run: str, error: ErrorInfo, position: RunPosition) -> None:
        """The attempt's stream cannot be read any further: report it as lost, and let the parser decide what to do."""
        self._readers.pop(run, None)
        cut = ErrorInfo(code=WORKER_LOST, kind="internal", message=error.message, retryable=True)
        self._emit(run, EventFrame(position.turn, position.attempt, 0, [n.Cut(error.message, cut)]))

    def is_open(self, run: str) -> bool:
        return run in self._readers

    def flush(self, commit: Commit) -> None:
        size = 0
        self._large = []
        # An entry has each run once; a second frame of a run (its next attempt began, or a part of a large frame) goes
        # into another entry.
        self.outputs = 0
        while self._frames:
            fields: list[Arg] = []
            for run in list(self._frames)[:RUNS_AN_ENTRY]:
                frames = self._frames[run]
                frame = frames.pop(0)
                data = encode(frame)
                if may_be_divided(frame, len(data)) and len(parts := divided(frame)) > 1:
                    data = encode(parts[0])
                    frames[:0] = parts[1:]
                size += len(data)
                fields += (run, data)
                if not frames:
                    del self._frames[run]
            commit.append(self._events, fields)
        if size:
            commit.arrived(self._parser_lease, size)

    def discard_outputs(self) -> None:
        self._frames = {}
        self._large = []
        self.outputs = 0

    def snapshot(self, run: str) -> bytes:
        return self._readers[run].save()

    def restore(self, run: str, state: bytes) -> None:
        self._readers[run] = AttemptReader.load(state)

    def _emit(self, run: str, frame: EventFrame) -> list[BusEvent]:
        """Add a frame and return the event list that now ends in its events."""
        self.outputs += 1 + len(frame.events) // EVENTS_A_WRITE
        frames = self._frames.setdefault(run, [])
        if frames and frames[-1].attempt == frame.attempt:
            frames[-1].events.extend(frame.events)
        else:
            frames.append(frame)
        return frames[-1].events


def record_decoded(tracer: RunTracer, run: str, turn: int, reader: AttemptReader, now_ms: Callable[[], int]) -> None:
    """Record the span of an attempt's decoding, from its answer's head on the bus to its last event, if it had any."""
    if reader.opened_ms and (trace := tracer.trace(run, reader.traceparent)):
        tracer.record(
            trace,
            Span(
                name="decode",
                span_id=trace.span("decode", reader.attempt),
                parent_id=trace.attempt(reader.attempt),
                begin_ms=reader.opened_ms,
                end_ms=now_ms(),
                attributes={
                    "tokenbus.run.id": run,
                    "tokenbus.turn": turn,
                    "tokenbus.attempt": reader.attempt,
                    "tokenbus.frames": reader.frames,
                },
            ),
        )


# Divides a frame that costs much, so that the parser never has to apply and publish it all at once.
#
# A provider may send its whole answer as one event: megabytes of text, or thousands of short blocks. The parser works
# in rounds of whole entries, so it could not divide that.

ENTRY_COST = 16 * 1024
"""Cost of one part, in characters, unless a single event costs more."""
EVENT_COST = 64
"""Cost of an event beside its text. One that begins or ends a block becomes several public ones."""
DELTA_COST = 16
"""The same for a piece of a block's content, which is mostly joined to the one before."""
PIECE_CHARS = JOIN_LIMIT
"""Characters of one piece of a text: those of one public chunk."""


def divided(frame: EventFrame) -> list[EventFrame]:
    """Return the frame in parts, with the same events in the same order; long texts in pieces."""
    parts: list[list[BusEvent]] = [[]]
    cost = 0
    for event in frame.events:
        for piece in _pieces(event):
            text = _text_of(piece)
            more = EVENT_COST if text is None else DELTA_COST + len(text)
            if parts[-1] and cost + more > ENTRY_COST:
                parts.append([])
                cost = 0
            parts[-1].append(piece)
            cost += more
    return [msgspec.structs.replace(frame, events=events) for events in parts]


def may_be_divided(frame: EventFrame, size: int) -> bool:
    """Whether a frame of ``size`` bytes may cost more than one part. Cheap, for each frame."""
    return size + len(frame.events) * EVENT_COST > ENTRY_COST


def _pieces(event: BusEvent) -> list[BusEvent]:
    text = _text_of(event)
    if text is None or len(text) <= PIECE_CHARS:
        return [event]
    field = "fragment" if isinstance(event, n.ToolCallDelta) else "text"
    return [
        msgspec.structs.replace(event, **{field: text[at : at + PIECE_CHARS]})
        for at in range(0, len(text), PIECE_CHARS)
    ]


def _text_of(event: BusEvent) -> str | None:
    match event:
        case n.TextDelta() | n.TranscriptDelta() | n.ThinkingDelta() | n.RefusalDelta():
            return event.text
        case n.ToolCallDelta():
            return event.fragment
        case _:
            return None
