"""Failed starts of a run's policies are counted, and decide whether a policy is called again.

The counts are in the run's hash, so that other workers continue them. A worker may be killed for another reason while
it has an isolated run, so several such ends weigh as one start. What counts against a policy is decided in blame.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import structlog

from tokenbus.policy.policy_runner import OnError
from tokenbus_services.policy_stage.executors import END_TEXTS, Fault
from tokenbus_services.policy_stage.messages import Failing

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

WORKERS_PER_START = 3
"""How many workers lost with a run in its own executor count as one failed start."""
WORKERS_IN_SHARED = 2
"""How many workers may be lost with a run in a shared executor before it gets its own."""


class Starts(msgspec.Struct):
    """Failed starts of one policy of one run: starts in which it ended its executor."""

    count: int = 0
    failed_at: int = 0
    """The place of its last failure."""


class RunStarts(msgspec.Struct):
    """What is known of a run's starts."""

    policies: dict[str, Starts] = {}
    lost_in_shared: int = 0
    """Workers that were lost while the run was in a shared executor."""
    lost_in_own: int = 0
    """Number of workers lost while the run was in an executor of its own."""
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
    isolated = starts.lost_in_shared >= WORKERS_IN_SHARED or starts.lost_in_own > 0 or starts.unexplained > 0
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
    if (failed := starts.unexplained + starts.lost_in_own // WORKERS_PER_START) >= most:
        why = (
            f"an executor with this run alone ended {starts.unexplained} times, and {starts.lost_in_own} workers were "
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


class StartCounts(Protocol):
    """The counts on the server, while this worker owns the run's partition."""

    async def note_unexplained(self, ends: int) -> bool:
        """Set `RunStarts.unexplained`; False if the run is over or another worker owns it."""
        ...

    async def count(self, policy: str, starts: int, *, failed_at: int | None = None) -> Starts | None:
        """Set a count and return it. None: as False for `note_unexplained`."""
        ...


async def count_failed_start(run: str, starts: RunStarts, fault: Fault, counts: StartCounts) -> bool:
    """Count a failed start; False if the run is over or another worker owns it."""
    if fault.policy is None:
        starts.unexplained = count = starts.unexplained + 1
        counted = await counts.note_unexplained(count)
    else:
        count = starts.policies.get(fault.policy, Starts()).count + 1
        held = await counts.count(fault.policy, count, failed_at=fault.place)
        counted = held is not None
        if held:
            starts.policies[fault.policy] = held
    if counted:
        why = END_TEXTS[fault.end]
        log.warning("policy_start_failed", run=run, policy=fault.policy, problem=why, starts=count)
    return counted
