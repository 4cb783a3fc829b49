"""Decides which run is at fault for an executor that ended. Pure. What follows from it: failed_starts.py.

A start counts against a policy of a run only by evidence: its executor ended while the run was alone in it, or its call
did not return. The end of a shared executor, or of a worker, is not evidence: such a run is isolated in an executor of
its own, where the next end counts.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tokenbus_services.executor.marks import ExecutorMarks, MarkedCall
from tokenbus_services.executor.processes import End

END_TEXTS: Mapping[End, str] = {
    "blocked": "a call blocked its process",
    "stalled": "a call held up other runs",
    "exited": "its process died",
    "memory": "its process took too much memory",
    "overran": "a call continued past its timeout",
}


class Fault(msgspec.Struct, frozen=True):
    """The end of an executor that counts against the run in it."""

    policy: str | None
    """None: one of the run's policies; which one is unknown."""
    place: int
    """The call's place (`marks.place_of`)."""
    end: End


def culprit(marks: ExecutorMarks, end: End, *, memory_bytes: int, alone: bool) -> MarkedCall | None:
    """Return the call that is probably at fault; None if that is unknown. ``alone``: the executor had one run ever.

    For memory, that is the call whose steps used most of it, not the one whose allocation failed.
    """
    over = end == "memory" or marks.out_of_memory
    if over and marks.grew and marks.grew_bytes >= memory_bytes // 2:
        return marks.grew
    if marks.call and (not over or marks.out_of_memory):
        return marks.call
    return (marks.grew if over else None) or marks.call if alone else None


def is_evidence(end: End, *, alone: bool) -> bool:
    """Whether this end counts against its culprit: in a shared executor, another run may have caused it. ``alone``: as
    for `culprit`.
    """
    return alone or end in ("blocked", "overran")
