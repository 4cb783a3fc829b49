"""One run in a list of runs: its tenant, provider, progress and outcome."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

ListedState: TypeAlias = Literal["queued", "running", "waiting", "completed", "incomplete", "failed", "cancelled"]
"""``queued``: no provider has answered yet. ``running``: one has, and the run has not ended. ``waiting``: it waits
for a person or a client.
"""
OPEN_STATES: tuple[ListedState, ...] = ("queued", "running", "waiting")
ENDED_STATES: tuple[ListedState, ...] = ("completed", "incomplete", "failed", "cancelled")


class RunInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run as `Client.runs` lists it. Times are Unix times in ms of the server's clock."""

    run: str
    state: ListedState
    """``queued`` until a provider answers, then ``running``, and ``waiting`` while it waits for a person or a client;
    then how it ended: ``completed``, ``incomplete``, ``failed`` or ``cancelled``.
    """
    accepted_ms: int
    provider: str | None = None
    """The provider that is called, or was called last. None if the request was refused without naming one."""
    model: str | None = None
    """The model of that provider, as requests name it."""
    tenant: str | None = None
    parent: str | None = None
    """The run whose tool call began this one."""
    turn: int = 0
    """The current or last turn, counted from 0."""
    attempt: int = 1
    """The current or last attempt, counted through the whole run from 1."""
    events: int = 0
    """Number of its public events so far."""
    deadline_ms: int | None = None
    ended_ms: int | None = None
    """None while the run is open."""
    finish: str | None = None
    """Finish reason of a run that has ended."""
    error: str | None = None
    """Error code of a failed run, and of an incomplete one if there is one."""

    @property
    def is_open(self) -> bool:
        """Whether the run has not ended."""
        return self.state in OPEN_STATES

    @property
    def at_ms(self) -> int:
        """The time by which runs are listed: that of the end, or of the acceptance of an open run."""
        return self.accepted_ms if self.ended_ms is None else self.ended_ms
