"""How long a flush gathers: by need. Nothing waits while the process is less than half busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

WINDOW_S = 0.1
"""How long one look at the process lasts."""
IDLE = 0.5
"""Below this share of the time nothing waits."""
_SCHEDULED = Path("/proc/thread-self/schedstat")


def busy_s() -> float:
    """Seconds in which this thread ran, or was ready and waited for a core. Only Linux reports the latter."""
    try:
        ran, waited, _ = _SCHEDULED.read_text().split()
    except OSError:
        return time.thread_time()
    return (int(ran) + int(waited)) / 1e9


class Linger:
    """The wait before a flush: 0 while the event loop is less than half busy, ``most_s`` when it is saturated."""

    def __init__(self, most_s: float, *, busy_s: Callable[[], float] = busy_s) -> None:
        self._most_s = most_s
        self._busy_s = busy_s
        self._looked_at = 0.0
        self._busy_then = 0.0
        self._now_s = 0.0

    def seconds(self, now: float) -> float:
        """How long the next flush gathers; ``now`` is in seconds of any monotonic clock."""
        passed = now - self._looked_at
        if passed >= WINDOW_S:
            busy = self._busy_s()
            share = min(1.0, (busy - self._busy_then) / passed) if self._looked_at else 0.0
            self._now_s = self._most_s * max(0.0, share - IDLE) / (1.0 - IDLE)
            self._looked_at, self._busy_then = now, busy
        return self._now_s
