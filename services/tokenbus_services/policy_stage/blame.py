"""Decides which run is at fault for an executor that ended, and when a run's policy is no longer called. Pure.

A start counts against a policy of a run only by evidence: its executor ended while the run was alone in it, or its call
did not return. The end of a shared executor, or of a worker, is no evidence: such a run is isolated in an executor of
its own, where the next end counts. A worker may be killed for another reason while it has an isolated run, so several
such ends weigh as one start.
"""

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


WORKERS_PER_START = 3
"""How many workers lost with a run in its own executor count as one failed start."""
WORKERS_BESIDE = 2
"""How many workers may be lost with a run in a shared executor before it gets its own."""


class Fault(msgspec.Struct, frozen=True):
    """The end of an executor that counts against the run in it."""

    policy: str | None
    """None: one of the run's policies, and nobody knows which."""
    place: int
    """The call's place (`marks.place_of`)."""
    end: End


def culprit(marks: Marks, end: End, *, memory_bytes: int, alone: bool) -> Call | None:
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


class Starts(msgspec.Struct):
    """Failed starts of one policy of one run: starts in which it ended its executor."""

    count: int = 0
    failed_at: int = 0
    """The place of its last failure."""


class RunStarts(msgspec.Struct):
    """What is known of a run's starts."""

    policies: dict[str, Starts] = {}
    lost_beside: int = 0
    """Workers that were lost while the run was in a shared executor."""
    lost_alone: int = 0
    """Workers that were lost while the run was in an executor of its own."""
    unexplained: int = 0
    """Its own executors that ended because of an unknown one of its policies."""


class StartDecision(msgspec.Struct, frozen=True):
    """What to do with a run before its next start."""

    ended_by: str | None = None
    """This policy is not called again, and its ``on_error`` ends the run."""
    why: str = ""
    """For ``ended_by``."""
    failing: Mapping[str, Failing] = {}
    """These are not called again, and the run continues without them."""
    isolated: bool = False
    """The run may end its executor: it gets one of its own."""


def decide_start(
    starts: RunStarts, policies: Sequence[str], on_error: Mapping[str, OnError], *, most: int
) -> StartDecision:
    """Decide on the run's policies. ``most``: failed starts after which a policy is not called again for the run.

    A policy whose ``on_error`` is ``pass`` is called up to where it failed, so that chunks it held go out. If it fails
    earlier than that, it is not called at all. If the policy at fault is unknown, those with ``pass`` are left out
    first; if that does not help, the first one with ``block`` ends the run.
    """
    failing: dict[str, Failing] = {}
    isolated = starts.lost_beside >= WORKERS_BESIDE or starts.lost_alone > 0 or starts.unexplained > 0
    for policy in policies:
        counted = starts.policies.get(policy)
        if counted is None or counted.count == 0:
            continue
        if counted.count < most:
            isolated = True
        elif on_error[policy] == "block":
            return StartDecision(ended_by=policy, why=reason(counted.count))
        elif counted.count == most:
            failing[policy] = Failing(counted.failed_at, reason(counted.count))
            isolated = True
        else:
            failing[policy] = Failing(0, reason(most))
    if (failed := starts.unexplained + starts.lost_alone // WORKERS_PER_START) >= most:
        why = (
            f"an executor with this run alone ended {starts.unexplained} times, and {starts.lost_alone} workers were "
            "lost with it"
        )
        passing = [policy for policy in policies if on_error[policy] == "pass"]
        blocking = [policy for policy in policies if on_error[policy] == "block"]
        if blocking and (failed > most or not passing):
            return StartDecision(ended_by=blocking[0], why=why)
        failing |= dict.fromkeys(passing, Failing(0, why))
    return StartDecision(failing=failing, isolated=isolated)


def reason(starts: int) -> str:
    """Why the policy is not called again."""
    return f"it blocked or ended its process in each of {starts} starts"
