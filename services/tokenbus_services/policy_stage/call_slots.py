"""Limits the concurrent policy calls of one worker; runs take turns, one call each.

A policy may call a model or a service, and hundreds of concurrent calls would overload it. A run with many calls to
judge in parallel gets no more turns than a run with one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager


class FairSemaphore:
    """A fair semaphore for policy calls."""

    def __init__(self, most: int, *, report_waiting_s: float) -> None:
        """``most``: maximum concurrent calls. ``report_waiting_s``: how often a waiting run is reported as waiting."""
        self._free = most
        self._report_waiting_s = report_waiting_s
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiting calls by run, next in turn first. No queue is empty."""

    @property
    def waiting(self) -> int:
        """Number of waiting calls."""
        return sum(len(calls) for calls in self._waiting.values())

    @asynccontextmanager
    async def slot(self, run: str, report_waiting: Callable[[], object]) -> AsyncGenerator[None]:
        """Hold a slot inside this block. ``report_waiting`` is called periodically while the run waits for it."""
        if self._free and not self._waiting:
            self._free -= 1
        else:
            await self._wait(run, report_waiting)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, run: str, report_waiting: Callable[[], object]) -> None:
        seat = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(run, deque()).append(seat)
        try:
            while not (await asyncio.wait({seat}, timeout=self._report_waiting_s))[0]:
                report_waiting()
        except BaseException:
            if seat.done():
                self._pass_on()  # granted and cancelled at the same moment
            else:
                self._waiting[run].remove(seat)
                if not self._waiting[run]:
                    del self._waiting[run]
            raise

    def _pass_on(self) -> None:
        """Give the slot to the next run, and move that run to the end."""
        if not self._waiting:
            self._free += 1
            return
        run, calls = next(iter(self._waiting.items()))
        calls.popleft().set_result(None)
        if calls:
            self._waiting.move_to_end(run)
        else:
            del self._waiting[run]
