"""A page of memory, shared by an executor and its worker, that shows which policy call the executor is in.

An executor writes to it before and after each step of a call, which costs no system call. So its worker knows which
call was running when the executor stalled or died. Steps are numbered: a step that lasts has the same number at every
check, independent of clocks. A call's steps are those of every task started within it: the call itself, its deferred
work, and tasks that the policy started. Work in threads or bare callbacks is not attributed.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import resource
import struct
import sys
import tempfile
from collections.abc import Coroutine, Generator, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, NamedTuple, cast

PAGE_BYTES = 4096
_STEP = struct.Struct("<QQIQ")
_GREW = struct.Struct("<QIQQ")
_COUNT = struct.Struct("<I")
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024
_MOST_GROWN = 1000
"""Maximum calls whose memory growth is remembered."""
_GREW_AT, _OUT_OF_MEMORY_AT, _WAITING_AT, _BEATS_AT = 64, 128, 192, 256


class MarkedCall(NamedTuple):
    """A policy call, or a deferred work item."""

    task: int
    """The run's task number; 0: no call."""
    policy: int
    """The policy's index in the settings."""
    place: int
    """See `place_of`."""


def place_of(draft: int, *, deferred: bool) -> int:
    """Return a call's position in its run: work deferred under a draft comes after the call with that draft."""
    return 2 * draft + deferred


class ExecutorMarks(NamedTuple):
    """The content of a page."""

    step: int
    call: MarkedCall | None
    """The call whose step is running."""
    grew: MarkedCall | None
    """The call during whose steps memory grew most."""
    grew_bytes: int
    out_of_memory: bool
    """Whether the executor ended because memory was refused in the current step."""
    waiting_calls: int
    beats: int
    """Number of event loop passes."""


class MarksPage:
    """The page: one process writes, another reads."""

    def __init__(self, fd: int | None = None) -> None:
        """Create a page, or map the one behind this file descriptor, which is closed with it."""
        self.fd = _unnamed_file() if fd is None else fd
        """Its file descriptor."""
        self._page = mmap.mmap(self.fd, PAGE_BYTES)
        self._step = self._beats = 0

    def close(self) -> None:
        """Unmap the page and close its file descriptor."""
        self._page.close()
        os.close(self.fd)

    def begin(self, call: MarkedCall) -> None:
        """Mark the beginning of a step of this call."""
        self._step += 1
        _STEP.pack_into(self._page, 0, self._step, call.task, call.policy, call.place)

    def end(self) -> None:
        self._step += 1
        _STEP.pack_into(self._page, 0, self._step, 0, 0, 0)

    def grew(self, call: MarkedCall, grew_bytes: int) -> None:
        """Record the call during whose steps memory grew most."""
        _GREW.pack_into(self._page, _GREW_AT, *call, grew_bytes)

    def out_of_memory(self) -> None:
        """Record that the current step was refused memory; the executor ends."""
        _COUNT.pack_into(self._page, _OUT_OF_MEMORY_AT, 1)

    def waiting(self, calls: int) -> None:
        """Record the number of calls that wait for a slot."""
        _COUNT.pack_into(self._page, _WAITING_AT, calls)

    def beat(self) -> None:
        """Record a pass of the event loop."""
        self._beats = (self._beats + 1) % 2**32
        _COUNT.pack_into(self._page, _BEATS_AT, self._beats)

    def read(self) -> ExecutorMarks:
        """Read the page. If a step changes during the read, returns the old one or the new one."""
        before = after = _STEP.unpack_from(self._page, 0)
        for _ in range(8):
            after = _STEP.unpack_from(self._page, 0)
            if after == before:
                break
            before = after
        task, policy, place, grew_bytes = _GREW.unpack_from(self._page, _GREW_AT)
        (out,) = _COUNT.unpack_from(self._page, _OUT_OF_MEMORY_AT)
        (waiting,) = _COUNT.unpack_from(self._page, _WAITING_AT)
        (beats,) = _COUNT.unpack_from(self._page, _BEATS_AT)
        grew = _call((task, policy, place))
        return ExecutorMarks(
            step=after[0],
            call=_call(after[1:]),
            grew=grew,
            grew_bytes=grew_bytes,
            out_of_memory=bool(out),
            waiting_calls=waiting,
            beats=beats,
        )


def _unnamed_file() -> int:
    fd, path = tempfile.mkstemp()
    os.unlink(path)
    os.ftruncate(fd, PAGE_BYTES)
    return fd


def _call(fields: Sequence[int]) -> MarkedCall | None:
    return MarkedCall(*fields) if fields[0] else None


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
