"""Hash of a run (`Keys.run`): field names, statuses, and whether an attempt may still write.

The Lua scripts in `bus/scripts` contain these names as literals; `append` checks the same condition as `is_open`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, TypeAlias, cast

import msgspec

RunStatus: TypeAlias = Literal[
    "awaited", "open", "cancelling", "expiring", "completed", "incomplete", "failed", "cancelled"
]
"""``awaited``: a cancel arrived before its run. ``cancelling``, ``expiring``: the run may no longer write, and its
parser is about to end it.
"""
UNENDED: tuple[RunStatus, ...] = ("open", "cancelling", "expiring")
"""Statuses of a run that was accepted and has not ended."""
ENDED: tuple[RunStatus, ...] = ("completed", "incomplete", "failed", "cancelled")


SESSION_LIVES = 2
"""The ended runs of a session are kept this many times as long as the session, so that they are renewed once in half of
its time, and not with each append.
"""


class Expires(Protocol):
    """What sets the time to live of keys: a stage's `Commit`."""

    def expire(self, key: str, ttl_ms: int) -> None: ...


class RunLifetimes(msgspec.Struct, frozen=True):
    """How long the keys of a run exist. Nothing deletes them: each expires by itself.

    Intake's script creates the run's hash for ``open_ms`` (scripts/runs/accept.lua). The parser gives the run's log and
    its tape the same time and renews it with each turn, and its commit that ends the run sets all of them to
    ``ended_ms``. What else belongs to the run goes earlier: checkpoints and their pieces in that commit, its places in
    the index by the time of its end (scripts/pieces/index_ended.lua).
    """

    open_ms: int
    """`retention.open_run_s`"""
    ended_ms: int
    """`retention.finished_run_s`"""
    session_ms: int = 0
    """`retention.session_s`"""

    def renew(self, commit: Expires, *keys: str, more_ms: int = 0) -> None:
        """The run is open, and may wait for somebody for ``more_ms``."""
        for key in keys:
            commit.expire(key, self.open_ms + more_ms)

    def end(self, commit: Expires, *keys: str, of_session: bool = False) -> None:
        """The run has ended. One of a session stays as long as the session does: intake renews it in time."""
        for key in keys:
            commit.expire(key, SESSION_LIVES * self.session_ms if of_session else self.ended_ms)


STATUS = "status"
TURN = "turn"
ATTEMPT = "attempt"
CLOSED = "closed"
"""The newest attempt that may no longer write, although the run may be open."""
RAW = "raw"
"""Number of frames of the current attempt."""
SEQ = "seq"
"""Number of public events."""
ACCEPTED = "accepted"
"""Time of acceptance, in ms of the server's clock."""
ENDED_AT = "ended"
"""Time at which the end of the run was committed, in ms of the server's clock."""
TENANT = "tenant"
"""The request's tenant; the field is missing without one."""
PROVIDER = "provider"
"""The provider that is called, or was called last."""
MODEL = "model"
"""The model of that provider, as requests name it."""
FINISH = "finish"
"""Finish reason of the terminal event."""
ERROR = "error"
"""Error code of the terminal event; the field is missing without an error."""
DEADLINE = "deadline"
"""Deadline, in ms of the server's clock; the field is missing without a deadline."""
REQUEST = "request"
RESULT = "result"
"""The terminal event."""
RECORD = "record"
"""Recorded runs only: bytes of raw frames that may still be kept."""
ARCHIVE = "archive"
"""Exists until the run's log is in the archive, if the deployment has one."""
ASKED = "asked"
"""A policy requested this run, so no policy judges it."""
BYPASSED = "let_go"
"""Policies no longer judge the run, although it has some."""
JUDGING = "judging"
"""Since when output of the run waits for its policies, in ms of the server's clock; 0 or missing if none does."""
CHOICE = "choice"
"""Provider and model in use: 0 or missing for the request's own, n for its n-th fallback."""
CONTINUES = "continues"
"""For each provider and model, the request's own first: 1 if a partial answer can be continued there, else 0."""
JOB = "job"
"""The run's newest job at its provider, and how far its answer was read (`ProviderJob`); missing without one."""
HISTORY_BOUND = "history_bound"
"""A session's run: how much of the session's history its requests have (`HistoryBound`); missing: all of it."""
WAITS = "waits"
"""Names of the open waits, with a blank before and after each; missing if none is."""
FRAME = "frame:"
"""Prefix of the fields with the raw frames of a recorded run: ``frame:<attempt>:<n>``."""
HISTORY = "history:"
"""Prefix of the fields with the messages that a turn appended to the history: ``history:<turn>``."""


def history_field(turn: int) -> str:
    """The field with the messages that were appended at the start of this turn."""
    return f"{HISTORY}{turn}"


def history_fields(turn: int) -> list[str]:
    """All fields with messages that the turn has in addition to the request."""
    return [history_field(n) for n in range(1, turn + 1)]


def call_field(block: int) -> str:
    """Field that exists while a worker may have the call of this block; its value is `call_fence`."""
    return f"call:{block}"


def call_fence(attempt: int, answers: int) -> str:
    """What a worker must know of a call to write for it: the attempt, and how many answers it was handed out with. So
    a worker that is late repeats no question.
    """
    return f"{attempt}.{answers}" if answers else str(attempt)


_CHILD = "child:"


def child_field(block: int) -> str:
    """Field that exists once the child run of this block's call was accepted; it is accepted once."""
    return f"{_CHILD}{block}"


def children_in(fields: Iterable[bytes]) -> list[int]:
    """The blocks whose child runs were accepted, by the names of a run's fields."""
    return [int(name[len(_CHILD) :]) for name in (field.decode() for field in fields) if name.startswith(_CHILD)]


def wait_field(wait: str) -> str:
    """Field that exists while this wait is open: its `WaitInfo`, as JSON."""
    return f"wait:{wait}"


def fate_field(wait: str) -> str:
    """Field with the decision that ended this wait (`WaitFate`), as JSON."""
    return f"fate:{wait}"


def answer_field(block: int, number: int) -> str:
    """Field with the answer (`GivenAnswer`) to a question for which the call of this block waits in its worker."""
    return f"answer:{block}.{number}"


def task_field(block: int) -> str:
    """Field with the task that the call of this block has become at its MCP server."""
    return f"task:{block}"


def so_far_field(attempt: int) -> str:
    """Field with the partial answer that this attempt continues, as messages."""
    return f"so_far:{attempt}"


class AttemptRecord(msgspec.Struct, frozen=True):
    """State of one attempt, from the run's hash."""

    is_open: bool
    """Whether the attempt may write: its run is open, no newer attempt has begun, and the attempt is not closed."""
    bypassed: bool
    """See `BYPASSED`."""
    more: Sequence[bytes | None] = ()
    """Values of the additional fields."""


async def read_attempt(client: Any, run_key: str, attempt: int, more: Sequence[str] = ()) -> AttemptRecord:
    """Read the hash of the attempt's run, and ``more`` fields of it. Raises redis-py's errors."""
    values: list[bytes | None] = await client.hmget(run_key, [STATUS, ATTEMPT, CLOSED, BYPASSED, *more])
    status, newest, closed, let_go, *rest = values
    this = b"%d" % attempt
    return AttemptRecord(status_of(status) == "open" and newest == this and closed != this, let_go is not None, rest)


def status_of(found: bytes | None) -> RunStatus | None:
    """Parse the field `STATUS`; None if the run is unknown or its records have expired."""
    return cast(RunStatus, found.decode()) if found is not None else None


async def newest_seq(client: Any, run_key: str) -> int:
    """The seq of the newest public event of the run with this hash; -1 if there is none. Raises redis-py's errors."""
    return int(await client.hget(run_key, SEQ) or 0) - 1


async def read_status(client: Any, run_key: str) -> RunStatus | None:
    """The status of the run with this hash, see `status_of`. Raises redis-py's errors."""
    return status_of(await client.hget(run_key, STATUS))
