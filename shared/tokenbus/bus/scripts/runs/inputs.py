"""Guarded writes to the inputs of an open run: tool results and progress, and policy verdicts."""

from __future__ import annotations

from tokenbus.bus.run_record import call_fence, call_field, task_field
from tokenbus.bus.scripts.script import ScriptCall, script


def tool_result(
    run_key: str, events: str, parser_lease: str, *, run: str, block: int, attempt: int, answers: int = 0, frame: bytes
) -> ScriptCall:
    """Submit a tool's result, or its question: 1, or 0 if the call is not open (a second result, a cancel, a newer
    attempt, another number of ``answers``).
    """
    call, fence = call_field(block), call_fence(attempt, answers)
    return _tool_result(run_key, events, parser_lease, run=run, call=call, fence=fence, frame=frame)


@script()
def _tool_result(
    run_key: str, events: str, parser_lease: str, *, run: str, call: str, fence: str, frame: bytes
) -> ScriptCall: ...


def tool_progress(
    run_key: str, events: str, parser_lease: str, *, run: str, block: int, attempt: int, answers: int = 0, frame: bytes
) -> ScriptCall:
    """Submit progress of a call, which stays open: 1, or 0 if it is not open. Sent again, it is published again."""
    call, fence = call_field(block), call_fence(attempt, answers)
    return _tool_progress(run_key, events, parser_lease, run=run, call=call, fence=fence, frame=frame)


@script()
def _tool_progress(
    run_key: str, events: str, parser_lease: str, *, run: str, call: str, fence: str, frame: bytes
) -> ScriptCall: ...


def keep_task(run_key: str, *, block: int, attempt: int, answers: int = 0, task: str) -> ScriptCall:
    """Keep the task that a call has become at its server: 1, or 0 if the call is not open."""
    fence = call_fence(attempt, answers)
    return _keep_task(run_key, call=call_field(block), fence=fence, field=task_field(block), task=task)


@script()
def _keep_task(run_key: str, *, call: str, fence: str, field: str, task: str) -> ScriptCall: ...


@script()
def append_verdicts(
    run_key: str, events: str, parser_lease: str, policy_lease: str, *, run: str, token: str, frame: bytes
) -> ScriptCall:
    """Submit policy verdicts of a run, as the owner of the policy lease with ``token``.

    Reply: ``ok``; or ``fenced``, ``gone``, or the run's status if it is no longer open: these write nothing. A retry
    after a lost reply may append it twice; the parser applies each part once.
    """
    ...
