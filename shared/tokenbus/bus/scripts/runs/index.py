"""Repair of a partition's index of runs. `accept` and `Commit.end_run` write it; here is what they cannot know.

An index may have been lost, or could not be written, and it keeps open runs whose hash has expired.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.bus.scripts.script import Arg, ScriptCall, script

MOST_FORGOTTEN = 8
"""Each run that ends drops at most this many from the index of ended runs, so that a commit's cost is bounded."""
LIFETIMES = 8
"""After this many lifetimes of an open run, a tenant's index drops a run that is still listed as open."""


class OpenRun(msgspec.Struct, frozen=True):
    """What the index and the run's hash should have of an open run."""

    key: str
    """The run's hash."""
    run: str
    accepted_ms: int
    provider: str
    model: str
    tenant: str
    of_tenant: str
    """Open runs of the tenant; all open runs if it has none."""


def list_open(open_runs: str, runs: Sequence[OpenRun], *, ttl_ms: int) -> ScriptCall:
    """List runs as open, unless they are listed or have ended. ``ttl_ms``: the lifetime of an open run. Reply: those
    that are listed now.
    """
    keys: list[str] = []
    args: list[Arg] = []
    for run in runs:
        keys += (run.key, run.of_tenant)
        args += (run.run, run.accepted_ms, run.provider, run.model, run.tenant)
    return _list_open(open_runs, keys, ttl_ms=ttl_ms, facts=args)


@script(MOST_FORGOTTEN=MOST_FORGOTTEN, LIFETIMES=LIFETIMES)
def _list_open(open_runs: str, runs: Sequence[str], *, ttl_ms: int, facts: Sequence[Arg]) -> ScriptCall: ...


@script(MOST_FORGOTTEN=MOST_FORGOTTEN)
def unlist_ended(
    open_runs: str, ended_runs: str, away: str, run_keys: Sequence[str], *, keep_ms: int, runs: Sequence[str]
) -> ScriptCall:
    """Drop runs that are listed as open and are unknown, and list those that have ended as ended. Runs that are put
    away are listed as such. Reply: how many were dropped.
    """
    ...
