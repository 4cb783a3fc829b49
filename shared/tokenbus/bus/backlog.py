"""Whether items of a fair queue wait, so that they are taken by turn and not as they came."""

from __future__ import annotations

LONG_MS = 20
"""An item that lay unread for so long when its read began: more come than are worked on at once."""


class Backlog:
    """What a worker's own reads tell of the queue.

    While nothing waits, a blocking read is the cheapest way to an item, and the first to come is the first to go. How
    long a read takes says nothing: on a busy event loop its reply waits too.
    """

    def __init__(self) -> None:
        self.deep = False
        """Items wait, or may do so."""

    def read(self, waited_ms: float) -> None:
        """The oldest item of a read in the order of arrival had waited so long when the read began."""
        self.deep = waited_ms >= LONG_MS

    def left(self, waiting: int) -> None:
        """So many wait for their turn."""
        self.deep = waiting > 0
