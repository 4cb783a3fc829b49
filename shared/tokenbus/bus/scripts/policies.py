"""Counters of the policy stage in a run's hash: how often a policy ended its executor, and how often its worker was
lost.

A worker that judges a run writes its token to the hash, with a word that says whether the run has an executor of its
own. A next owner that finds the token of another worker there, which did not release its lease, knows that this worker
was lost with the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tokenbus.bus.scripts.script import Arg, ScriptCall, script

Place = Literal["beside", "alone"]
"""Where a run is judged: together with other runs, or alone in an executor."""

AT = "policies_at"
LOST_BESIDE, LOST_ALONE = "workers_lost:beside", "workers_lost:alone"
UNEXPLAINED = "unexplained_ends"
"""Field of a run's hash: how often its own executor ended because of an unknown one of its policies."""


def starts_field(policy: str) -> str:
    """Field of a run's hash that counts the starts held against a policy."""
    return f"starts:{policy}"


def failed_at_field(policy: str) -> str:
    """Field of a run's hash with the last position at which a policy crashed its executor."""
    return f"failed_at:{policy}"


def policy_starts(run_key: str, policy_lease: str, *, token: str, policies: Sequence[str]) -> ScriptCall:
    """Read a run's counters for the owner of the policy lease with ``token``, and write down that it judges the run
    from now on, together with others. If the worker before was lost with the run, this is counted.

    The same call may be sent again after a lost reply. Reply: `LOST_BESIDE`, `LOST_ALONE`, `UNEXPLAINED`, then two
    values per policy, `starts_field` and `failed_at_field`; or ``fenced``, ``gone``, or the run's status if it is no
    longer open.
    """
    fields = [LOST_BESIDE, LOST_ALONE, UNEXPLAINED]
    fields += [field(policy) for policy in policies for field in (starts_field, failed_at_field)]
    return _policy_starts(run_key, policy_lease, token=token, fields=fields)


@script(AT=AT)
def _policy_starts(run_key: str, policy_lease: str, *, token: str, fields: Sequence[str]) -> ScriptCall: ...


def note_place(run_key: str, policy_lease: str, *, token: str, place: Place) -> ScriptCall:
    """Write down where the owner judges the run now. Reply: 0, or the refusals of `policy_starts`."""
    return _note(run_key, policy_lease, token=token, field=AT, value=f"{place} {token}")


def note_unexplained(run_key: str, policy_lease: str, *, token: str, ends: int) -> ScriptCall:
    """Set how often an executor of the run ended because of an unknown policy. Reply: the number, or the refusals
    of `policy_starts`.
    """
    return _note(run_key, policy_lease, token=token, field=UNEXPLAINED, value=ends)


@script()
def _note(run_key: str, policy_lease: str, *, token: str, field: str, value: Arg) -> ScriptCall: ...


def count_policy_start(
    run_key: str, policy_lease: str, *, token: str, policy: str, starts: int, failed_at: int = 0
) -> ScriptCall:
    """Set how many starts are held against a policy; ``failed_at``: the position at which the last one failed.

    The owner alone writes them and knows them, so the same call may be sent again after a lost reply. Reply: the new
    values of both fields, or the refusals of `policy_starts`.
    """
    count, place = starts_field(policy), failed_at_field(policy)
    return _count_start(
        run_key, policy_lease, token=token, count_field=count, starts=starts, place_field=place, failed_at=failed_at
    )


@script()
def _count_start(
    run_key: str,
    policy_lease: str,
    *,
    token: str,
    count_field: str,
    starts: int,
    place_field: str,
    failed_at: int,
) -> ScriptCall: ...
