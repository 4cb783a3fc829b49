"""Which call of a policy an executor is at: a page of memory that it shares with its worker.

An executor writes here before and after each step of a call, which costs no system call. So its worker knows which call
it was at when it stood still or died, though it can say nothing any more. Steps are counted: one that lasts has the
same number at every look, whatever the clocks do.
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


class Call(NamedTuple):
    """A call of a policy, or a work that one put off."""

    task: int
    """Of the run; 0: no call."""
    policy: int
    """Its place among the policies of the settings."""
    place: int
    """See `place_of`."""


def place_of(draft: int, *, put_off: bool) -> int:
    """Where a call stands in its run: what was put off with a draft comes after the call with that draft."""
    return 2 * draft + put_off


class Marks(NamedTuple):
    """What a page says."""

    step: int
    call: Call | None
    """Whose step is under way."""
    grew: Call | None
    """During whose steps memory grew most."""
    grew_bytes: int
    out_of_memory: bool
    """The executor ended because memory was refused, in the step that is under way."""
    waiting_calls: int
    beats: int
    """How often its event loop came by."""


class MarksPage:
    """The page. One process writes, another one reads."""

    def __init__(self, fd: int | None = None) -> None:
        """A new page, or the one behind this file descriptor, which is closed with it."""
        self.fd = _unnamed_file() if fd is None else fd
        """Its file descriptor."""
        self._page = mmap.mmap(self.fd, PAGE_BYTES)
        self._step = self._beats = 0

    def close(self) -> None:
        """Give it up."""
        self._page.close()
        os.close(self.fd)

    def begin(self, call: Call) -> None:
        """A step of this call begins."""
        self._step += 1
        _STEP.pack_into(self._page, 0, self._step, call.task, call.policy, call.place)

    def end(self) -> None:
        """The step has ended."""
        self._step += 1
        _STEP.pack_into(self._page, 0, self._step, 0, 0, 0)

    def grew(self, call: Call, grew_bytes: int) -> None:
        """During the steps of this call memory grew more than during those of any other."""
        _GREW.pack_into(self._page, _GREW_AT, *call, grew_bytes)

    def out_of_memory(self) -> None:
        """The step that is under way was refused memory; the executor ends."""
        _COUNT.pack_into(self._page, _OUT_OF_MEMORY_AT, 1)

    def waiting(self, calls: int) -> None:
        """So many calls wait for their turn."""
        _COUNT.pack_into(self._page, _WAITING_AT, calls)

    def beat(self) -> None:
        """The event loop turns."""
        self._beats = (self._beats + 1) % 2**32
        _COUNT.pack_into(self._page, _BEATS_AT, self._beats)

    def read(self) -> Marks:
        """What it says now. Of a step that changes while it is read, either the old one or the new one."""
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
        return Marks(after[0], _call(after[1:]), grew, grew_bytes, bool(out), waiting, beats)


def _unnamed_file() -> int:
    fd, path = tempfile.mkstemp()
    os.unlink(path)
    os.ftruncate(fd, PAGE_BYTES)
    return fd


def _call(fields: Sequence[int]) -> Call | None:
    return Call(*fields) if fields[0] else None
