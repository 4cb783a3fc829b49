"""Decides which run is at fault for an executor that ended, and when a run's policy is no longer called. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from tokenbus.policy.policy_runner import OnError
from tokenbus_services.policy_stage.marks import Call, Marks
from tokenbus_services.policy_stage.messages import Failing

End = Literal["blocked", "exited", "memory", "overran"]
"""How an executor ended: a call did not return; the process died; it used too much memory; a call ran past its
timeout.
"""

END_TEXTS: Mapping[End, str] = {
    "blocked": "a call blocked its process",
    "exited": "its process died",
    "memory": "its process took too much memory",
    "overran": "a call went on past its timeout",
}


class Fault(msgspec.Struct, frozen=True):
    """A policy that ended its executor."""

    policy: str
    place: int
    """The call's place (`marks.place_of`)."""
    end: End


def culprit(marks: Marks, end: End, *, memory_bytes: int, alone: int | None) -> Call | None:
    """Return the call at fault; None if that is unknown. ``alone``: the executor's only run, if it is for one run.

    For memory, that is the call whose steps used most of it, not the one whose allocation failed.
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
    """Failed starts of one policy of one run: starts in which it ended its executor, or may have."""

    count: int = 0
    failed_at: int = 0
    """The place of its last failure."""


class StartDecision(msgspec.Struct, frozen=True):
    """What to do with a run before its next start."""

    ended_by: str | None = None
    """This policy is not called again, and its ``on_error`` ends the run."""
    failing: Mapping[str, Failing] = {}
    """These are not called again, and the run continues without them."""
    suspects: list[str] = []
    """These may end their executor: the run gets one of its own, and the start counts."""


def decide_start(
    starts: Mapping[str, Starts], policies: Sequence[str], on_error: Mapping[str, OnError], *, most: int
) -> StartDecision:
    """Decide on the run's policies. ``most``: failed starts after which a policy is not called again for the run.

    A policy whose ``on_error`` is ``pass`` is called up to where it failed, so that chunks it held go out. If it fails
    earlier than that, it is not called at all.
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
            return StartDecision(ended_by=policy)
        elif counted.count == most:
            failing[policy] = Failing(counted.failed_at, reason(counted.count))
            suspects.append(policy)
        else:
            failing[policy] = Failing(0, reason(most))
    return StartDecision(failing=failing, suspects=suspects)


def reason(starts: int) -> str:
    """Why the policy is not called again."""
    return f"it blocked or ended its process in each of {starts} starts"
