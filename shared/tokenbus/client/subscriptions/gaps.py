"""Reports what a subscription could not deliver: entries trimmed unread, and entries that are not events."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tokenbus.errors import CursorTrimmed, Malformed

log = logging.getLogger(__name__)

OnTrimmed = Callable[[CursorTrimmed], None]
"""Called once for each partition whose unread entries were trimmed; the subscription then continues at the oldest entry
that is kept. Its exceptions propagate to the reader.
"""


def log_trimmed(error: CursorTrimmed) -> None:
    """Log the gap and continue; the default of `each`."""
    log.warning("events were trimmed before they were read: %s", error)


class Gaps:
    """Counts and reports the gaps of one subscription."""

    def __init__(self, on_trimmed: OnTrimmed | None) -> None:
        """``on_trimmed``: None to raise `CursorTrimmed`."""
        self.trimmed = 0
        """How often unread entries were trimmed, counted per partition."""
        self.malformed = 0
        """How many entries were skipped because they are not events."""
        self._on_trimmed = on_trimmed

    def log_by_default(self) -> None:
        """Log trimmed events unless the caller set a handler: inside `each` no caller can catch the error."""
        self._on_trimmed = self._on_trimmed or log_trimmed

    def was_trimmed(self, error: CursorTrimmed) -> None:
        """Count and report a gap. Raises ``error`` if there is no handler, and whatever the handler raises."""
        self.trimmed += 1
        if self._on_trimmed is None:
            raise error
        self._on_trimmed(error)

    def was_malformed(self, error: Malformed) -> None:
        """Count and log the entry. Logs ever less often, so that a broken writer does not flood the log."""
        self.malformed += 1
        if self.malformed.bit_count() == 1:
            log.warning("entry passed over (%d so far): %s", self.malformed, error)
