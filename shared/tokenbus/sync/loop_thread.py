"""An event loop in its own thread, and calls into it from any other thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """The event loop. It runs from `start` until `close`, and may be started again."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None

    @property
    def was_started(self) -> bool:
        """Whether `start` was ever called."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread; return once its loop runs. Raises OSError if no loop can be made."""
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, args=(started,), name="tokenbus", daemon=True)
        self._thread.start()
        try:
            started.result()
        except OSError:
            self._thread = None
            raise

    def _main(self, started: Future[None]) -> None:
        work = self._run(started)
        try:
            asyncio.run(work)
        except BaseException as e:
            work.close()
            if started.done():
                raise
            started.set_exception(e)  # no loop could be made, for example: too many open files

    async def _run(self, started: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        started.set_result(None)
        await self._over.wait()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine and return its result. Cancels it if this thread is interrupted. Raises RuntimeError before
        `start` and after `close`.
        """
        if self._loop is None:
            work.close()
            problem = "closed" if self._thread else "not open: use it inside `with`"
            raise RuntimeError(f"the client is {problem}")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def each(self, events: Callable[[], AsyncIterator[T]]) -> Generator[T]:
        """Yield what the iterator that ``events`` returns yields. It is closed with the generator."""
        source = events()  # raise here rather than at the first iteration

        def each() -> Generator[T]:
            try:
                while True:
                    try:
                        event = self.call(_next(source))
                    except StopAsyncIteration:
                        return
                    yield event
            finally:
                with suppress(RuntimeError):  # already closed with the client
                    self.call(_close(source))

        return each()

    def close(self) -> None:
        """Stop the loop and wait for its thread to end."""
        loop, self._loop = self._loop, None
        if loop and self._over and self._thread:
            loop.call_soon_threadsafe(self._over.set)
            self._thread.join()


async def _next(source: AsyncIterator[T]) -> T:
    return await anext(source)


async def _close(source: Any) -> None:
    await source.aclose()
