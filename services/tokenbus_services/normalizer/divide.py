"""Divides a frame that costs much, so that the parser never has to apply and publish it all at once.

A provider may send its whole answer as one event: megabytes of text, or thousands of short blocks. The parser works in
rounds of whole entries, so it could not divide that.
"""

from __future__ import annotations

import msgspec

from tokenbus.core.run.chunk_joining import JOIN_LIMIT
from tokenbus.events.frames import BusEvent, EventFrame
from tokenbus.events.normalized import RefusalDelta, TextDelta, ThinkingDelta, ToolCallDelta

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
    field = "fragment" if isinstance(event, ToolCallDelta) else "text"
    return [
        msgspec.structs.replace(event, **{field: text[at : at + PIECE_CHARS]})
        for at in range(0, len(text), PIECE_CHARS)
    ]


def _text_of(event: BusEvent) -> str | None:
    match event:
        case TextDelta() | ThinkingDelta() | RefusalDelta():
            return event.text
        case ToolCallDelta():
            return event.fragment
        case _:
            return None
