"""Divides a frame with much text, so that the parser never has to apply and publish megabytes at once.

A provider may send its whole answer as one event. The parser works in rounds of whole entries, so it could not divide
that.
"""

from __future__ import annotations

import msgspec

from tokenbus.core.run.chunk_joining import JOIN_LIMIT
from tokenbus.events.frames import BusEvent, EventFrame
from tokenbus.events.normalized import RefusalDelta, TextDelta, ThinkingDelta, ToolCallDelta

ENTRY_CHARS = 64 * 1024
"""Characters of one part, unless a single event that is not text has more."""
PIECE_CHARS = JOIN_LIMIT
"""Characters of one piece of a text: those of one public chunk."""


def divided(frame: EventFrame) -> list[EventFrame]:
    """Return the frame in parts, with the same events in the same order; long texts in pieces."""
    parts: list[list[BusEvent]] = [[]]
    size = 0
    for event in frame.events:
        for piece in _pieces(event):
            more = len(_text_of(piece))
            if parts[-1] and size + more > ENTRY_CHARS:
                parts.append([])
                size = 0
            parts[-1].append(piece)
            size += more
    return [msgspec.structs.replace(frame, events=events) for events in parts]


def _pieces(event: BusEvent) -> list[BusEvent]:
    text = _text_of(event)
    if len(text) <= PIECE_CHARS:
        return [event]
    field = "fragment" if isinstance(event, ToolCallDelta) else "text"
    return [
        msgspec.structs.replace(event, **{field: text[at : at + PIECE_CHARS]})
        for at in range(0, len(text), PIECE_CHARS)
    ]


def _text_of(event: BusEvent) -> str:
    match event:
        case TextDelta() | ThinkingDelta() | RefusalDelta():
            return event.text
        case ToolCallDelta():
            return event.fragment
        case _:
            return ""
