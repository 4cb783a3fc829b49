"""How a turn's usage is told, and how a run ends: exactly one terminal event, with what is known at its moment."""

from __future__ import annotations

import msgspec

from tokenbus.core.bounds import MAX_NAME_CHARS
from tokenbus.core.content import add
from tokenbus.core.effects import EndRun, EndStatus
from tokenbus.core.outbox import Outbox
from tokenbus.core.state import RunState
from tokenbus.core.tool_turn import answer_open_calls
from tokenbus.events.failure import ErrorInfo
from tokenbus.events.normalized import Start
from tokenbus.events.public import (
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
"""Code of the error of a run, or of an attempt, that the run's deadline ended."""
LOST = "lost"
"""Code of the error of a run on which nobody works any more."""

STATUS: dict[type[TerminalEvent], EndStatus] = {
    Completed: "completed",
    Incomplete: "incomplete",
    RunFailedEvent: "failed",
    Cancelled: "cancelled",
}


def deadline_passed() -> ErrorInfo:
    """The error of a run whose deadline has passed."""
    return ErrorInfo(code=DEADLINE, kind="timeout", message="the run's deadline has passed")


def nobody_works() -> ErrorInfo:
    """The error of a run that fell silent because its work was lost."""
    problem = "nothing was heard of the run for long, and no worker has it"
    return ErrorInfo(code=LOST, kind="internal", message=problem, retryable=True)


def close_blocks(s: RunState, out: Outbox, at_ms: int) -> None:
    """No more comes of the attempt: what is open is cut. Text that might still have become a tag or a stop string is
    none."""
    if s.phase == "streaming":
        held = s.text.reader.release() if s.text else s.scan.release() if s.scan else []
        for event in held:
            add(s, out, event, at_ms)
    s.blocks.complete_all(out, cut=True)


def stop(s: RunState, out: Outbox, why: str, at_ms: int) -> None:
    """Open blocks end as they are, and every call without a result gets an error that says why."""
    close_blocks(s, out, at_ms)
    answer_open_calls(s, out, why)


def settle(s: RunState, out: Outbox, usage: Usage | None) -> None:
    """Tell the usage of the turn, or of an attempt that another goes on from, and add it to the run's."""
    s.usage = None
    if usage:
        s.total = _added(s.total, usage)
        start = s.start or Start("")
        model, response_id = (said[:MAX_NAME_CHARS] or None for said in (start.model, start.provider_id))
        fields = {"model": model, "response_id": response_id}
        out.event(s.turn, s.attempt, UsageReported, usage=usage, total=s.total, **fields)


def end(s: RunState, out: Outbox, event: type[TerminalEvent], at_ms: int, **fields: object) -> EndRun:
    """The run's last event. Usage of an attempt that did not finish counts too."""
    total = _added(s.total, s.usage) if s.usage else s.total
    timing = Timing(
        first_byte_ms=s.first_byte_ms, first_visible_ms=s.first_visible_ms, total_ms=max(0, at_ms - s.accepted_ms)
    )
    out.event(s.turn, s.attempt, event, timing=timing, usage=total, provider_extra=s.extras or None, **fields)
    s.phase = "over"
    return EndRun(STATUS[event])


def _added(total: Usage | None, usage: Usage) -> Usage:
    return total.plus(usage) if total else msgspec.structs.replace(usage, raw=None)
