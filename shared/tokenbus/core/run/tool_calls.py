"""The tools of one turn: its calls handed out, their results told in the order of the calls, however they come in.

A run so reads the same however its tools raced.
"""

from __future__ import annotations

from tokenbus.core.run.blocks import ToolCall
from tokenbus.core.run.outbox import Outbox
from tokenbus.core.run.public_blocks import write_result
from tokenbus.core.run.state import PendingCall, RunState
from tokenbus.core.run.tool_verdicts import ToolVerdicts
from tokenbus.events.frames import ResultImage, ToolReported, ToolReturned, ToolWork
from tokenbus.events.public import ImageRef, ToolProgress
from tokenbus.events.requests import Base64Source, BlobSource, ImagePart, Message, TextPart, ToolResultPart


def dispatch_calls(s: RunState, judged: ToolVerdicts | None = None) -> list[ToolWork]:
    """The calls of the turn that are to run: all but malformed ones and those to unlisted tools, which have their
    answer at once. Of a run with policies those that were let through, in what shape they were.

    What was held back has an answer too, for the model alone: nobody else ever heard of the call.
    """
    s.phase = "tools"
    s.tool_turns += 1
    s.calls = []
    for call in s.blocks.calls:
        ruled = judged.take(call) if judged else None
        if judged and ruled is None:
            blocked = ToolReturned(call.block, judged.reason(call), is_error=True)
            s.calls.append(PendingCall(call, blocked, told=True))
        else:
            s.calls.append(PendingCall(call, _refused(s, ruled or call), ruled=ruled))
    timeout_s = s.accepted.tool_timeout_s
    return [
        ToolWork(s.run, s.turn, s.attempt, p.call.block, p.call.tool_id, p.runs.name, p.runs.arguments, timeout_s)
        for p in s.calls
        if p.result is None
    ]


def accept_result(s: RunState, result: ToolReturned) -> None:
    """Put a result to its call. A second one, or one without a call, changes nothing."""
    for pending in s.calls:
        if pending.call.block == result.block and pending.result is None:
            pending.result = result


def publish_progress(s: RunState, out: Outbox, report: ToolReported) -> None:
    """Tell how far a call is that has no result yet. What is said of any other is too late, and dropped."""
    if s.phase != "tools":
        return
    for pending in s.calls:
        if pending.result is None and pending.call.block == report.block:
            out.event(
                s.turn,
                s.attempt,
                ToolProgress,
                block=pending.call.block,
                tool_id=pending.call.tool_id,
                tool_name=pending.runs.name,
                progress=report.progress,
                total=report.total,
                message=report.message,
            )


def publish_results(s: RunState, out: Outbox) -> bool:
    """Tell the results that are due, in the order of the calls. True: that was the last of them."""
    for pending in s.calls:
        if pending.result is None:
            return False
        if not pending.told:
            _publish(s, out, pending.runs, pending.result)
            pending.told = True
    return True


def results_message(s: RunState) -> Message:
    """The results as the next turn reads them."""
    return Message(role="tool", content=[_result_part(p.call, p.result) for p in s.calls if p.result])


def answer_open_calls(s: RunState, out: Outbox, why: str) -> None:
    """Give every call that has no result an error that says why, so that none stays open; those of a turn that is
    still being written have none."""
    calls = s.calls if s.phase == "tools" else [PendingCall(c) for c in [*s.blocks.calls, *s.blocks.cut_calls]]
    for pending in calls:
        if not pending.told:
            _publish(s, out, pending.runs, pending.result or ToolReturned(pending.call.block, why, is_error=True))


def _result_part(call: ToolCall, result: ToolReturned) -> ToolResultPart:
    """A result with the images that the model is to see."""
    images = [ImagePart(source=source) for image in result.images if (source := _source(image))]
    text = [TextPart(text=result.content)] if result.content else []
    content = [*text, *images] if images else result.content
    return ToolResultPart(tool_id=call.tool_id, tool_name=call.name, content=content, is_error=result.is_error)


def _source(image: ResultImage) -> Base64Source | BlobSource | None:
    """How the model gets to see the image; None where it does not."""
    if image.base64:
        return Base64Source(media_type=image.media_type, data=image.base64)
    if image.blob_id and image.size_bytes:
        return BlobSource(blob_id=image.blob_id, media_type=image.media_type, size_bytes=image.size_bytes)
    return None


def _refused(s: RunState, call: ToolCall) -> ToolReturned | None:
    if call.problem:
        return ToolReturned(call.block, call.problem, is_error=True)
    if call.name in s.accepted.tools:
        return None
    return ToolReturned(call.block, f"there is no tool {call.name!r} here", is_error=True)


def _publish(s: RunState, out: Outbox, call: ToolCall, result: ToolReturned) -> None:
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
    """Bytes that lie in a blob are not sent to subscribers as well. Of a blob that the model sees its size is told."""
    return ImageRef(
        media_type=image.media_type,
        blob_id=image.blob_id,
        base64=None if image.blob_id else image.base64 or None,
        size_bytes=image.size_bytes or None,
    )
