"""What executors print, in the worker's log: a bounded amount of it, under the name of what printed it."""

from __future__ import annotations

import os
import time

import structlog

LINE_CHARS = 1000
BURST_CHARS = 8192
"""How much of one name is logged at once; then `CHARS_PER_S`."""
CHARS_PER_S = 1024
_READ_BYTES = 2**16
_READS = 4
"""Reads of a pipe in one look. What prints faster is slowed down."""
_NAMES = 1000

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Prints:
    """The log of all executors of a worker."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}
        """By name: how many characters may be logged, and since when."""
        self._dropped: dict[str, int] = {}
        """By name: characters that were not logged since the last line that was."""

    def drain(self, fd: int, name: str, pid: int) -> None:
        """Read what was printed to this pipe."""
        for _ in range(_READS):
            try:
                data = os.read(fd, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                return
            self._log(data, name, pid)

    def _log(self, data: bytes, name: str, pid: int) -> None:
        now = time.monotonic()
        left, since = self._left.pop(name, (float(BURST_CHARS), now))
        left = min(left + (now - since) * CHARS_PER_S, BURST_CHARS)
        taken = data[: int(left)]
        for line in taken.decode(errors="replace").splitlines():
            if not line.strip():
                continue
            if dropped := self._dropped.pop(name, 0):
                log.warning("prints_dropped", of=name, bytes=dropped)
            log.info("printed", of=name, pid=pid, text=line[:LINE_CHARS])
        self._left[name] = left - len(taken), now
        if len(data) > len(taken):
            self._dropped[name] = self._dropped.get(name, 0) + len(data) - len(taken)
        if len(self._left) > _NAMES:
            del self._left[next(iter(self._left))]
