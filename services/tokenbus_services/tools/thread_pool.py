"""Threads for synchronous tools: a bounded number, none of which can hold up the process.

A thread cannot be stopped from outside. A call that is given up, by timeout or cancel, leaves its thread running to
its end, and its place taken until then; when such calls hold every place, the next one is refused at once instead of
waiting for what may never come. The threads are daemons: a hung one does not keep the process from exiting.
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
    """Calls that were given up hold all threads."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"all {limit} threads are held by calls that did not end in time")


class _Ended(NamedTuple):
    """How a call in a thread ended. Not the future's own result: that cannot be a StopIteration, nor a SystemExit."""

    value: object
    error: BaseException | None


class Threads:
    """At most ``limit`` calls at once, each in a thread of its own."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._places = asyncio.Semaphore(limit)
        self.given_up = 0
        """Calls that still run although nobody waits for them any more."""

    async def run(self, call: Callable[[], T]) -> T:
        """What the call returns or raises, once a thread is free; when cancelled, the call goes on. Raises NoThread."""
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
