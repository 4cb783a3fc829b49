"""Delivers a call's progress reports to subscribers, adapted to the bus and rate-limited.

Progress is for people who wait, so it never delays or fails a call: reports that cannot be sent are dropped.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Self, TypeAlias

import structlog

from tokenbus.events.frames import ToolReported

GAP_S = 0.5
"""Minimum interval between two reports of a call; in between, only the latest is kept."""
MESSAGE_CHARS = 200

Deliver: TypeAlias = Callable[[ToolReported], Awaitable[object]]
"""Sends a report once. Exceptions are logged."""

_log = structlog.stdlib.get_logger()


class Reporter:
    """Reports the progress of one call. Use as a context manager; after the block nothing more is sent."""

    def __init__(self, block: int, deliver: Deliver | None, redact: Callable[[str], str]) -> None:
        self._block = block
        self._deliver = deliver
        self._redact = redact
        self._loop = asyncio.get_running_loop()
        self._latest: tuple[float, float | None, str | None] | None = None
        self._woken = False
        self._closed = False
        self._sending: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True
        if self._sending:
            self._sending.cancel()

    def report(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Record a report, from any thread, and return at once."""
        self._latest = progress, total, message
        if not self._woken:  # a tool may report faster than the loop runs
            self._woken = True
            with suppress(RuntimeError):  # the loop has ended, but an abandoned thread has not
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._woken = False
        if self._deliver and self._sending is None and not self._closed:
            self._sending = asyncio.create_task(self._send(self._deliver), name="tool progress")

    async def _send(self, deliver: Deliver) -> None:
        """Send reports until there is nothing new."""
        while (latest := self._latest) is not None:
            self._latest = None
            try:
                if report := self._fit(*latest):
                    await deliver(report)
            except Exception as e:
                _log.debug("tool_progress_lost", problem=f"{type(e).__name__}: {e}")
            await asyncio.sleep(GAP_S)
        self._sending = None

    def _fit(self, progress: float, total: float | None, message: str | None) -> ToolReported | None:
        """Convert a report for the bus; None if it is not finite, because JSON has no such numbers."""
        if not math.isfinite(progress):
            return None
        whole = float(total) if total is not None and math.isfinite(total) else None
        text = self._redact(message)[:MESSAGE_CHARS].encode(errors="replace").decode() if message else None
        return ToolReported(self._block, float(progress), whole, text)
