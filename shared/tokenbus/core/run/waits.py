"""Tool calls that wait for somebody: which do, and what a decision makes of them.

A call that waits is handed out to nobody. The decision is an event like any other, of which the script that writes it
writes one for each wait. So the call runs, or gets its answer, in the commit that applies the decision. A call that
asked a question has ended; it runs again from its start, with the answers to all questions that it has asked. One that
cannot do that waits in its worker, and its question ends with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from tokenbus.core.request.bounds import tenant_of
from tokenbus.core.run.blocks.block_table import CompleteCall
from tokenbus.core.run.effects import GiveAnswer
from tokenbus.core.run.outbox import Outbox
from tokenbus.core.run.state import OpenWait, PendingCall, RunState
from tokenbus.events.frames import GivenAnswer, ToolAsked, ToolReturned, WaitDecided
from tokenbus.events.public import Resumed, Waiting
from tokenbus.events.waits import Condition, Conditions, WaitInfo

DENIED = "the call was denied, and did not run"
"""What the model reads of a call that may not run."""
NOBODY = "nobody decided in time"
CALL_ENDED = "the call ended before"
NO_RESULT = "the client returned no result in time"


def open_wait(s: RunState, out: Outbox, pending: PendingCall, at_ms: int) -> WaitInfo | None:
    """Let the call wait, if it must; return what it waits for, or None if a worker may run it now."""
    if hosted := pending.call.hosted:
        wait = OpenWait(_next_name(pending), "approval", at_ms + s.accepted.rules.hosted_approval_ms, "deny")
        text = f"MCP server: {hosted.server}" if hosted.server else None
        return _wait(s, out, pending, wait, at_ms, arguments=pending.call.arguments, text=text)
    waits = s.accepted.waits.get(pending.runs.name)
    if waits is None or _arguments(pending.runs) is None:
        return None  # malformed arguments: the worker refuses the call, and nobody needs to look at it
    name, arguments = _next_name(pending), pending.runs.arguments
    if not pending.allowed and needs_approval(pending.runs, waits.approval):
        wait = OpenWait(name, "approval", at_ms + waits.approval_ms, waits.on_deadline)
        return _wait(s, out, pending, wait, at_ms, arguments=arguments, schema=waits.schema)
    if not waits.client_ms:
        return None
    wait = OpenWait(name, "tool_result", at_ms + waits.client_ms, "deny")
    return _wait(s, out, pending, wait, at_ms, arguments=arguments, schema=waits.result)


def ask(s: RunState, out: Outbox, asked: ToolAsked, at_ms: int) -> WaitInfo | None:
    """Let the call wait for the answer to its question; None if no worker has the call."""
    pending = next((p for p in s.calls if p.call.block == asked.block), None)
    if pending is None or pending.wait or pending.result or s.phase != "tools":
        return None
    if asked.number >= 0:
        if asked.number != pending.held:
            return None  # the worker that had the call before has asked it
        pending.held += 1
    pending.state = asked.state
    deadline_ms = at_ms + asked.timeout_ms
    wait = OpenWait(_next_name(pending), "answer", deadline_ms, "cancel", asked.question, asked.number)
    return _wait(s, out, pending, wait, at_ms, text=asked.text, schema=asked.schema, url=asked.url)


def _next_name(pending: PendingCall) -> str:
    return f"{pending.call.block}.{pending.waited}"


def _wait(s: RunState, out: Outbox, pending: PendingCall, wait: OpenWait, at_ms: int, **shown: Any) -> WaitInfo:
    pending.wait = wait
    pending.waited += 1
    fields: dict[str, Any] = {
        "wait": wait.name,
        "what": wait.what,
        "tool_id": pending.runs.tool_id,
        "tool_name": pending.runs.name,
        "deadline_ms": wait.deadline_ms,
        "on_deadline": wait.on_deadline,
        "tenant": tenant_of(s.accepted.metadata) or None,
        **shown,
    }
    out.event(s.turn, s.attempt, Waiting, block=pending.call.block, **fields)
    return WaitInfo(run=s.run, since_ms=at_ms, held=wait.held, durable=s.accepted.durable, **fields)


def decide(s: RunState, out: Outbox, event: WaitDecided, at_ms: int) -> PendingCall | GiveAnswer | None:
    """Apply a decision; return its call, which now has a result or may run, or what it gets at its worker. None: the
    run has no such wait open.
    """
    pending = next((p for p in s.calls if p.wait and p.wait.name == event.wait), None)
    if pending is None or pending.wait is None or s.phase != "tools":
        return None
    wait, pending.wait = pending.wait, None
    _resume(s, out, pending, event, at_ms)
    if event.what == "answer":
        given = GivenAnswer(wait.question, event.decision, event.content, event.by, event.door)
        if wait.held:
            return GiveAnswer(pending.call.block, wait.number, given)
        pending.answers.append(given)
    elif event.decision == "allow":
        pending.allowed = True
        if pending.call.hosted:
            pending.result = ToolReturned(pending.call.block, "", is_error=False)
        if event.arguments is not None:
            pending.changed = msgspec.structs.replace(pending.runs, arguments=event.arguments)
            pending.edited = True
    elif event.decision == "deny":
        why = event.reason
        if event.what == "approval":
            denied = f"{DENIED}: {event.reason}" if event.reason else DENIED
            why = event.reason if pending.call.hosted else denied  # its provider tells the model that it did not run
        pending.result = ToolReturned(pending.call.block, why, is_error=True)
    else:
        pending.result = ToolReturned(pending.call.block, event.content, is_error=event.is_error)
    return pending


def end_held(s: RunState, out: Outbox, block: int, at_ms: int) -> str | None:
    """End the question of a call that has returned in its worker; return its wait. None: it has none open.

    No decision on it is on its way: the script that writes one refuses it once the call has returned.
    """
    pending = next((p for p in s.calls if p.call.block == block), None)
    if pending is None or pending.result or pending.wait is None:
        return None
    name, pending.wait = pending.wait.name, None
    ended = WaitDecided(name, "answer", "cancel", f"{name}.ended", door="deadline", reason=CALL_ENDED)
    _resume(s, out, pending, ended, at_ms)
    return name


def _resume(s: RunState, out: Outbox, pending: PendingCall, event: WaitDecided, at_ms: int) -> None:
    out.event(
        s.turn,
        s.attempt,
        Resumed,
        wait=event.wait,
        what=event.what,
        block=pending.call.block,
        tool_id=pending.call.tool_id,
        tool_name=pending.runs.name,
        decision=event.decision,
        decision_id=event.id,
        by=event.by,
        door=event.door,
        at_ms=at_ms,
        reason=event.reason or None,
        arguments=event.arguments,
        content=event.content or None if event.what == "answer" else None,
    )


def waits_only(s: RunState) -> bool:
    """Whether the run does nothing but wait for somebody: no worker has anything of it."""
    return s.phase == "tools" and not any(p.is_at_worker for p in s.calls) and any(p.wait for p in s.calls)


def rests(s: RunState) -> bool:
    """Whether nothing happens to the run until somebody decides or a child run ends. A child that is only asked for
    counts too.
    """
    return s.phase == "tools" and all(p.result or p.child or not p.is_at_worker for p in s.calls)


def children_of(s: RunState) -> list[str]:
    """The child runs that the run waits for."""
    return [p.child for p in s.calls if p.child and p.result is None]


def looked_at_again_ms(s: RunState, at_ms: int) -> int:
    """When the clock must look at a run that rests: at its first deadline. A child that waits may take longer than
    its call may; then a later look asks again.
    """
    found = [p.wait.deadline_ms for p in s.calls if p.wait]
    if children_of(s):
        found += [at_ms + s.accepted.begins_runs[p.runs.name] for p in s.calls if p.child and p.result is None]
        found += [s.accepted.deadline_ms] if s.accepted.deadline_ms else []
    return min(found, default=at_ms)


def needs_approval(call: CompleteCall, rules: Sequence[Conditions]) -> bool:
    """Whether the call fulfils one of the rules. Free text fulfils any, because it has no arguments to look at."""
    arguments = _arguments(call) or {}
    return any(all(_holds(arguments, path, condition) for path, condition in rule.items()) for rule in rules)


def _arguments(call: CompleteCall) -> dict[str, object] | None:
    """Empty for free text; None if they are not a JSON object."""
    try:
        arguments: object = {} if call.free_text else msgspec.json.decode(call.arguments or "{}")
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return cast("dict[str, object]", arguments) if isinstance(arguments, dict) else None


def _holds(arguments: object, path: str, condition: Condition) -> bool:
    value = arguments
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            return True  # a call that leaves it out must not be the way around the rule
        value = cast("dict[str, object]", value)[name]
    if isinstance(value, int | float) and not isinstance(value, bool):
        below = condition.minimum is not None and value < condition.minimum
        above = condition.maximum is not None and value > condition.maximum
        low = condition.exclusive_minimum is not None and value <= condition.exclusive_minimum
        high = condition.exclusive_maximum is not None and value >= condition.exclusive_maximum
        if below or above or low or high:
            return False
    if condition.enum is not None and not any(_same(value, each) for each in condition.enum):
        return False
    return condition.not_ is None or not any(_same(value, each) for each in condition.not_.enum)


def _same(one: object, other: object) -> bool:
    """As JSON has it: true is not 1, but 1 is 1.0."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)
