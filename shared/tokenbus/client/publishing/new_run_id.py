"""Generates run ids from this process's clock."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable

from tokenbus.core.request.run_id import RANDOM_BITS, uuid7


class RunIds:
    """Generates UUIDv7 ids, each greater than the one before it, even if the clock stands still or is set back.

    Method 2 of RFC 9562 section 6.2: within one millisecond the random part increases by a random step. Thread-safe.
    """

    def __init__(self, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._ms = -1
        self._rest = 0

    def __call__(self) -> str:
        """Return a new id."""
        with self._lock:
            now = self._now_ms()
            if now > self._ms:
                # The top bit stays clear, so that the steps within one millisecond cannot overflow.
                self._ms, self._rest = now, secrets.randbits(RANDOM_BITS - 1)
            else:
                self._rest += 1 + secrets.randbits(32)
            return uuid7(self._ms, self._rest)


new_run_id = RunIds()
