"""How long a provider call may take: in silence, without progress, and in all. By the clock of this process, because a
fetcher that stood is no fault of the provider's.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Gauge

from tokenbus.bus import process_clock
from tokenbus.bus.activity import OTHER, short, silent_fields, slot_of
from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import Liveness, stop_task
from tokenbus.bus.scripts.activity import count_activity
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.events.error_info import ErrorInfo
from tokenbus_services.runtime.metrics import KnownModels, write_regularly
from tokenbus_services.settings import ProviderSettings

TIMER_SLACK = 0.05
"""A timer is rescheduled only if it is off by this fraction of its length: most reads set no timer."""
CLOSING_S = 1.0
"""How long a provider may take to close its body after its last event. Few need any of it. If a provider leaves it
open, the connection is dropped, because it would occupy a slot and a socket.
"""

DEADLINE_PASSED = ErrorInfo(code="deadline", kind="timeout", message="the run's deadline has passed")

_HEAD = 64
"""A line this long is content, even if its end has not arrived."""
_LINE_END = re.compile(rb"\r\n|\n|\r")
_PINGS = (b'data:{"type":"ping"', b'data:{"type":"keepalive"')


class AnswerProgress:
    """Distinguishes reads that bring a part of the answer from those that only keep the connection open: comments,
    pings, empty lines.
    """

    def __init__(self, *, events: bool) -> None:
        """``events``: the body is an event stream; else anything but whitespace is a part of the answer."""
        self._events = events
        self._head = b""
        """The beginning of the incomplete line."""

    def feed(self, data: bytes, *, wanted: bool) -> bool:
        """Add a read. Returns whether it brings a part of the answer; False if that is not ``wanted``."""
        if not self._events:
            return wanted and not data.isspace()
        head = self._head
        at = max(data.rfind(b"\n"), data.rfind(b"\r"))
        self._head = data[at + 1 : at + 1 + _HEAD] if at >= 0 else head + data[: _HEAD - len(head)]
        if not wanted:
            return False
        *lines, last = _LINE_END.split(head + data)
        return any(map(_is_part, lines)) or (len(last) >= _HEAD and _is_part(last))


def _is_part(line: bytes) -> bool:
    start = line[:_HEAD].translate(None, b" \t")
    return start.startswith(b"data:") and start not in {b"data:", b"data:{}"} and not start.startswith(_PINGS)


class CallTimeouts:
    """The timeouts of one call: for silence until the first event, then between reads; for reads without progress; for
    the whole call; and the run's deadline.
    """

    def __init__(self, limit: process_clock.Timeout, deadline: float | None, settings: ProviderSettings) -> None:
        """``deadline``: in the event loop's time."""
        self._limit = limit
        self._deadline = deadline
        self._settings = settings
        self._seconds = 0.0
        self._set_at = self._began_at = process_clock.now()
        self._progress_at: float | None = None
        """When the answer last grew; None before its first event."""
        self._silence = DEADLINE_PASSED
        self._expires: ErrorInfo | None = None
        """Why the call ends when the timer does."""
        self._over = False
        self._paused = False
        self._report: asyncio.TimerHandle | None = None
        self._reported: Callable[[], object] | None = None

    def report_after(self, seconds: float, report: Callable[[], Callable[[], object]]) -> None:
        """Call ``report`` if nothing has arrived after this time, which is less than the timeout; and what it returned
        when something arrives, or the call is over.
        """

        due = process_clock.now() + seconds

        def look() -> None:
            if (left := due - process_clock.now()) > 0:
                self._report = asyncio.get_running_loop().call_later(left, look)
            else:
                self._reported = report()

        if seconds < self._seconds:
            self._report = asyncio.get_running_loop().call_later(seconds, look)

    def stop_report(self) -> None:
        """Something arrived, or the call is over."""
        if self._report:
            self._report.cancel()
            self._report = None
        if self._reported:
            self._reported()
            self._reported = None

    def allow(self, seconds: float, code: str, message: str, *, answers: bool = False) -> None:
        """From now on allow this many seconds of silence; then the call ends with this error. ``answers``: the answer
        has begun, so it has to make progress.
        """
        self._seconds = seconds
        if answers:
            self._progress_at = process_clock.now()
        self._silence = ErrorInfo(code=code, kind="timeout", message=message, retryable=True)
        self._set()

    @property
    def wants_progress(self) -> bool:
        """Whether it matters if the next read brings progress."""
        since = self._progress_at
        return since is not None and process_clock.now() - since > self._settings.progress_timeout_s * TIMER_SLACK

    def received(self, *, progress: bool) -> None:
        """Restart the timer after a sign of life. ``progress``: it was a part of the answer."""
        now = process_clock.now()
        if progress:
            self._progress_at = now
        if not self._over and (progress or now - self._set_at > self._seconds * TIMER_SLACK):
            self._set()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Suspend the timeouts for silence and progress while nothing is read; the others still apply."""
        since = process_clock.now()
        self._paused = True
        self._set()
        yield
        self._paused = False
        if self._progress_at is not None:
            self._progress_at += process_clock.now() - since
        self._set()  # not in a finally: after an expired timer, rescheduling would fail

    def allow_closing(self) -> None:
        """The stream is complete; from now on an open body is not an error."""
        if not self._over:
            self._over = True
            self._seconds = CLOSING_S
            self._set()

    def error(self) -> ErrorInfo | None:
        """Return why the timer expired; None if the answer is complete anyway."""
        return self._expires

    def _set(self) -> None:
        now, settings = process_clock.now(), self._settings
        self._set_at = now
        ends: list[tuple[float, ErrorInfo | None]] = []
        if not self._paused:
            ends.append((now + self._seconds * (1 + TIMER_SLACK), None if self._over else self._silence))
        if not self._over:
            longest_s, progress_s = settings.call_timeout_s, settings.progress_timeout_s
            why = f"the call took longer than {longest_s:g} s"
            ends.append((self._began_at + longest_s, ErrorInfo(code="call_timeout", kind="timeout", message=why)))
            if not self._paused and self._progress_at is not None:
                why = f"the stream brought only pings and comments for {progress_s:g} s"
                error = ErrorInfo(code="no_progress", kind="timeout", message=why, retryable=True)
                ends.append((self._progress_at + progress_s * (1 + TIMER_SLACK), error))
        if self._deadline is not None:
            left_s = self._deadline - asyncio.get_running_loop().time()
            ends.append((now + left_s, None if self._over else DEADLINE_PASSED))
        if ends:
            when, self._expires = min(ends, key=lambda end: end[0])
            self._limit.reschedule(when)
        else:
            self._limit.reschedule(None)


MAX_MODELS = 16
"""Maximum models that are counted separately; the rest of a provider's are `other`."""

Model = tuple[str, str]
"""Provider and model."""


class SilentCalls:
    """Call `open`, then `close`."""

    def __init__(
        self, server: Server, keys: Keys, registry: CollectorRegistry, *, worker: str, models: KnownModels
    ) -> None:
        """``models``: those that may be labels."""
        self._server = server
        self._keys = keys
        self._worker = short(worker)
        self._models = models
        self._since: dict[Model, dict[object, int]] = {}
        """By provider and model: since when each call waits, in Unix milliseconds, the oldest first."""
        self._written: set[Model] = set()
        self._task: asyncio.Task[None] | None = None
        self._gauge = Gauge(
            "tokenbus_attempts_silent",
            "Provider calls in progress without a byte of an answer for 30 s.",
            ["provider", "model"],
            registry=registry,
        )

    async def open(self, liveness: Liveness) -> None:
        """Begin to write."""
        self._task = liveness.start(write_regularly(self.write), name="silent calls")

    async def close(self) -> None:
        """Stop; the counts of an ended fetcher are forgotten with their slot."""
        await stop_task(self._task)

    def answered(self, provider: str, model: str) -> None:
        """A model answers, so its name may be a label from now on."""
        self._gauge.labels(*self._models.label(provider, model, ok=True))

    def began(self, provider: str, model: str, since_ms: int) -> Callable[[], None]:
        """Count a call that is silent now. Returns what ends that."""
        name = provider, short(model)
        if name not in self._since and len(self._since) >= MAX_MODELS:
            name = provider, OTHER
        call = object()
        self._since.setdefault(name, {})[call] = since_ms
        gauge = self._gauge.labels(*self._models.label(provider, model, ok=False))
        gauge.inc()

        def ended() -> None:
            gauge.dec()
            calls = self._since[name]
            del calls[call]
            if not calls:
                del self._since[name]

        return ended

    async def write(self) -> None:
        """Report how many are silent, and once when none are left. Raises redis-py's errors."""
        levels = Counter[str]()
        for name in self._written | set(self._since):
            many, since = silent_fields(*name, self._worker)
            calls = self._since.get(name, {})
            levels[many], levels[since] = len(calls), min(calls.values(), default=0)
        if not levels:
            return
        key = self._keys.activity(slot_of(self._server.clock.now_ms()))
        await run_script(self._server, count_activity(key, {}, levels))
        self._written = set(self._since)
