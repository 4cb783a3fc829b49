"""Creates and cancels runs: guarded writes to a run's hash and the streams that it begins in."""

from __future__ import annotations

from collections.abc import Sequence

from tokenbus.bus.scripts.runs.index import LIFETIMES, MOST_FORGOTTEN
from tokenbus.bus.scripts.script import Arg, ScriptCall, script

RUNS_SHARE = 0.9
"""Accept a new run only while less than this share of the server's ``maxmemory`` is in use; the rest is for open
runs.
"""

SMALL_FRAME = 8192
"""Bytes of the first event of a run without a turn that are accepted even on a full server."""

STALE = b"stale"
"""Reply: runs are placed by a later epoch than the caller's."""


@script(RUNS_SHARE=RUNS_SHARE, SMALL_FRAME=SMALL_FRAME, MOST_FORGOTTEN=MOST_FORGOTTEN, LIFETIMES=LIFETIMES)
def accept(
    run_key: str,
    events: str,
    turns: str,
    parser_lease: str,
    log: str,
    parent_key: str,
    open_runs: str,
    ended_runs: str,
    of_tenant: Sequence[str] = (),
    *,
    run: str,
    ttl_ms: int,
    frame: bytes,
    work: bytes,
    accepted_ms: int,
    epoch: int = 0,
    parent_call: str = "",
    parent_child: str = "",
    fields: Sequence[Arg],
) -> ScriptCall:
    """Create the run with its first event and, unless ``work`` is empty, its first turn, and list it among the open
    runs: all or nothing. ``of_tenant``: the open and the ended runs of its tenant, if it has one. ``accepted_ms``:
    time of acceptance in ms.

    Reply: ``new``, or the status of the existing run with this id (nothing is written then). If a cancel came before
    its run (status ``awaited``), it takes effect at once and no turn is handed out. Deletes the log of an expired run
    with the same id, because its entry ids would conflict. Error beginning with ``OOM`` if more than `RUNS_SHARE` of
    the server's memory is in use. `STALE` if runs are placed by a later ``epoch`` (bus/layout.py): nothing is written.

    ``parent_key``: the hash of the run whose call begins this one, or the run's own. A child run is accepted once,
    while its parent and the call are open; else the reply is ``orphan``, and nothing is written.
    """
    ...


@script()
def cancel(
    run_key: str,
    events: str,
    raw: str,
    control: str,
    parser_lease: str,
    normalizer_lease: str,
    *,
    run: str,
    awaited_ms: int,
    frame: bytes,
    control_frame: bytes,
    epoch: int = 0,
) -> ScriptCall:
    """Cancel an open run: refuse further writes of its attempt, notify its workers, and let the parser end it.

    Reply: ``cancelling``; the run's status if it is no longer open; ``awaited`` if the run is not known yet: the cancel
    then waits ``awaited_ms`` for it, counted from the last time it was sent. `STALE` as for `accept`.
    """
    ...


@script()
def mark_asked(run_key: str, *, ttl_ms: int) -> ScriptCall:
    """Record that a policy asks for this run, which is about to be published: 1, or 0 if the run is known already."""
    ...
