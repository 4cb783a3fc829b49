"""A page of memory, shared by an executor and its worker, that shows which policy call the executor is in.

An executor writes to it before and after each step of a call, which costs no system call. So its worker knows which
call was running when the executor stalled or died. Steps are numbered: a step that lasts has the same number at every
check, independent of clocks.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

PAGE_BYTES = 4096
_STEP = struct.Struct("<QQIQ")
_GREW = struct.Struct("<QIQQ")
_COUNT = struct.Struct("<I")
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
        """Mark the end of the step."""
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
