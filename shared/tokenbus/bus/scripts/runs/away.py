"""Runs that only wait are put away: the state of each is in its hash until something happens, and in no worker.

Whatever appends to the events of such a run puts its state before it (pieces/append_input.lua). So what the parser
knows follows from the events alone, as ever.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenbus.bus.scripts.runs.accept import RUNS_SHARE
from tokenbus.bus.scripts.script import Arg, ScriptCall, script

MOST_UNREAD = 32
"""Behind more entries than this no run is put away: the parser has other work."""


@script(RUNS_SHARE=RUNS_SHARE, MOST_UNREAD=MOST_UNREAD)
def put_away(
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
) -> ScriptCall:
    """Put these runs away, if the parser's state still is what ``offset`` and ``token`` say, and nothing unread is of
    them. Reply: how many were; none on a server that is nearly full.
    """
    ...


@script()
def put_back(run_key: str, events: str, parser_lease: str, index: str, *, run: str) -> ScriptCall:
    """Let the parser have the run again. Reply: 1, or 0 if it was not put away."""
    ...
