"""Merges visible text for a screen, which need not be drawn more often than it refreshes. Pure: the caller passes the
time.

Chunks of one block are merged until the first has waited ``hold_s`` or they reach ``most`` characters. Any other event,
or a chunk of another block, flushes the merged text first: order is preserved, and the merged chunks concatenate to the
same content.
"""

from __future__ import annotations

import msgspec

from tokenbus.events.public import Chunk, PublicEvent

HOLD_S = 0.016
"""One frame at 60 Hz."""
MOST = 1024


class Coalescer:
    """Merges the events of one or more runs, preserving their order.

    A merged chunk has the seq of its last part, so it works as a cursor for all of them.
    """

    def __init__(self, *, hold_s: float = HOLD_S, most: int = MOST) -> None:
        """``hold_s``: maximum wait in seconds; ``most``: maximum characters. Raises ValueError if one is negative."""
        if hold_s < 0 or most < 0:
            raise ValueError("hold_s and most must not be negative")
        self._hold_s = hold_s
        self._most = most
        self._parts: list[Chunk] = []
        self._size = 0
        self._due = 0.0

    @property
    def due(self) -> float | None:
        """When to call `flush`, in seconds on the clock of `feed`; None if nothing is waiting."""
        return self._due if self._parts else None

    def feed(self, event: PublicEvent, now: float) -> list[PublicEvent]:
        """Add an event that arrived at ``now``, in seconds of any clock. Return the events to emit."""
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
        """Return the waiting text as one chunk, in a list; empty if nothing is waiting."""
        parts, self._parts = self._parts, []
        if len(parts) < 2:
            return list(parts)
        return [msgspec.structs.replace(parts[-1], text="".join(part.text for part in parts))]


def _region(chunk: Chunk) -> tuple[object, ...]:
    return chunk.run, chunk.attempt, chunk.block, chunk.visible, chunk.depth, chunk.tool_call_part
