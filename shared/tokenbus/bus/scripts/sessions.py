"""Writes to sessions: appends, and pieces of the history. `Commit.end_session_run` starts what waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tokenbus.bus.scripts.commit import (
    DELETED_MS,
    FORGOTTEN_AT_ONCE,
    LARGE_BYTES,
    MOST_EVENT_BYTES,
    MOST_EVENTS,
    MOST_RUNS,
    MOST_TAKEN_BYTES,
    TRIMMED_AT_ONCE,
    TRIMMED_BYTES,
)
from tokenbus.bus.scripts.runs.accept import RUNS_SHARE
from tokenbus.bus.scripts.runs.index import LIFETIMES, MOST_FORGOTTEN
from tokenbus.bus.scripts.script import ALONE, Arg, ScriptCall, script

Kind = Literal["message", "add", "configure", "interrupt", "withdraw", "rewrite", "delete"]
MOVED = b"moved"
"""Reply: the session is another than the caller saw. Nothing was written."""
LATER = 10**12
"""Added to the place of a waiting message that does not interrupt, so that those that do go first."""
MOST_WAITING = 256
"""Maximum messages of one session that wait."""
MOST_WAITING_BYTES = 16 * 2**20
"""Maximum size of what they would start."""


@script(
    RUNS_SHARE=RUNS_SHARE,
    MOST_FORGOTTEN=MOST_FORGOTTEN,
    LIFETIMES=LIFETIMES,
    LATER=LATER,
    DELETED_MS=DELETED_MS,
    FORGOTTEN_AT_ONCE=FORGOTTEN_AT_ONCE,
    MOST_RUNS=MOST_RUNS,
    MOST_TAKEN_BYTES=MOST_TAKEN_BYTES,
    MOST_EVENTS=MOST_EVENTS,
    MOST_EVENT_BYTES=MOST_EVENT_BYTES,
    TRIMMED_AT_ONCE=TRIMMED_AT_ONCE,
    TRIMMED_BYTES=TRIMMED_BYTES,
    LARGE_BYTES=LARGE_BYTES,
    MOST_WAITING=MOST_WAITING,
    MOST_WAITING_BYTES=MOST_WAITING_BYTES,
)
def append(
    session: str,
    log: str,
    appends: str,
    queue: str,
    history: str,
    run_key: str,
    run_log: str,
    next_key: str,
    next_log: str,
    events: str,
    turns: str,
    raw: str,
    control: str,
    parser_lease: str,
    normalizer_lease: str,
    open_runs: str,
    ended_runs: str,
    sessions: str,
    topic: str,
    of_tenant: Sequence[str] = (),
    *,
    epoch: int,
    version: str,
    runs: int,
    open_run: str,
    lost: int,
    next_run: str,
    append: str,
    kind: Kind,
    item: bytes,
    work: bytes,
    when_busy: str,
    heard: str,
    heard_characters: str,
    frame: bytes,
    control_frame: bytes,
    subject: str,
    as_of: str,
    open_ms: int,
    keep_ms: int,
    topic_entries: int,
    renewed: str,
    fields: Sequence[Arg],
) -> ScriptCall:
    """Put something into a session. ``work``: what the message starts, packed; of an `add`, its messages as JSON
    without the brackets; of `configure` and `rewrite`, the messages that the history begins with. ``subject``: what to
    withdraw; of a `rewrite`, how many runs it replaces.

    Reply: ``ok``; ``known`` if the append was accepted already; `MOVED` if the session's configuration, or which runs
    it has, is not as the caller saw; ``stale`` as for `accept`. The last three write nothing. Error beginning with
    ``OOM`` as for `accept`.
    """
    ...


@script(
    MOST_EVENTS=MOST_EVENTS,
    MOST_EVENT_BYTES=MOST_EVENT_BYTES,
    TRIMMED_AT_ONCE=TRIMMED_AT_ONCE,
    TRIMMED_BYTES=TRIMMED_BYTES,
    LARGE_BYTES=LARGE_BYTES,
)
def refuse(
    session: str,
    log: str,
    appends: str,
    run_log: str,
    topic: str,
    *,
    open_run: str,
    append: str,
    reason: str,
    problem: bytes,
    ttl_ms: int,
    topic_entries: int,
) -> ScriptCall:
    """Return an append that is invalid or rejected (``reason``); ``problem``: why, as JSON.

    Reply: ``ok``, ``known`` or `MOVED`, as for `append`."""
    ...


@script()
def remember(session: str, history: str, *, made: str, name: str, messages: bytes) -> ScriptCall:
    """Keep a piece of a session's history. Reply: 0 if the session is gone."""
    ...


@script(weight=ALONE)
def read_history(
    history: str, *, before: int, oldest: int, most_runs: int, most_bytes: int, fields: Sequence[str] = ()
) -> ScriptCall:
    """Read fields of a session's history, and what the runs before one added to it."""
    ...
