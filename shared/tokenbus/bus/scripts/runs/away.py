"""Runs that only wait are put away: the state of each is in its hash until something happens, and in no worker.

Whatever appends to the events of such a run puts its state before it (pieces/append_input.lua). So what the parser
knows follows from the events alone, as ever. The result of a child run does so for its parent, as any tool's.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.bus.scripts.runs.accept import RUNS_SHARE
from tokenbus.bus.scripts.script import Arg, ScriptCall, script

MOST_UNREAD = 32
"""Behind more entries than this no run is put away: the parser has other work."""


class AwayRun(msgspec.Struct, frozen=True):
    """A run that may be put away."""

    key: str
    run: str
    back: bytes
    """The frame with its state."""
    due_ms: int
    """When it must be back."""
    children: Sequence[str] = ()
    """The hashes of the child runs that it waits for."""


def put_away(
    lease: str, events: str, index: str, runs: Sequence[AwayRun], *, token: str, offset: str, forget: bytes, ttl_ms: int
) -> ScriptCall:
    """Put these runs away, if the parser's state still is what ``offset`` and ``token`` say, and nothing unread is of
    them. A run whose child is not open stays. Reply: how many were put away; none on a server that is nearly full.
    """
    places = [key for each in runs for key in (each.key, *each.children)]
    parts: list[Arg] = [part for r in runs for part in (r.run, r.back, r.due_ms, len(r.children))]
    return _put_away(
        lease, events, index, places, token=token, offset=offset, forget=forget, ttl_ms=ttl_ms, parts=parts
    )


@script(RUNS_SHARE=RUNS_SHARE, MOST_UNREAD=MOST_UNREAD)
def _put_away(
    lease: str,
    events: str,
    index: str,
    run_keys: Sequence[str],
    *,
    token: str,
    offset: str,
    forget: bytes,
    ttl_ms: int,
    parts: Sequence[Arg],
) -> ScriptCall: ...


@script()
def put_back(run_key: str, events: str, parser_lease: str, index: str, *, run: str) -> ScriptCall:
    """Let the parser have the run again. Reply: 1, or 0 if it was not put away."""
    ...
