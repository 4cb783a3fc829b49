"""Apply a provider's events to the blocks of a run, except the start and the end of an attempt."""

from __future__ import annotations

from tokenbus.core.image_header import decoded_size
from tokenbus.core.prefill.calls import call_id
from tokenbus.core.run.outbox import Outbox
from tokenbus.core.run.provider_extra import keep
from tokenbus.core.run.state import RunState
from tokenbus.events import normalized as n
from tokenbus.events.public import AudioRef, ImageRef
from tokenbus.events.run_messages import CARRIED


def add(s: RunState, out: Outbox, event: n.Normalized, at_ms: int) -> None:
    """Apply one event. Raises TooLarge if a block exceeds its limit."""
    match event:
        case n.TextDelta() | n.RefusalDelta() | n.TranscriptDelta():
            if out.shows(s.blocks.open[event.block].phase):
                _mark_visible(s, at_ms)
            s.blocks.write(event.block, event.text, out)
        case n.ThinkingDelta():
            s.blocks.write(event.block, event.text, out)
        case n.ToolCallDelta():
            if event.fragment:
                _mark_argument(s, event.block)
            s.blocks.write(event.block, event.fragment, out)
        case n.BlockStart():
            s.blocks.start(event.block, event.kind, out, prompt=event.prompt or None, phase=event.phase or None)
        case n.ItemStart():
            tool_id, name = event.tool_id or None, event.tool_name or None
            s.blocks.start(event.block, "server_tool", out, tool_id, name, item=event.item)
        case n.ApprovalAsked():
            s.blocks.ask(event)
        case n.ToolCallStart():
            free = event.free_text or None
            s.blocks.start(event.block, "tool_call", out, _id_of(event, s), event.name, free_text=free)
        case n.BlockStop():
            s.blocks.complete(event.block, out)
        case n.ToolCallDone():
            s.blocks.complete(event.block, out, problem=event.problem)
        case n.ItemProgress():
            s.blocks.report(event.block, event.status, out)
        case n.Opaque():
            keep(s, event)
        case n.Image():
            if not event.final:  # the next attempt would draw, and bill, it once more
                _mark_visible(s, at_ms)
            s.blocks.show(event.block, _ref_of(event), out, final=event.final)
        case n.Audio():
            s.blocks.sound(event.block, _sound_of(event))
        case n.Extra():
            _extra(s, event)
        case n.UsageSeen():
            s.usage = event.usage
        case n.Start() | n.Done() | n.Failed() | n.Cut():
            pass  # the run handles the start and the end of an attempt


def _mark_visible(s: RunState, at_ms: int) -> None:
    if s.accepted.visible:
        if not s.visible_emitted or (s.accepted.on_failure == "before_first_output" and not s.visible_ms):
            s.visible_emitted, s.visible_ms = True, at_ms
        if s.first_visible_ms is None:
            s.first_visible_ms = at_ms - s.accepted_ms


def _mark_argument(s: RunState, ordinal: int) -> None:
    """A piece of a call's arguments is output that a reader may show, if the request says so."""
    if s.accepted.on_failure == "before_first_output" and s.blocks.open[ordinal].kind == "tool_call":
        s.visible_emitted = True


def _id_of(event: n.ToolCallStart, s: RunState) -> str:
    """The provider's id of the call, or a derived one that is unique in the run because block numbers are never
    reused.
    """
    return call_id(s.run, s.blocks.next_number) if event.derived else event.tool_id


def _ref_of(event: n.Image) -> ImageRef:
    return ImageRef(
        media_type=event.media_type,
        blob_id=event.blob_id or None,
        base64=event.base64 or None,
        revised_prompt=event.revised_prompt or None,
        prompt=event.prompt or None,
        model=event.model or None,
        size=event.size or None,
        quality=event.quality or None,
        size_bytes=event.size_bytes or None,
        width=event.width or None,
        height=event.height or None,
        draft=event.draft or None,
    )


def _sound_of(event: n.Audio) -> AudioRef:
    return AudioRef(
        media_type=event.media_type,
        blob_id=event.blob_id or None,
        base64=event.base64 or None,
        size_bytes=event.size_bytes or decoded_size(event.base64) or None,
        audio_id=event.audio_id or None,
        expires_at=event.expires_at or None,
    )


def _extra(s: RunState, event: n.Extra) -> None:
    shown: dict[str, object] = {"name": event.name, "json": event.json}
    if event.name in CARRIED:
        s.carried[event.name] = event.json
    if event.block is None or not s.blocks.note(event.block, shown):
        s.extras.add(shown)
