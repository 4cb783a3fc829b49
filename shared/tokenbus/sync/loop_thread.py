"""An event loop in its own thread, and calls into it from any other thread."""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakSet

T = TypeVar("T")


class LoopThread:
    """The event loop. It runs from `start` until `close`, and may be started again."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._selector: selectors.BaseSelector | None = None
        self._process = os.getpid()
        _threads.add(self)

    @property
    def forked(self) -> bool:
        """Whether another process started the thread: this one was forked from it, and has no such thread."""
        return self._thread is not None and self._process != os.getpid()

    @property
    def was_started(self) -> bool:
        """Whether `start` was ever called."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread; return once its loop runs. Raises OSError if no loop can be made."""
        started: Future[None] = Future()
        self._process = os.getpid()
        self._selector = selectors.DefaultSelector()
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
            with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(self._selector)) as runner:
                runner.run(work)
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

    def call(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run the coroutine and return its result. Cancels it if this thread is interrupted, or after ``timeout``
        seconds with TimeoutError. Raises RuntimeError before `start`, after `close` and in a forked process.
        """
        if self.forked or self._loop is None or sys.is_finalizing():
            work.close()
            if sys.is_finalizing():
                raise RuntimeError("the interpreter is ending, and the client's thread with it")
            if self.forked:
                raise RuntimeError("this was opened before the process forked, and belongs to the parent: open another")
            problem = "closed" if self._thread else "not open: use `with`, or call `open`"
            raise RuntimeError(f"the client is {problem}")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    def each(self, events: AsyncGenerator[T]) -> Generator[T]:
        """Yield what the asynchronous generator yields. It is closed with this one."""
        try:
            while True:
                try:
                    event = self.call(_next(events))
                except StopAsyncIteration:
                    return
                yield event
        finally:
            with suppress(RuntimeError):  # already closed with the client
                self.call(_close(events))

    def close(self) -> None:
        """Stop the loop and wait for its thread to end."""
        loop, self._loop = self._loop, None
        if loop and self._over and self._thread:
            loop.call_soon_threadsafe(self._over.set)
            self._thread.join()

    def leave_to_parent(self) -> None:
        """In a forked process, detach what it inherited from the parent's sockets and the parent's epoll.

        Whatever is collected here later would otherwise write to the first, or take them out of the second.
        """
        if self._thread and isinstance(self._selector, selectors.EpollSelector):
            ended, other = socket.socketpair()
            other.close()
            with ended, selectors.EpollSelector() as empty:
                for key in list(self._selector.get_map().values()):
                    os.dup2(ended.fileno(), key.fd, inheritable=False)
                os.dup2(empty.fileno(), self._selector.fileno(), inheritable=False)


_threads: WeakSet[LoopThread] = WeakSet()


def _after_fork() -> None:
    for thread in list(_threads):
        thread.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


async def _next(source: AsyncGenerator[T]) -> T:
    return await anext(source)


async def _close(source: AsyncGenerator[Any]) -> None:
    await source.aclose()
