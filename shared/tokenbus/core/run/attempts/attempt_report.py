"""What became of an attempt, for metrics, logs and traces. It changes nothing about the run."""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenbus.core.run.attempts.retry import WORKER_LOST
from tokenbus.core.run.state import RunState
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.usage import Usage

AttemptOutcome = Literal["ok", "error", "lost", "cancelled", "stopped"]
"""`lost`: its worker was lost. `cancelled`: a client cancelled the run. `stopped`: the run ended for another reason."""


class AttemptReport(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt that is over. Times are Unix milliseconds; 0: that point was never reached, or is unknown."""

    turn: int
    attempt: int
    provider: str
    model: str
    """As requested."""
    outcome: AttemptOutcome
    finish: str = ""
    error: ErrorInfo | None = None
    usage: Usage | None = None
    handed_out_ms: int
    """When the attempt could begin: after the delay of a retry."""
    called_ms: int = 0
    """When its provider was called."""
    answered_ms: int = 0
    """When the provider's answer began."""
    visible_ms: int = 0
    """Time of the turn's first visible text, if this attempt produced it."""
    ended_ms: int
    answered_model: str = ""
    """The model, as the provider names it."""
    response_id: str = ""
    request_id: str = ""
    """The provider's id of the call."""

    @property
    def began_ms(self) -> int:
        """When the call began, as far as that is known."""
        return self.called_ms or self.handed_out_ms

    @property
    def result(self) -> str:
        """The outcome in one word: for an error its class."""
        return self.error.kind if self.outcome == "error" and self.error else self.outcome


def report_attempt(
    s: RunState,
    at_ms: int,
    *,
    outcome: AttemptOutcome | None = None,
    finish: str = "",
    error: ErrorInfo | None = None,
    usage: Usage | None = None,
    called_ms: int = 0,
) -> AttemptReport | None:
    """Report the current attempt; None if it was reported before, or if the run never had one.

    ``outcome``: None for that of the error.
    """
    target = s.target
    if s.reported_attempt >= s.attempt or not target.provider:
        return None
    s.reported_attempt = s.attempt
    if outcome is None:
        outcome = "ok" if error is None else "lost" if error.code == WORKER_LOST else "error"
    start = s.start
    return AttemptReport(
        turn=s.turn,
        attempt=s.attempt,
        provider=target.provider,
        model=target.model,
        outcome=outcome,
        finish=finish,
        error=error,
        usage=usage or s.usage,
        handed_out_ms=s.handed_out_ms or s.accepted_ms,
        called_ms=called_ms or (start.called_ms if start else 0),
        answered_ms=s.answered_ms,
        visible_ms=s.visible_ms,
        ended_ms=at_ms,
        answered_model=start.model if start else "",
        response_id=start.provider_id if start else "",
        request_id=(error and error.request_id) or (start.request_id if start else ""),
    )
