"""Decodes Messages API responses, streamed or whole, into normalized events.

providers.md ("Anthropic Messages") describes real streams. Design choices:

- A text block without text is dropped. A thinking block is kept even if empty, because it may hold only a signature.
- Calls and results of server-side tools, and blocks of unknown types, become an `Extra` with an ordinal. It is emitted
  when complete, as one piece of JSON to send back in the next turn.
- A second, different `message_start` voids the attempt's blocks so far: a second `Start` reports it (`void_before`),
  ordinals continue, and open blocks are never closed. A repeated announcement of the same message is ignored.
- Content in `message_start` or in a block's start is emitted at once. The block with that index continues it; deltas
  that begin by repeating it add nothing. For a whole message at the end of a stream, only the parts not yet streamed
  are emitted.
- `[DONE]` is not part of this API and is ignored: without `message_stop` the stream was cut off.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.errors import Malformed, TooLarge
from tokenbus.events.normalized import (
    BlockStart,
    BlockStop,
    Done,
    Extra,
    Failed,
    FinishReason,
    Normalized,
    Opaque,
    Start,
    Terminal,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallDone,
    ToolCallStart,
    UsageSeen,
)
from tokenbus.events.usage import Usage
from tokenbus.providers.anthropic import wire
from tokenbus.providers.anthropic.stream_blocks import EmittedBlock, OpenBlock, fields_of, further_fields, remaining_of
from tokenbus.providers.response.decoder import MAX_OPEN_BLOCKS, ResponseDecoder, finish_of
from tokenbus.providers.response.end_of_stream import cut_before
from tokenbus.providers.response.error_mapping import provider_failure
from tokenbus.providers.response.json_decode import is_null, tag_of, text_of
from tokenbus.providers.response.sse import SseEvent
from tokenbus.providers.response.usage import count, latest

FINISH: dict[str, FinishReason] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_use",
    "refusal": "content_filter",
    "pause_turn": "pause",
}


class AnthropicDecoder(ResponseDecoder, kw_only=True, rename={"emitted": "told"}):
    """Decodes one Messages API response; see `tokenbus.providers.api.Decoder`."""

    message_id: str | None = None
    """None before `message_start`."""
    blocks: dict[int, OpenBlock] = msgspec.field(default_factory=dict[int, OpenBlock])
    """Open blocks by the provider's index."""
    last_index: int = -1
    last_ordinal: int = -1
    """The last closed block; its citations may arrive late."""
    emitted: list[EmittedBlock] = msgspec.field(default_factory=list[EmittedBlock])
    """Completed blocks, in order."""
    next_ordinal: int = 0
    calls: int = 0
    """Number of completed tool calls."""
    stop_reason: str = ""
    stop_sequence: str = ""
    usage: dict[str, object] | None = None

    def _read(self, event: SseEvent, out: list[Normalized]) -> Terminal | None:
        if event.data.startswith(b"[DONE]"):
            return None
        parsed = wire.read_event(event.data)
        match parsed:
            case wire.BlockDelta():
                self._delta(parsed, out)
            case wire.Ping():
                pass
            case wire.Error() | wire.BareError():
                return Failed(provider_failure(parsed.error))
            case wire.MessageStart():
                self._begin(parsed.message, out)
            case wire.WholeMessage():
                return self._whole(parsed, out)
            case _ if self.message_id is None:
                if not isinstance(parsed, wire.Unknown):
                    raise Malformed("event", "received before message_start")
            case wire.BlockStart():
                self._open(parsed.index, bytes(parsed.content_block), out)
            case wire.BlockStop():
                self._close_block(parsed.index, out)
            case wire.MessageDelta():
                self._message_delta(parsed, out)
            case wire.MessageStop():
                return self._finish(out)
            case wire.UnknownDelta():
                self._unknown_delta(parsed, out)
            case wire.Unknown():
                self._extra(parsed.type, event.data.decode(), out)
        return None

    def _closed(self, out: list[Normalized]) -> Terminal:
        began = self.message_id is not None
        return cut_before("message_stop", began=began, content="message")

    # --- the message ----------------------------------------------------------------------------------------

    def _begin(self, message: wire.Message, out: list[Normalized]) -> None:
        if self.message_id is not None:
            if message.id and message.id == self.message_id:
                return
            self.blocks.clear()
            self.emitted.clear()
            self.usage = None
            self.last_index = -1
            self.calls = self.held = 0
            self.stop_reason = self.stop_sequence = ""
        self.message_id = message.id or ""
        out.append(Start(message.model or "", self.message_id, self.next_ordinal))
        self._stopped(message, out)
        self._count(message.usage, out)
        for index, block in enumerate(message.content or ()):
            self._open(index, bytes(block), out, whole=True)

    def _whole(self, message: wire.WholeMessage, out: list[Normalized]) -> Terminal:
        """Handle a non-streamed response. At the end of a stream, emit only what was not streamed."""
        content, message.content = (
            [(bytes(block), wire.read_block(bytes(block))) for block in message.content or ()],
            None,
        )
        if self.message_id is None:
            self._begin(message, out)
        else:
            self._stopped(message, out)
            self._count(message.usage, out)
        for index in list(self.blocks):
            self._end_as(index, content, out)
        left = remaining_of([parsed for _, parsed in content], self.emitted)
        for (data, _), rest in zip(content, left, strict=True):
            if rest is not None:
                index = self.last_index + 1
                self._open(index, data, out, text=rest)
                self._close_block(index, out)
        return self._finish(out)

    def _end_as(
        self, index: int, content: Sequence[tuple[bytes, wire.Block | wire.Unknown]], out: list[Normalized]
    ) -> None:
        """Close a block that is open when the whole message arrives. A call takes its input from the message, matched
        by id.
        """
        block = self.blocks[index]
        if block.kind == "tool":
            calls = [
                parsed for _, parsed in content if isinstance(parsed, wire.ToolUseBlock) and parsed.id == block.tool_id
            ]
            if not calls:
                return
            if block.streamed and (rest := block.emitted.rest(text_of(calls[0].input))):
                out.append(ToolCallDelta(block.ordinal, rest))
            block.prefilled = block.prefilled if is_null(calls[0].input) else text_of(calls[0].input)
        self._close_block(index, out)

    def _message_delta(self, parsed: wire.MessageDelta, out: list[Normalized]) -> None:
        self._stopped(parsed.delta, out)
        if not is_null(parsed.context_management):
            self._extra("context_management", text_of(parsed.context_management), out)
        self._count(parsed.usage, out)

    def _stopped(self, parsed: wire.Message | wire.StopDelta, out: list[Normalized]) -> None:
        self.stop_reason = parsed.stop_reason or self.stop_reason
        self.stop_sequence = parsed.stop_sequence or self.stop_sequence
        for name, value in (("stop_details", parsed.stop_details), ("container", parsed.container)):
            if not is_null(value):
                self._extra(name, text_of(value), out)

    def _count(self, usage: dict[str, object] | None, out: list[Normalized]) -> None:
        if usage and (raw := latest(self.usage, usage)) != self.usage:
            self.usage = raw
            out.append(UsageSeen(usage_of(raw)))

    def _finish(self, out: list[Normalized]) -> Done:
        for index, block in list(self.blocks.items()):
            # A call or item without a stop event is incomplete; text and thinking are kept as they are.
            if block.whole or block.kind in ("text", "thinking"):
                self._close_block(index, out)
        finish = finish_of(FINISH.get(self.stop_reason, "unknown"), self.calls)
        usage = usage_of(self.usage) if self.usage else None
        return Done(finish, self.stop_reason, usage, self.stop_sequence)

    # --- blocks ---------------------------------------------------------------------------------------------

    def _open(
        self, index: int, data: bytes, out: list[Normalized], *, whole: bool = False, text: str | None = None
    ) -> None:
        """Start a block. ``text`` overrides the block's text if part of it was already emitted."""
        parsed = wire.read_block(data)
        if not whole and self._continues_block(index, parsed, out):
            return
        if index in self.blocks:
            raise Malformed("content_block_start", f"index {index} is already open")
        if len(self.blocks) >= MAX_OPEN_BLOCKS:
            raise TooLarge("open blocks", len(self.blocks) + 1, MAX_OPEN_BLOCKS, unit="blocks")
        if isinstance(parsed, wire.TextBlock):
            self.blocks[index] = block = OpenBlock("text", whole=whole)
            self._begin_with(block, parsed.text or "" if text is None else text, out)
            for citation in parsed.citations or []:
                self._cite(block, citation, out)
            return
        ordinal = self._take_ordinal()
        match parsed:
            case wire.ThinkingBlock():
                self.blocks[index] = block = OpenBlock("thinking", ordinal, whole)
                out.append(BlockStart(ordinal, "thinking"))
                self._begin_with(block, parsed.thinking or "" if text is None else text, out)
                if parsed.signature:
                    out.append(Opaque(ordinal, "signature", parsed.signature))
            case wire.RedactedBlock():
                self.blocks[index] = OpenBlock("thinking", ordinal, whole)
                out.append(BlockStart(ordinal, "thinking"))
                out.append(Opaque(ordinal, "redacted", parsed.data))
            case wire.ToolUseBlock():
                if not parsed.name:
                    raise Malformed("content_block_start", "tool_use has no name")
                prefilled = "" if is_null(parsed.input) else text_of(parsed.input)
                self.blocks[index] = OpenBlock("tool", ordinal, whole, parsed.id, prefilled=prefilled)
                out.append(ToolCallStart(ordinal, parsed.id or f"call_{ordinal}", parsed.name, derived=not parsed.id))
                if fields := further_fields(data):
                    out.append(Opaque(ordinal, "fields", fields))
            case wire.Unknown():
                self.blocks[index] = block = OpenBlock("item", ordinal, whole, name=parsed.type, item=data.decode())
                self._hold_for(block, len(data))

    def _continues_block(self, index: int, parsed: wire.Block | wire.Unknown, out: list[Normalized]) -> bool:
        """Whether this start belongs to a block from `message_start`. Earlier such blocks are complete and get
        closed.
        """
        for before in [at for at, block in self.blocks.items() if block.whole and at < index]:
            self._close_block(before, out)
        block = self.blocks.get(index)
        if block is None or not block.whole:
            return False
        block.whole = False
        match parsed:
            case wire.TextBlock() if block.kind == "text":
                self._repeat_start(block, parsed.text or "", out)
            case wire.ThinkingBlock() if block.kind == "thinking":
                self._repeat_start(block, parsed.thinking or "", out)
                if parsed.signature:
                    out.append(Opaque(block.ordinal, "signature", parsed.signature))
            case wire.RedactedBlock() if block.kind == "thinking":
                pass
            case wire.ToolUseBlock() if block.kind == "tool" and block.tool_id == parsed.id:
                pass
            case wire.Unknown() if block.kind == "item" and block.name == parsed.type:
                pass
            case _:
                self._close_block(index, out)
                return False
        return True

    def _begin_with(self, block: OpenBlock, text: str, out: list[Normalized]) -> None:
        """Emit the text in a block's start."""
        self._text(block, text, out)
        block.begun = text
        self._hold_for(block, len(text))

    def _repeat_start(self, block: OpenBlock, text: str, out: list[Normalized]) -> None:
        """Handle a second start of the same block, which may have more text."""
        if new := block.emitted.rest(text):
            self._text(block, new, out)
            self._hold_for(block, len(new))
            block.begun = text

    def _delta(self, parsed: wire.BlockDelta, out: list[Normalized]) -> None:
        delta = parsed.delta
        block = self.blocks.get(parsed.index)
        if block is None:
            if isinstance(delta, wire.CitationsDelta) and parsed.index == self.last_index:
                return self._extra("citation", text_of(delta.citation), out, self.last_ordinal)
            raise Malformed("content_block_delta", f"index {parsed.index} is not open")
        match delta:
            case wire.TextDelta() if block.kind == "text":
                self._text(block, block.new_part(delta.text), out)
            case wire.ThinkingDelta() if block.kind == "thinking":
                self._text(block, block.new_part(delta.thinking), out)
            case wire.InputDelta() if block.kind == "tool":
                if delta.partial_json:
                    block.streamed = True
                    block.emitted.add(delta.partial_json)
                    out.append(ToolCallDelta(block.ordinal, delta.partial_json))
            case wire.InputDelta() if block.kind == "item":
                self._hold_for(block, len(delta.partial_json))
                block.pieces.append(delta.partial_json)
            case wire.SignatureDelta() if block.kind == "thinking":
                out.append(Opaque(block.ordinal, "signature", delta.signature))
            case wire.CitationsDelta() if block.kind == "text":
                self._cite(block, delta.citation, out)
            case _:
                self._extra(str(delta.__struct_config__.tag), msgspec.json.encode(delta).decode(), out, block.shown)
        return None

    def _unknown_delta(self, parsed: wire.UnknownDelta, out: list[Normalized]) -> None:
        """Handle a delta of unknown type. One named after its block's type (compaction) carries fields of the block."""
        block = self.blocks.get(parsed.index)
        fields = fields_of(bytes(parsed.delta))
        name = tag_of(bytes(parsed.delta))
        if block and block.kind == "item" and name == f"{block.name}_delta":
            for field, value in fields.items():
                if field != "type" and not is_null(value):
                    self._hold_for(block, len(bytes(value)))
                    block.fields[field] = text_of(value)
        else:
            self._extra(name, text_of(parsed.delta), out, block.shown if block else -1)

    def _close_block(self, index: int, out: list[Normalized]) -> None:
        block = self.blocks.pop(index, None)
        if block is None:
            return
        self._text(block, block.again, out)
        match block.kind:
            case "tool":
                if block.prefilled and not block.streamed:
                    out.append(ToolCallDelta(block.ordinal, block.prefilled))
                out.append(ToolCallDone(block.ordinal))
                self.calls += 1
            case "item":
                out.append(Extra(f"anthropic.{block.name}", block.completed(), ordinal=block.ordinal))
            case "text" | "thinking":
                if block.pieces:
                    out.append(Opaque(block.ordinal, "citations", f"[{','.join(block.pieces)}]"))
                if block.ordinal >= 0:
                    out.append(BlockStop(block.ordinal))
        self._hold(96 - block.held)
        self.emitted.append(EmittedBlock(block.kind, block.tool_id, block.emitted))
        self.last_index, self.last_ordinal = index, block.shown

    def _text(self, block: OpenBlock, text: str, out: list[Normalized]) -> None:
        if text:
            self._open_text(block, out)
            block.emitted.add(text)
            delta = TextDelta if block.kind == "text" else ThinkingDelta
            out.append(delta(block.ordinal, text))

    def _cite(self, block: OpenBlock, citation: msgspec.Raw, out: list[Normalized]) -> None:
        """Emit a citation at once, and keep it to send back with its block."""
        json = text_of(citation)
        self._hold_for(block, len(json))
        block.pieces.append(json)
        self._open_text(block, out)
        self._extra("citation", json, out, block.ordinal)

    def _open_text(self, block: OpenBlock, out: list[Normalized]) -> None:
        """Emit the start of a text block with its first content."""
        if block.ordinal < 0:
            block.ordinal = self._take_ordinal()
            out.append(BlockStart(block.ordinal, "text"))

    def _hold_for(self, block: OpenBlock, size: int) -> None:
        size += 64  # approximate memory overhead of a small piece
        block.held += size
        self._hold(size)

    def _take_ordinal(self) -> int:
        self.next_ordinal += 1
        return self.next_ordinal - 1

    def _extra(self, name: str, json: str, out: list[Normalized], ordinal: int = -1) -> None:
        out.append(Extra(f"anthropic.{name}", json, ordinal if ordinal >= 0 else None))


def usage_of(raw: dict[str, object]) -> Usage:
    """The API's token counts. As in the API, `input` excludes cached tokens."""
    return Usage(
        input=count(raw, "input_tokens"),
        output=count(raw, "output_tokens"),
        reasoning=count(raw, "output_tokens_details", "thinking_tokens"),
        cache_read=count(raw, "cache_read_input_tokens"),
        cache_write=count(raw, "cache_creation_input_tokens"),
        raw=raw,
    )
