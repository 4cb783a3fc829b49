"""What a subscription could not give: entries that were trimmed before it read them, and entries that are no events."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tokenbus.errors import CursorTrimmed, Malformed

log = logging.getLogger(__name__)

OnTrimmed = Callable[[CursorTrimmed], None]
"""Called once for each partition whose unread entries were trimmed; then the subscription continues at the oldest
entry that is kept. What it raises is raised to the reader."""


def log_trimmed(error: CursorTrimmed) -> None:
    """Log the gap and continue: what `each` does by itself."""
    log.warning("events were trimmed before they were read: %s", error)


class Gaps:
    """Counts the gaps of one subscription and tells of them."""

    def __init__(self, on_trimmed: OnTrimmed | None) -> None:
        """``on_trimmed``: None to raise `CursorTrimmed`."""
        self.trimmed = 0
        """How often unread entries were trimmed, each partition on its own."""
        self.malformed = 0
        """How many entries were passed over because they are no events."""
        self._on_trimmed = on_trimmed

    def log_by_default(self) -> None:
        """Log what is trimmed, unless the caller said what else to do: nobody is there to catch an error."""
        self._on_trimmed = self._on_trimmed or log_trimmed

    def was_trimmed(self, error: CursorTrimmed) -> None:
        """Raises ``error``, or what `OnTrimmed` raises."""
        self.trimmed += 1
        if self._on_trimmed is None:
            raise error
        self._on_trimmed(error)

    def was_malformed(self, error: Malformed) -> None:
        """Log the entry; of many, ever fewer, so that a broken writer does not flood the log."""
        self.malformed += 1
        if self.malformed.bit_count() == 1:
            log.warning("entry passed over (%d so far): %s", self.malformed, error)
