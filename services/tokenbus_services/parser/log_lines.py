"""Log lines for the course of a run: its start, the end of each attempt, each retry, its end.

No line has content: neither text nor what a provider wrote in its error, which may quote the request.
"""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from tokenbus.core.request.bounds import MAX_NAME_CHARS, tenant_of
from tokenbus.core.run.attempts.attempt_report import AttemptReport
from tokenbus.core.run.state import RunState
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.public import (
    Incomplete,
    Restarted,
    Retrying,
    RunEnd,
    RunEvent,
    RunFailedEvent,
    Started,
)
from tokenbus.events.usage import Usage
from tokenbus_services.runtime.mcp_tool_cache import hint

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_COUNTS = ("input", "output", "reasoning", "cache_read", "cache_write")


class RunLog:
    """Writes the lines of all runs of this worker."""

    def attempt_over(self, state: RunState, report: AttemptReport) -> None:
        """Log the end of an attempt; an error as a warning."""
        fields: dict[str, object] = {
            "run": state.run,
            "turn": report.turn,
            "attempt": report.attempt,
            "provider": report.provider,
            "model": report.model,
            "outcome": report.outcome,
            "finish": report.finish or None,
            "request_id": report.request_id or None,
            "response_id": report.response_id[:MAX_NAME_CHARS] or None,
            "waited_ms": report.called_ms and max(0, report.called_ms - report.handed_out_ms),
            "first_byte_ms": report.answered_ms and max(0, report.answered_ms - report.began_ms),
            "first_text_ms": report.visible_ms and max(0, report.visible_ms - report.began_ms),
            "ms": max(0, report.ended_ms - report.began_ms),
            **tokens(report.usage),
        }
        if report.answered_model != report.model:
            fields["answered_model"] = report.answered_model[:MAX_NAME_CHARS] or None
        if error := report.error:
            fields |= described(error)
            fields["hint"] = hint(report.provider, error)
        write = log.warning if report.outcome == "error" else log.info
        write("attempt_ended", **without_blanks(fields))

    def lifecycle(self, state: RunState, event: RunEvent) -> None:
        """Log a start, a retry or an end."""
        match event:
            case Started():
                tenant = tenant_of(state.accepted.metadata) or None
                fields = {"run": event.run, "provider": event.provider, "model": event.model, "tenant": tenant}
                log.info("run_started", **without_blanks(fields))
            case Retrying() | Restarted():
                fallback = event.fallback if isinstance(event, Retrying) else None
                fields = {
                    "run": event.run,
                    "turn": event.turn,
                    "attempt": event.attempt,
                    "next_attempt": event.next_attempt,
                    "delay_ms": event.delay_ms,
                    "restarts": isinstance(event, Restarted) or None,
                    "fallback": fallback and f"{fallback.provider}/{fallback.model}",
                    **described(event.error),
                }
                log.info("attempt_retried", **without_blanks(fields))
            case RunEnd():
                error = event.error if isinstance(event, RunFailedEvent | Incomplete) else None
                fields = {
                    "run": event.run,
                    "finish": event.finish,
                    "turns": event.turn + 1,
                    "attempts": event.attempt,
                    "first_text_ms": event.timing.first_visible_ms,
                    "ms": event.timing.total_ms,
                    **tokens(event.usage),
                    **(described(error) if error else {}),
                    "status": str(event.__struct_config__.tag),  # the run's, not that of the provider's response
                    "http_status": error and error.status,
                }
                log.info("run_ended", **without_blanks(fields))
            case _:
                pass


def described(error: ErrorInfo) -> dict[str, object]:
    """The error without its message, which may quote the request."""
    where = error.where if error.code in ("key_missing", "key_unusable") else None
    return {"class": error.kind, "code": error.code[:MAX_NAME_CHARS], "status": error.status, "where": where}


def tokens(usage: Usage | None) -> dict[str, object]:
    """The token counts, as the provider reported them."""
    return {f"{name}_tokens": getattr(usage, name) for name in _COUNTS} if usage else {}


def without_blanks(fields: Mapping[str, object]) -> dict[str, object]:
    """Leave out what is unknown."""
    return {name: value for name, value in fields.items() if value is not None}
