"""Which run pays for an executor that ended, and when a policy is called no more for a run: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from tokenbus.policy.policy_runner import OnError
from tokenbus_services.policy_stage.marks import Call, Marks
from tokenbus_services.policy_stage.messages import Failing

End = Literal["blocked", "exited", "memory", "overran"]
"""How an executor ended: a call did not return; the process died; it had too much memory; a call went on past its
timeout."""

WORDS: Mapping[End, str] = {
    "blocked": "a call blocked its process",
    "exited": "its process died",
    "memory": "its process took too much memory",
    "overran": "a call went on past its timeout",
}


class Fault(msgspec.Struct, frozen=True):
    """A policy ended its executor."""

    policy: str
    place: int
    """Of the call (`marks.place_of`)."""
    end: End


def culprit(marks: Marks, end: End, *, memory_bytes: int, alone: int | None) -> Call | None:
    """The call at fault; None: nobody knows. ``alone``: the one run that the executor had, where it is for one run.

    For memory it is the call whose steps took most of it, not the one that came to ask for the last of it.
    """
    over = end == "memory" or marks.out_of_memory
    if over and marks.grew and marks.grew_bytes >= memory_bytes // 2:
        return marks.grew
    if marks.call and (not over or marks.out_of_memory):
        return marks.call
    if alone is None:
        return None
    return marks.call or (marks.grew if over else None) or Call(alone, 0, 0)


class Starts(msgspec.Struct):
    """What counts against one policy of one run: starts in which it ended its executor, or may have."""

    count: int = 0
    failed_at: int = 0
    """The last place at which it did."""


class Sentence(msgspec.Struct, frozen=True):
    """What is to be done with a run, before its next start."""

    ended_by: str | None = None
    """This policy is called no more, and its ``on_error`` ends the run."""
    failing: Mapping[str, Failing] = {}
    """These are called no more, and the run goes on without them."""
    suspects: list[str] = []
    """These may end their executor: the run has one for itself, and the start counts."""


def sentence(
    starts: Mapping[str, Starts], policies: Sequence[str], on_error: Mapping[str, OnError], *, most: int
) -> Sentence:
    """``most``: starts after which a policy is not called again for the run.

    A policy whose ``on_error`` is pass is called as far as it came, so that what it held goes out. If it fails before
    that too, it is not called at all.
    """
    failing: dict[str, Failing] = {}
    suspects: list[str] = []
    for policy in policies:
        counted = starts.get(policy)
        if counted is None or counted.count == 0:
            continue
        if counted.count < most:
            suspects.append(policy)
        elif on_error[policy] == "block":
            return Sentence(ended_by=policy)
        elif counted.count == most:
            failing[policy] = Failing(counted.failed_at, reason(counted.count))
            suspects.append(policy)
        else:
            failing[policy] = Failing(0, reason(most))
    return Sentence(failing=failing, suspects=suspects)


def reason(starts: int) -> str:
    """Why the policy is called no more."""
    return f"it blocked or ended its process in each of {starts} starts"
