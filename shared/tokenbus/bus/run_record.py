"""A run's hash (`Keys.run`): the names of its fields, its statuses, and whether an attempt may still write.

The scripts in `bus/scripts` are Lua, and have these names as literals; `is_open` is what `append` checks too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, cast

import msgspec

RunStatus: TypeAlias = Literal[
    "awaited", "open", "cancelling", "expiring", "completed", "incomplete", "failed", "cancelled"
]
"""``awaited``: a cancel came before its run. ``cancelling``, ``expiring``: the run may write no more, and its parser is
about to end it."""
UNENDED: tuple[RunStatus, ...] = ("open", "cancelling", "expiring")
"""Statuses of a run that was accepted and has not ended."""
ENDED: tuple[RunStatus, ...] = ("completed", "incomplete", "failed", "cancelled")

STATUS = "status"
TURN = "turn"
ATTEMPT = "attempt"
CLOSED = "closed"
"""The newest attempt that may write no more, though the run may be open."""
RAW = "raw"
"""How many frames of the present attempt there are."""
SEQ = "seq"
"""How many public events there are."""
ACCEPTED = "accepted"
"""When the run was accepted, in ms of the server's clock."""
DEADLINE = "deadline"
"""When the run ends at the latest, in ms of the server's clock; no field without a deadline."""
REQUEST = "request"
RESULT = "result"
"""The terminal event."""
RECORD = "record"
"""Of a run that is recorded: how many bytes of raw frames may still be kept."""
ASKED = "asked"
"""A policy asks for the run: no policy judges it."""
LET_GO = "let_go"
"""No policy judges the run any more, though it had some."""
CHOICE = "choice"
"""Which of the request's providers and models is asked now: 0, or no field, for its own, n for its n-th fallback."""
CONTINUES = "continues"
"""For each of them, its own first: 1 if a partial answer of this request can be continued there, or 0."""
FRAME = "frame:"
"""Prefix of the fields with the raw frames of a recorded run: ``frame:<attempt>:<n>``."""
HISTORY = "history:"
"""Prefix of the fields with what a turn appended to the history, as messages: ``history:<turn>``."""


def history_field(turn: int) -> str:
    """The field with what this turn began with beyond the one before it."""
    return f"{HISTORY}{turn}"


def history_fields(turn: int) -> list[str]:
    """All that the turn began with beyond the request."""
    return [history_field(n) for n in range(1, turn + 1)]


def call_field(block: int) -> str:
    """The field that stands while the call of this block is open; its value is the attempt."""
    return f"call:{block}"


def so_far_field(attempt: int) -> str:
    """The field that holds what of its turn this attempt goes on from: messages, as the history has."""
    return f"so_far:{attempt}"


class AttemptRecord(msgspec.Struct, frozen=True):
    """What the hash says of one attempt."""

    is_open: bool
    """Whether the attempt may write: its run is open, no newer attempt began, and nobody closed this one."""
    let_go: bool
    """See `LET_GO`."""
    more: Sequence[bytes | None] = ()
    """The further fields that were asked for."""


async def read_attempt(client: Any, run_key: str, attempt: int, more: Sequence[str] = ()) -> AttemptRecord:
    """Read the hash of the attempt's run, and ``more`` fields of it. Raises what redis-py raises."""
    values: list[bytes | None] = await client.hmget(run_key, [STATUS, ATTEMPT, CLOSED, LET_GO, *more])
    status, newest, closed, let_go, *rest = values
    this = b"%d" % attempt
    return AttemptRecord(status_of(status) == "open" and newest == this and closed != this, let_go is not None, rest)


def status_of(found: bytes | None) -> RunStatus | None:
    """The field `STATUS` as it was read; None if the run is not known, or its records have expired."""
    return cast(RunStatus, found.decode()) if found is not None else None


async def read_status(client: Any, run_key: str) -> RunStatus | None:
    """The status of the run with this hash, see `status_of`. Raises what redis-py raises."""
    return status_of(await client.hget(run_key, STATUS))
