"""Gathers visible text for a screen, which need not be drawn more often than it is refreshed. Pure: the clock is given
in.

Chunks of one block are joined until the first of them has waited ``hold_s`` or they are ``most`` characters long. Every
other event, and a chunk of another block, puts out what is gathered before it: nothing changes its place, and the
joined chunks concatenate to the same content.
"""

from __future__ import annotations

import msgspec

from tokenbus.events.public import Chunk, PublicEvent

HOLD_S = 0.016
"""A frame of a screen that is drawn 60 times a second."""
MOST = 1024


class Coalescer:
    """The events of one run, or of several: those of each keep their order, and those of different runs too.

    A joined chunk has the seq of its last part: as a cursor it stands for all of them.
    """

    def __init__(self, *, hold_s: float = HOLD_S, most: int = MOST) -> None:
        """``hold_s``: seconds that a piece waits at most; ``most``: characters. Raises ValueError where one is
        negative."""
        if hold_s < 0 or most < 0:
            raise ValueError("hold_s and most: not negative")
        self._hold_s = hold_s
        self._most = most
        self._parts: list[Chunk] = []
        self._size = 0
        self._due = 0.0

    @property
    def due(self) -> float | None:
        """When `flush` is to be called, on the clock of `feed`; None where nothing waits."""
        return self._due if self._parts else None

    def feed(self, event: PublicEvent, now: float) -> list[PublicEvent]:
        """What goes out with this event, which came at ``now``."""
        if not isinstance(event, Chunk):
            return [*self.flush(), event]
        out: list[PublicEvent] = []
        if self._parts and _region(self._parts[0]) != _region(event):
            out += self.flush()
        if not self._parts:
            self._due, self._size = now + self._hold_s, 0
        self._parts.append(event)
        self._size += len(event.text)
        if self._size >= self._most or now >= self._due:
            out += self.flush()
        return out

    def flush(self) -> list[PublicEvent]:
        """What waits, as one chunk."""
        parts, self._parts = self._parts, []
        if len(parts) < 2:
            return list(parts)
        return [msgspec.structs.replace(parts[-1], text="".join(part.text for part in parts))]


def _region(chunk: Chunk) -> tuple[object, ...]:
    return chunk.run, chunk.attempt, chunk.block, chunk.visible, chunk.depth, chunk.tool_call_part
