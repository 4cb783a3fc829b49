"""Threads for synchronous tools: a bounded number, none of which can keep the process from exiting.

A thread cannot be stopped from outside. A call that is abandoned, by timeout or cancel, keeps its thread and its slot
until it ends. If abandoned calls hold all slots, the next call is rejected at once rather than queued. The threads are
daemons, so a hung one does not keep the process from exiting.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import NamedTuple, TypeVar, cast

T = TypeVar("T")


class NoThread(Exception):
    """Abandoned calls hold all threads."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"all {limit} threads are busy with calls that timed out")


class _Ended(NamedTuple):
    """How a call in a thread ended. Not stored as the future's result, which cannot be a StopIteration or
    SystemExit.
    """

    value: object
    error: BaseException | None


class Threads:
    """Runs at most ``limit`` calls at once, each in its own thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._places = asyncio.Semaphore(limit)
        self.given_up = 0
        """Abandoned calls that are still running."""

    async def run(self, call: Callable[[], T]) -> T:
        """Run the call in a thread once one is free, and return its result. If cancelled, the call continues. Raises
        NoThread.
        """
        if self.given_up >= self._limit:
            raise NoThread(self._limit)
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[_Ended] = loop.create_future()
        context = contextvars.copy_context()

        def work() -> None:
            try:
                result = _Ended(context.run(call), None)
            except BaseException as e:
                result = _Ended(None, e)
            with suppress(RuntimeError):  # the loop was closed while the call ran
                loop.call_soon_threadsafe(self._end, ended, result)

        try:
            Thread(target=work, name="tool", daemon=True).start()
        except RuntimeError:
            self._places.release()
            raise
        try:
            value, error = await ended
        except asyncio.CancelledError:
            self.given_up += ended.cancelled()
            raise
        if error is not None:
            raise error
        return cast("T", value)

    def _end(self, ended: asyncio.Future[_Ended], result: _Ended) -> None:
        self._places.release()
        if ended.cancelled():
            self.given_up -= 1
        else:
            ended.set_result(result)
