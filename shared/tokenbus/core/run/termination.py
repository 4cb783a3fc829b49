"""Usage reports and the end of a run: exactly one terminal event, with the data known at that time."""

from __future__ import annotations

import msgspec

from tokenbus.core.request.bounds import MAX_NAME_CHARS
from tokenbus.core.run.block_deltas import add
from tokenbus.core.run.effects import EndRun, EndStatus
from tokenbus.core.run.outbox import Outbox
from tokenbus.core.run.provider_extra import extras_of
from tokenbus.core.run.state import RunState
from tokenbus.core.run.tool_calls import answer_open_calls
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import CONTROL_ATTEMPT, CancelRequested, EventFrame
from tokenbus.events.normalized import Start
from tokenbus.events.public import (
    Answering,
    Cancelled,
    Completed,
    Incomplete,
    RunFailedEvent,
    TerminalEvent,
    Timing,
    UsageReported,
)
from tokenbus.events.usage import Usage

DEADLINE = "deadline"
"""Error code of a run or an attempt that the run's deadline ended."""
TERMINATED = "policy_terminated"
"""Error code of a run that a policy ended."""
LOST = "lost"
"""Error code of a run that no worker processes."""

STATUS: dict[type[TerminalEvent], EndStatus] = {
    Completed: "completed",
    Incomplete: "incomplete",
    RunFailedEvent: "failed",
    Cancelled: "cancelled",
}


def deadline_passed() -> ErrorInfo:
    """The error of a run whose deadline has passed."""
    return ErrorInfo(code=DEADLINE, kind="timeout", message="the run's deadline has passed")


def workers_gone() -> ErrorInfo:
    """The error of a run that stalled because its work was lost."""
    problem = "the run made no progress for too long, and no worker has it"
    return ErrorInfo(code=LOST, kind="internal", message=problem, retryable=True)


def terminated(by: str) -> ErrorInfo:
    """The error of a run that a policy ended; ``by``: the policy's name and reason."""
    message = f"a policy ended the run: {by}" if by else "a policy ended the run"
    return ErrorInfo(code=TERMINATED, kind="content_filter", message=message)


def cancelled_by(request: CancelRequested) -> dict[str, object]:
    """The fields of the terminal event of a run that a client cancelled."""
    heard = {"heard_through": request.heard_through, "heard_characters": request.heard_characters}
    return {"finish": "unknown", "reason": request.reason, **heard}


def close_blocks(s: RunState, out: Outbox, at_ms: int) -> None:
    """Cut all open blocks because the attempt ended. Text held back as a possible tag or stop string is released
    first.
    """
    if s.phase == "streaming":
        held = s.text.reader.release() if s.text else s.scan.release() if s.scan else []
        for event in held:
            add(s, out, event, at_ms)
    s.blocks.complete_all(out, cut=True)


def stop(s: RunState, out: Outbox, why: str, at_ms: int) -> None:
    """Cut open blocks, and answer every call without a result with the error ``why``."""
    close_blocks(s, out, at_ms)
    answer_open_calls(s, out, why)


def publish_start(s: RunState, out: Outbox) -> None:
    """Publish the model and the id of the answer that begins, if the provider names one of them."""
    if any((fields := _answered_by(s.start)).values()):
        out.event(s.turn, s.attempt, Answering, **fields, **_speaker(s))


def publish_usage(s: RunState, out: Outbox, usage: Usage | None) -> None:
    """Publish the usage of a turn, or of an attempt that another continues, and add it to the run's total."""
    s.usage = usage
    count(s)
    if usage:
        about = {**_answered_by(s.start), **_speaker(s)}
        out.event(s.turn, s.attempt, UsageReported, usage=usage, total=s.total, **about)


def count(s: RunState) -> None:
    """Add the current attempt's usage to the run's total: its tokens are spent even if its output is void."""
    if s.usage:
        s.total = s.total.plus(s.usage) if s.total else msgspec.structs.replace(s.usage, raw=None)
    s.usage = None


def end(s: RunState, out: Outbox, event: type[TerminalEvent], at_ms: int, **fields: object) -> EndRun:
    """Publish the run's terminal event. Usage of an unfinished attempt counts too."""
    count(s)
    fields = {**_answered_by(s.start or s.answered), **_speaker(s), **fields}
    if isinstance(error := fields.get("error"), ErrorInfo):
        fields["error"] = _with_request_id(s, error)
    timing = Timing(
        first_byte_ms=s.first_byte_ms, first_visible_ms=s.first_visible_ms, total_ms=max(0, at_ms - s.accepted_ms)
    )
    out.event(s.turn, s.attempt, event, timing=timing, usage=s.total, provider_extra=extras_of(s) or None, **fields)
    s.phase = "over"
    return EndRun(STATUS[event])


def _answered_by(start: Start | None) -> dict[str, object]:
    """Model and response id of the answer, as named by the provider."""
    if start is None:
        return {}
    return {
        "model": start.model[:MAX_NAME_CHARS] or None,
        "response_id": start.provider_id[:MAX_NAME_CHARS] or None,
    }


def _speaker(s: RunState) -> dict[str, object]:
    """The provider that was called last, for a run with fallbacks."""
    return {"provider": s.target.provider} if s.accepted.fallback else {}


def _with_request_id(s: RunState, error: ErrorInfo) -> ErrorInfo:
    """Name the call during which the run failed, also if the error is not the provider's: its support asks for it."""
    if error.request_id or s.phase != "streaming" or s.start is None or not s.start.request_id:
        return error
    return msgspec.structs.replace(error, request_id=s.start.request_id)


def count_bytes(s: RunState, frame: EventFrame, size: int) -> ErrorInfo | None:
    """Count a frame of ``size`` bytes before it is applied; return an error if a limit is exceeded.

    Frames of past attempts count too, because they had to be read. A replay reads the same frames, so its counts are
    equal.
    """
    rules = s.accepted.rules
    s.run_bytes += size
    if frame.attempt != CONTROL_ATTEMPT:
        s.turn_bytes += size
    if s.turn_bytes > rules.turn_bytes:
        problem = f"turn {s.turn} has more than {rules.turn_bytes} bytes of events"
        return ErrorInfo(code="turn_too_large", kind="limit", message=problem)
    if s.run_bytes > rules.run_bytes:
        problem = f"the run has more than {rules.run_bytes} bytes of events"
        return ErrorInfo(code="run_too_large", kind="limit", message=problem)
    return None
