"""How long a provider call may be silent: until its first event, then between reads, and after its last one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager

from tokenbus.events.error_info import ErrorInfo

TIMER_SLACK = 0.05
"""A silence timer is rescheduled only if it is off by this fraction of its length: most reads set no timer."""
CLOSING_S = 1.0
"""How long a provider may take to close its body after its last event. Few need any of it. If a provider leaves it
open, the connection is dropped, because it would occupy a slot and a socket.
"""

DEADLINE_PASSED = ErrorInfo(code="deadline", kind="timeout", message="the run's deadline has passed")


class CallTimeouts:
    """The call's silence timeout: until the first event, then between reads, and never past the deadline."""

    def __init__(self, limit: asyncio.Timeout, deadline: float | None) -> None:
        self._clock = asyncio.get_running_loop().time
        self._limit = limit
        self._deadline = deadline
        self._seconds = 0.0
        self._set_at = 0.0
        self._what = ("", "")
        self._over = False
        self._to_deadline = False
        """Whether the timer runs to the deadline. Stored, because a timer may fire slightly early."""
        self._report: asyncio.TimerHandle | None = None
        self._reported: Callable[[], object] | None = None

    def report_after(self, seconds: float, report: Callable[[], Callable[[], object]]) -> None:
        """Call ``report`` if nothing has arrived after this time, which is less than the timeout; and what it returned
        when something arrives, or the call is over.
        """

        def silent() -> None:
            self._reported = report()

        if seconds < self._seconds:
            self._report = asyncio.get_running_loop().call_later(seconds, silent)

    def stop_report(self) -> None:
        """Something arrived, or the call is over."""
        if self._report:
            self._report.cancel()
            self._report = None
        if self._reported:
            self._reported()
            self._reported = None

    def allow(self, seconds: float, code: str, message: str) -> None:
        """From now on allow this many seconds of silence; then the call ends with this error."""
        self._seconds, self._what = seconds, (code, message)
        self._set()

    def received(self) -> None:
        """Restart the timer after a sign of life."""
        if not self._over and self._clock() - self._set_at > self._seconds * TIMER_SLACK:
            self._set()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Suspend the silence timeout while nothing is read; the deadline still applies."""
        self._to_deadline = True
        self._limit.reschedule(self._deadline)
        yield
        self._set()  # not in a finally: after an expired timer, rescheduling would fail

    def allow_closing(self) -> None:
        """The stream is complete; from now on an open body is not an error."""
        if not self._over:
            self._over = True
            self._seconds = CLOSING_S
            self._set()

    def error(self) -> ErrorInfo | None:
        """Return why the timer expired; None if the answer is complete anyway."""
        if self._over:
            return None
        if self._to_deadline:
            return DEADLINE_PASSED
        code, message = self._what
        return ErrorInfo(code=code, kind="timeout", message=message, retryable=True)

    def _set(self) -> None:
        self._set_at = self._clock()
        until = self._set_at + self._seconds * (1 + TIMER_SLACK)
        self._to_deadline = self._deadline is not None and self._deadline <= until
        self._limit.reschedule(self._deadline if self._to_deadline else until)
