"""Tool calls of one turn: handed out together; results are published in call order, not in order of arrival. So a
run's output does not depend on which tool is faster.
"""

from __future__ import annotations

import msgspec

from tokenbus.core.run.blocks.block_table import CompleteCall, HostedCall
from tokenbus.core.run.blocks.public_blocks import write_item, write_result
from tokenbus.core.run.gate import ToolVerdicts
from tokenbus.core.run.outbox import Outbox
from tokenbus.core.run.state import PendingCall, RunState
from tokenbus.core.run.waits import open_wait
from tokenbus.events.child_runs import child_id, depth_of
from tokenbus.events.frames import ResultImage, ToolReported, ToolReturned, ToolWork
from tokenbus.events.public import ChildEnded, ChildStarted, ImageRef, ToolProgress
from tokenbus.events.requests import (
    MAX_RUN_ID_CHARS,
    Base64Source,
    BlobSource,
    ContentPart,
    ExtraPart,
    ImagePart,
    Message,
    TextPart,
    ToolResultPart,
)
from tokenbus.events.waits import WaitInfo

CHILD_TOO_DEEP = "child_too_deep"
MAX_ASKED_TURNS = 100
"""Turns of a run that only ask whether the provider may run a call: each has a person who answers."""
TOO_MANY_CHILDREN = "too_many_children"
CHILD_ID_TOO_LONG = "child_id_too_long"


def may_call(s: RunState) -> bool:
    """Whether a further turn may follow this one's calls. What the provider runs itself needs no tool of the run."""
    depth = s.accepted.max_tool_depth
    return s.tool_turns < (depth if s.blocks.calls else max(depth, MAX_ASKED_TURNS))


def dispatch_calls(
    s: RunState, out: Outbox, at_ms: int, verdicts: ToolVerdicts | None = None
) -> list[ToolWork | WaitInfo]:
    """Start the turn's calls and return the work to hand out, and what calls wait for.

    Malformed calls and calls of unlisted tools are answered at once. In a run with policies, only released calls run,
    as the policies changed them. A call that was held back gets an answer for the model only, because it was never
    published.
    """
    s.phase = "tools"
    s.tool_turns += 1
    s.calls = []
    for call in s.blocks.calls:
        ruled = verdicts.take(call) if verdicts else None
        if verdicts and ruled is None:
            blocked = ToolReturned(call.block, verdicts.reason(call), is_error=True)
            s.calls.append(PendingCall(call, blocked, published=True))
        else:
            s.calls.append(PendingCall(call, _refused(s, ruled or call), changed=ruled))
    for call in s.blocks.asked:
        withheld = verdicts is not None and call.tool_id not in verdicts.items
        held_back = ToolReturned(call.block, verdicts.reason(call), is_error=True) if verdicts and withheld else None
        s.calls.append(PendingCall(call, held_back))
    s.calls.sort(key=lambda pending: pending.call.block)
    given = [hand_out(s, out, p, at_ms) for p in s.calls if p.result is None]
    return [each for each in given if each]


def hand_out(s: RunState, out: Outbox, pending: PendingCall, at_ms: int) -> ToolWork | WaitInfo | None:
    """The work of a call without a result, or what it waits for before that. None: it was refused, and has a result."""
    if wait := open_wait(s, out, pending, at_ms):
        return wait
    if pending.runs.name in s.accepted.begins_runs:
        child = child_id(s.run, pending.call.block)
        if problem := _no_child(s, child):
            pending.result = ToolReturned(pending.call.block, problem, is_error=True)
            return None
        s.children += 1
        pending.child = child
        out.event(s.turn, s.attempt, ChildStarted, **_of_call(pending), child=pending.child)
    return work_of(s, pending)


def _no_child(s: RunState, child: str) -> str | None:
    """Why the run may not begin this child: the error's code, and a sentence for the model."""
    rules = s.accepted.rules
    if depth_of(child) > rules.child_depth:
        return f"{CHILD_TOO_DEEP}: child runs are at most {rules.child_depth} deep, so do this without this tool"
    if s.children >= rules.child_runs:
        return f"{TOO_MANY_CHILDREN}: the run has begun {s.children} child runs, and may begin no more"
    if len(child) > MAX_RUN_ID_CHARS:
        return f"{CHILD_ID_TOO_LONG}: the child run's id would have more than {MAX_RUN_ID_CHARS} characters"
    return None


def work_of(s: RunState, pending: PendingCall) -> ToolWork:
    """The call for a worker. It may be handed out again if it begins a child run."""
    return ToolWork(
        run=s.run,
        turn=s.turn,
        attempt=s.attempt,
        block=pending.call.block,
        tool_id=pending.call.tool_id,
        name=pending.runs.name,
        arguments=pending.runs.arguments,
        free_text=pending.runs.free_text,
        timeout_s=s.accepted.tool_timeout_s,
        answers=[*pending.answers],
        state=pending.state,
        child=pending.child,
        durable=s.accepted.durable,
    )


def accept_result(s: RunState, result: ToolReturned) -> None:
    """Store the result of a call. A second result, or one without a call, is ignored."""
    for pending in s.calls:
        if pending.call.block == result.block and pending.result is None:
            pending.result = result


def publish_progress(s: RunState, out: Outbox, report: ToolReported) -> None:
    """Publish progress of a call that has no result yet; ignored for any other call."""
    if s.phase != "tools":
        return
    for pending in s.calls:
        if pending.result is None and pending.call.block == report.block:
            out.event(
                s.turn,
                s.attempt,
                ToolProgress,
                **_of_call(pending),
                progress=report.progress,
                total=report.total,
                message=report.message,
            )


def publish_results(s: RunState, out: Outbox) -> bool:
    """Publish the results that are due, in call order. True: all are published."""
    for pending in s.calls:
        if pending.result is None:
            return False
        if not pending.published:
            if pending.call.hosted:
                _publish_answer(s, out, pending, pending.call.hosted)
                continue
            if pending.child and (ended := pending.result.child_end):
                about = {**_of_call(pending), "child": pending.child}
                out.event(s.turn, s.attempt, ChildEnded, **about, status=ended.status, error=ended.error)
            _publish(s, out, pending.runs, pending.result)
            pending.published = True
    return True


def history_of(s: RunState) -> list[Message]:
    """What the turn appends to the conversation: what the model said, with what somebody allowed its provider, and the
    results.
    """
    (said,) = s.history
    parts: list[ContentPart] = list(said.content) if isinstance(said.content, list) else [TextPart(text=said.content)]
    answers = [_answer(p, p.call.hosted) for p in s.calls if p.call.hosted]
    results = [_result_part(p, p.result) for p in s.calls if p.result and not p.call.hosted]
    if answers:
        said = msgspec.structs.replace(said, content=[*parts, *answers])
    return [said, *([Message(role="tool", content=list[ContentPart](results))] if results else [])]


def _answer(pending: PendingCall, hosted: HostedCall) -> ExtraPart:
    """What the provider reads of the decision on a call that it runs."""
    if pending.allowed:
        return ExtraPart(name=hosted.item, json=hosted.allow)
    reason = pending.result.content if pending.result else ""
    denial = msgspec.json.decode(hosted.deny, type=dict[str, object]) | ({"reason": reason} if reason else {})
    return ExtraPart(name=hosted.item, json=msgspec.json.encode(denial).decode())


def _publish_answer(s: RunState, out: Outbox, pending: PendingCall, hosted: HostedCall) -> None:
    pending.published = True
    answer = _answer(pending, hosted)
    write_item(out, s.turn, s.attempt, s.blocks.next_number, item=answer.name, json=answer.json)
    s.blocks.next_number += 1


def answer_open_calls(s: RunState, out: Outbox, why: str) -> None:
    """Publish an error for every call without a published result, so that none stays open.

    Calls of a turn that is still streaming have no results yet.
    """
    calls = (
        s.calls
        if s.phase == "tools"
        else [PendingCall(c) for c in [*s.blocks.calls, *s.blocks.cut_calls, *s.blocks.asked]]
    )
    for pending in calls:
        if pending.call.hosted and not pending.published:
            pending.result = pending.result or ToolReturned(pending.call.block, why, is_error=True)
            _publish_answer(s, out, pending, pending.call.hosted)
        elif not pending.published:
            _publish(s, out, pending.runs, pending.result or ToolReturned(pending.call.block, why, is_error=True))


def _of_call(pending: PendingCall) -> dict[str, object]:
    return {"block": pending.call.block, "tool_id": pending.call.tool_id, "tool_name": pending.runs.name}


def _result_part(pending: PendingCall, result: ToolReturned) -> ToolResultPart:
    """The result for the model, with the images that the model can see."""
    call, shown = pending.call, result.content
    if pending.edited:  # else the model takes it for the result of what it asked for
        shown = f"[a person changed the arguments of this call to {pending.runs.arguments}]\n{shown}"
    images = [ImagePart(source=source) for image in result.images if (source := _source(image))]
    text = [TextPart(text=shown)] if shown else []
    content = [*text, *images] if images else shown
    return ToolResultPart(tool_id=call.tool_id, tool_name=call.name, content=content, is_error=result.is_error)


def _source(image: ResultImage) -> Base64Source | BlobSource | None:
    """The image as the model gets it; None if the model cannot see it."""
    if image.base64:
        return Base64Source(media_type=image.media_type, data=image.base64)
    if image.blob_id and image.size_bytes:
        return BlobSource(blob_id=image.blob_id, media_type=image.media_type, size_bytes=image.size_bytes)
    return None


def _refused(s: RunState, call: CompleteCall) -> ToolReturned | None:
    if call.problem:
        return ToolReturned(call.block, call.problem, is_error=True)
    if call.name in s.accepted.tools:
        return None
    return ToolReturned(call.block, f"there is no tool {call.name!r} here", is_error=True)


def _publish(s: RunState, out: Outbox, call: CompleteCall, result: ToolReturned) -> None:
    block = s.blocks.next_number
    s.blocks.next_number += 1
    write_result(
        out,
        s.turn,
        s.attempt,
        block,
        tool_id=call.tool_id,
        tool_name=call.name,
        content=result.content,
        is_error=result.is_error,
        blob_id=result.blob_id,
        images=[_shown(image) for image in result.images],
    )


def _shown(image: ResultImage) -> ImageRef:
    """The image for subscribers: inline bytes only if there is no blob. The size is set if the model sees the blob."""
    return ImageRef(
        media_type=image.media_type,
        blob_id=image.blob_id,
        base64=None if image.blob_id else image.base64 or None,
        size_bytes=image.size_bytes or None,
    )
