"""Records each step of a policy call, and its memory growth, on the page that an executor shares with its worker.

A call's steps are those of every task started within it: the call itself, its deferred work, and tasks that the policy
started. Work in threads or bare callbacks is not attributed.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from types import TracebackType
from typing import Any, cast

from tokenbus_services.policy_stage.executor.marks import MarkedCall, MarksPage

_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024
_MOST_GROWN = 1000
"""Maximum calls whose memory growth is remembered."""

current_call: ContextVar[MarkedCall | None] = ContextVar("call of a policy", default=None)
"""The current call, inside a call."""


class Marking:
    """Writes an executor's page."""

    def __init__(self, page: MarksPage) -> None:
        self.page = page
        self._grew: dict[tuple[int, int], int] = {}
        """Memory growth in bytes, by run and policy."""
        self._most = 0
        self._peak = _peak_bytes()

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """Mark the steps of all tasks that this loop creates from now on."""
        loop.set_task_factory(self._make_task)

    def begin(self, call: MarkedCall) -> None:
        """Mark a step of the call as running."""
        self.page.begin(call)

    def end(self, call: MarkedCall) -> None:
        """Mark the step as done, and attribute the growth of peak memory to this call."""
        self.page.end()
        peak = _peak_bytes()
        if peak <= self._peak:
            return
        key = call.task, call.policy
        grew = self._grew[key] = self._grew.pop(key, 0) + peak - self._peak
        self._peak = peak
        if grew > self._most:
            self._most = grew
            self.page.grew(call, grew)
        if len(self._grew) > _MOST_GROWN:
            del self._grew[next(iter(self._grew))]

    def _make_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        marked: Any = (
            _MarkedSteps(cast("Coroutine[Any, Any, Any]", coro), self) if isinstance(coro, Coroutine) else coro
        )
        return asyncio.Task(marked, loop=loop, **options)


class _MarkedSteps(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are marked as those of the call in its context."""

    def __init__(self, coro: Coroutine[Any, Any, Any], marking: Marking) -> None:
        self._coro = coro
        self._marking = marking

    def send(self, value: Any) -> Any:
        if (call := current_call.get()) is None:
            return self._coro.send(value)
        self._marking.begin(call)
        try:
            return self._coro.send(value)
        finally:
            self._marking.end(call)

    def throw(self, typ: Any, val: Any = None, tb: TracebackType | None = None) -> Any:
        error = typ if val is None else val
        if (call := current_call.get()) is None:
            return self._coro.throw(error)
        self._marking.begin(call)
        try:
            return self._coro.throw(error)
        finally:
            self._marking.end(call)

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coro.__await__()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT
