"""The clock of this process: seconds in which it ran.

A process that was stopped, had no CPU or whose event loop was blocked did nothing meanwhile, and what it waited for is
not to blame. So such a stand does not count in a timeout: everything that bounds how long work may take reads this
clock (`now`, `timeout`), and everything that asks whether the process itself stood reads it too (`stood_s`).

It notices a stand by a timer that is late. The timer runs while somebody holds the clock (`ticking`), as each `timeout`
does. `install` replaces the clock, for a simulation.

Each thread has a clock of its own, as each has its own event loop: a client in one thread, or a second bus in a test,
must not hide a stand from the loop of another thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

TICK_S = 0.25
STOOD_S = 1.0
"""A timer of `TICK_S` that is seen only after this time means that the process stood."""


class ProcessClock:
    """Monotonic seconds without those in which the process stood. Of one thread."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._stood_s = 0.0
        self._seen_at = 0.0
        self._held = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        """Whose timer ticks."""

    def now(self) -> float:
        """Seconds since an arbitrary moment."""
        return self._look() - self._stood_s

    @property
    def stood_s(self) -> float:
        """How long the process has stood in all."""
        self._look()
        return self._stood_s

    @contextmanager
    def ticking(self) -> Generator[None]:
        """Notice stands of the running event loop in this block."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._held, self._seen_at = loop, 0, self._monotonic()
            loop.call_later(TICK_S, self._tick, loop)
        self._held += 1
        try:
            yield
        finally:
            if self._loop is loop:
                self._held -= 1

    def _look(self) -> float:
        now = self._monotonic()
        if self._loop and now - self._seen_at > STOOD_S:
            self._stood_s += now - self._seen_at - TICK_S
        self._seen_at = now
        return now

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is loop:
            self._look()
            if self._held:
                loop.call_later(TICK_S, self._tick, loop)
            else:
                self._loop = None


class Timeout:
    """`asyncio.Timeout` by this clock. Create it with `timeout`."""

    def __init__(self, when: float | None) -> None:
        self._when = when
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._ticking = _in_use.clock.ticking()

    def reschedule(self, when: float | None) -> None:
        """End the block at this time of the clock; None: never."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        self._when = when
        if when is not None:
            self._look()

    def expired(self) -> bool:
        """Whether it has ended the block."""
        return self._limit.expired()

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._ticking.__enter__()
        self.reschedule(self._when)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        self._ticking.__exit__(None, None, None)
        return await self._limit.__aexit__(kind, error, trace)

    def _look(self) -> None:
        assert self._when is not None
        loop, left = asyncio.get_running_loop(), self._when - now()
        if left > 0:
            self._timer = loop.call_later(left, self._look)
        else:
            self._timer = None
            self._limit.reschedule(loop.time())


class _Clocks(threading.local):
    """The clock of each thread."""

    def __init__(self) -> None:
        self.clock = ProcessClock()


_in_use = _Clocks()


def install(clock: ProcessClock) -> ProcessClock:
    """Replace the clock of this thread. Returns the one before."""
    before, _in_use.clock = _in_use.clock, clock
    return before


def now() -> float:
    """`ProcessClock.now` of this thread."""
    return _in_use.clock.now()


def stood_s() -> float:
    """`ProcessClock.stood_s` of this thread."""
    return _in_use.clock.stood_s


@contextmanager
def ticking() -> Generator[None]:
    """`ProcessClock.ticking` of this thread."""
    with _in_use.clock.ticking():
        yield


def timeout(seconds: float | None) -> Timeout:
    """Raise TimeoutError at the end of a block that took longer than this while the process ran. None: never."""
    return Timeout(None if seconds is None else now() + seconds)
