"""Decide whether items of a fair queue must be taken by turn instead of in arrival order."""

from __future__ import annotations

LONG_MS = 20
"""If an item waited this long before its read began, items arrive faster than they are processed."""


class Backlog:
    """Estimates from a worker's own reads whether items wait in the queue.

    While nothing waits, a blocking read is the cheapest way to get an item, and arrival order is fair. The duration of
    a read says nothing, because on a busy event loop the reply waits too.
    """

    def __init__(self) -> None:
        self.deep = False
        """Whether items wait, or may wait."""

    def read(self, waited_ms: float) -> None:
        """Record a read in arrival order whose oldest item had waited ``waited_ms`` when the read began."""
        self.deep = waited_ms >= LONG_MS

    def left(self, waiting: int) -> None:
        """Record the number of items that wait for their turn."""
        self.deep = waiting > 0
