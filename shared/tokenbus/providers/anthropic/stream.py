"""The answer of the Messages API, streamed or whole, as normalised events.

What providers.md ("Anthropic Messages") says of real streams holds here. Choices of our own:

- A text block without text is no block. A thinking block is one even when it stays empty, for it may hold only a
  signature.
- A server-run tool's call and result, and every block of an unknown type, is an `Extra` with an ordinal: sent when
  it is complete, as one piece of JSON that the next turn gives back.
- A second, different `message_start` voids the attempt's blocks so far: a second `Start` says so (`void_before`),
  ordinals go on, and what was open stays without its end. The same message announced twice is nothing.
- Content in `message_start`, or in the start of a block, is told at once. The block of its index goes on with it, and
  deltas that begin by saying it again say nothing new. A whole message at the end of a stream is told as far as the
  stream did not.
- `[DONE]` is not of this API and means nothing: without `message_stop` the stream was cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.errors import Malformed, TooLarge
from tokenbus.events.normalized import (
    BlockStart,
    BlockStop,
    Cut,
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
from tokenbus.providers.anthropic.blocks import OpenBlock, ToldBlock, fields_of, further_fields, left_of
from tokenbus.providers.response.decoder import MAX_OPEN_BLOCKS, ResponseDecoder, finish_of
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


class AnthropicDecoder(ResponseDecoder, kw_only=True):
    """One response of the Messages API; see `tokenbus.providers.api.Decoder`."""

    message_id: str | None = None
    """None before `message_start`."""
    blocks: dict[int, OpenBlock] = msgspec.field(default_factory=dict[int, OpenBlock])
    """Open blocks by the provider's index."""
    last_index: int = -1
    last_ordinal: int = -1
    """The block closed last: its citations may come late."""
    told: list[ToldBlock] = msgspec.field(default_factory=list[ToldBlock])
    """The blocks that are complete, in order."""
    next_ordinal: int = 0
    calls: int = 0
    """Tool calls completed."""
    stop_reason: str = ""
    stop_sequence: str = ""
    usage: dict[str, object] | None = None

    def _read(self, event: SseEvent, out: list[Normalized]) -> Terminal | None:
        if event.data.startswith(b"[DONE]"):
            return None
        said = wire.read_event(event.data)
        match said:
            case wire.BlockDelta():
                self._delta(said, out)
            case wire.Ping():
                pass
            case wire.Error() | wire.BareError():
                return Failed(provider_failure(said.error))
            case wire.MessageStart():
                self._begin(said.message, out)
            case wire.WholeMessage():
                return self._whole(said, out)
            case _ if self.message_id is None:
                if not isinstance(said, wire.Unknown):
                    raise Malformed("event", "it came before message_start")
            case wire.BlockStart():
                self._open(said.index, bytes(said.content_block), out)
            case wire.BlockStop():
                self._close_block(said.index, out)
            case wire.MessageDelta():
                self._message_delta(said, out)
            case wire.MessageStop():
                return self._finish(out)
            case wire.OddDelta():
                self._odd_delta(said, out)
            case wire.Unknown():
                self._extra(said.type, event.data.decode(), out)
        return None

    def _closed(self, out: list[Normalized]) -> Terminal:
        began = self.message_id is not None
        return Cut("the stream ended before message_stop" if began else "the body held no message")

    # --- the message ----------------------------------------------------------------------------------------

    def _begin(self, message: wire.Message, out: list[Normalized]) -> None:
        if self.message_id is not None:
            if message.id and message.id == self.message_id:
                return
            self.blocks.clear()
            self.told.clear()
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
        """A response that was not streamed; at the end of a stream, what of it was not told."""
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
        left = left_of([said for _, said in content], self.told)
        for (data, _), rest in zip(content, left, strict=True):
            if rest is not None:
                index = self.last_index + 1
                self._open(index, data, out, text=rest)
                self._close_block(index, out)
        return self._finish(out)

    def _end_as(
        self, index: int, content: Sequence[tuple[bytes, wire.Block | wire.Unknown]], out: list[Normalized]
    ) -> None:
        """A block that is open when the whole message comes: a call is as it is there, by its id."""
        block = self.blocks[index]
        if block.kind == "tool":
            calls = [said for _, said in content if isinstance(said, wire.ToolUseBlock) and said.id == block.tool_id]
            if not calls:
                return
            if block.streamed and (rest := block.told.rest(text_of(calls[0].input))):
                out.append(ToolCallDelta(block.ordinal, rest))
            block.prefilled = block.prefilled if is_null(calls[0].input) else text_of(calls[0].input)
        self._close_block(index, out)

    def _message_delta(self, said: wire.MessageDelta, out: list[Normalized]) -> None:
        self._stopped(said.delta, out)
        if not is_null(said.context_management):
            self._extra("context_management", text_of(said.context_management), out)
        self._count(said.usage, out)

    def _stopped(self, said: wire.Message | wire.StopDelta, out: list[Normalized]) -> None:
        self.stop_reason = said.stop_reason or self.stop_reason
        self.stop_sequence = said.stop_sequence or self.stop_sequence
        for name, value in (("stop_details", said.stop_details), ("container", said.container)):
            if not is_null(value):
                self._extra(name, text_of(value), out)

    def _count(self, usage: dict[str, object] | None, out: list[Normalized]) -> None:
        if usage and (raw := latest(self.usage, usage)) != self.usage:
            self.usage = raw
            out.append(UsageSeen(usage_of(raw)))

    def _finish(self, out: list[Normalized]) -> Done:
        for index, block in list(self.blocks.items()):
            # A call or item whose stop is missing was not completed; text and thinking are what they are.
            if block.whole or block.kind in ("text", "thinking"):
                self._close_block(index, out)
        finish = finish_of(FINISH.get(self.stop_reason, "unknown"), self.calls)
        usage = usage_of(self.usage) if self.usage else None
        return Done(finish, self.stop_reason, usage, self.stop_sequence)

    # --- blocks ---------------------------------------------------------------------------------------------

    def _open(
        self, index: int, data: bytes, out: list[Normalized], *, whole: bool = False, text: str | None = None
    ) -> None:
        """A block begins; with ``text`` its text, where that is not all that it says."""
        said = wire.read_block(data)
        if not whole and self._goes_on(index, said, out):
            return
        if index in self.blocks:
            raise Malformed("content_block_start", f"index {index} is open already")
        if len(self.blocks) >= MAX_OPEN_BLOCKS:
            raise TooLarge("open blocks", len(self.blocks) + 1, MAX_OPEN_BLOCKS, unit="blocks")
        if isinstance(said, wire.TextBlock):
            self.blocks[index] = block = OpenBlock("text", whole=whole)
            self._begin_with(block, said.text or "" if text is None else text, out)
            for citation in said.citations or []:
                self._cite(block, citation, out)
            return
        ordinal = self._take_ordinal()
        match said:
            case wire.ThinkingBlock():
                self.blocks[index] = block = OpenBlock("thinking", ordinal, whole)
                out.append(BlockStart(ordinal, "thinking"))
                self._begin_with(block, said.thinking or "" if text is None else text, out)
                if said.signature:
                    out.append(Opaque(ordinal, "signature", said.signature))
            case wire.RedactedBlock():
                self.blocks[index] = OpenBlock("thinking", ordinal, whole)
                out.append(BlockStart(ordinal, "thinking"))
                out.append(Opaque(ordinal, "redacted", said.data))
            case wire.ToolUseBlock():
                if not said.name:
                    raise Malformed("content_block_start", "a tool_use without a name")
                prefilled = "" if is_null(said.input) else text_of(said.input)
                self.blocks[index] = OpenBlock("tool", ordinal, whole, said.id, prefilled=prefilled)
                out.append(ToolCallStart(ordinal, said.id or f"call_{ordinal}", said.name, derived=not said.id))
                if fields := further_fields(data):
                    out.append(Opaque(ordinal, "fields", fields))
            case wire.Unknown():
                self.blocks[index] = block = OpenBlock("item", ordinal, whole, name=said.type, item=data.decode())
                self._hold_for(block, len(data))

    def _goes_on(self, index: int, said: wire.Block | wire.Unknown, out: list[Normalized]) -> bool:
        """Whether a block that begins is one of `message_start`'s; those before it are complete."""
        for before in [at for at, block in self.blocks.items() if block.whole and at < index]:
            self._close_block(before, out)
        block = self.blocks.get(index)
        if block is None or not block.whole:
            return False
        block.whole = False
        match said:
            case wire.TextBlock() if block.kind == "text":
                self._begin_again(block, said.text or "", out)
            case wire.ThinkingBlock() if block.kind == "thinking":
                self._begin_again(block, said.thinking or "", out)
                if said.signature:
                    out.append(Opaque(block.ordinal, "signature", said.signature))
            case wire.RedactedBlock() if block.kind == "thinking":
                pass
            case wire.ToolUseBlock() if block.kind == "tool" and block.tool_id == said.id:
                pass
            case wire.Unknown() if block.kind == "item" and block.name == said.type:
                pass
            case _:
                self._close_block(index, out)
                return False
        return True

    def _begin_with(self, block: OpenBlock, text: str, out: list[Normalized]) -> None:
        """What a block's start has of its text."""
        self._text(block, text, out)
        block.begun = text
        self._hold_for(block, len(text))

    def _begin_again(self, block: OpenBlock, text: str, out: list[Normalized]) -> None:
        """The same once more, or more of it."""
        if new := block.told.rest(text):
            self._text(block, new, out)
            self._hold_for(block, len(new))
            block.begun = text

    def _delta(self, said: wire.BlockDelta, out: list[Normalized]) -> None:
        delta = said.delta
        block = self.blocks.get(said.index)
        if block is None:
            if isinstance(delta, wire.CitationsDelta) and said.index == self.last_index:
                return self._extra("citation", text_of(delta.citation), out, self.last_ordinal)
            raise Malformed("content_block_delta", f"index {said.index} is not open")
        match delta:
            case wire.TextDelta() if block.kind == "text":
                self._text(block, block.new_of(delta.text), out)
            case wire.ThinkingDelta() if block.kind == "thinking":
                self._text(block, block.new_of(delta.thinking), out)
            case wire.InputDelta() if block.kind == "tool":
                if delta.partial_json:
                    block.streamed = True
                    block.told.add(delta.partial_json)
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

    def _odd_delta(self, said: wire.OddDelta, out: list[Normalized]) -> None:
        """A delta of no known type. One named after its block's type (compaction) brings the block's fields."""
        block = self.blocks.get(said.index)
        fields = fields_of(bytes(said.delta))
        name = tag_of(bytes(said.delta))
        if block and block.kind == "item" and name == f"{block.name}_delta":
            for field, value in fields.items():
                if field != "type" and not is_null(value):
                    self._hold_for(block, len(bytes(value)))
                    block.fields[field] = text_of(value)
        else:
            self._extra(name, text_of(said.delta), out, block.shown if block else -1)

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
        self.told.append(ToldBlock(block.kind, block.tool_id, block.told))
        self.last_index, self.last_ordinal = index, block.shown

    def _text(self, block: OpenBlock, text: str, out: list[Normalized]) -> None:
        if text:
            self._appear(block, out)
            block.told.add(text)
            delta = TextDelta if block.kind == "text" else ThinkingDelta
            out.append(delta(block.ordinal, text))

    def _cite(self, block: OpenBlock, citation: msgspec.Raw, out: list[Normalized]) -> None:
        """A citation is shown at once; it goes back with its block."""
        json = text_of(citation)
        self._hold_for(block, len(json))
        block.pieces.append(json)
        self._appear(block, out)
        self._extra("citation", json, out, block.ordinal)

    def _appear(self, block: OpenBlock, out: list[Normalized]) -> None:
        """A text block becomes one with its first content."""
        if block.ordinal < 0:
            block.ordinal = self._take_ordinal()
            out.append(BlockStart(block.ordinal, "text"))

    def _hold_for(self, block: OpenBlock, size: int) -> None:
        size += 64  # what a small piece costs in memory
        block.held += size
        self._hold(size)

    def _take_ordinal(self) -> int:
        self.next_ordinal += 1
        return self.next_ordinal - 1

    def _extra(self, name: str, json: str, out: list[Normalized], ordinal: int = -1) -> None:
        out.append(Extra(f"anthropic.{name}", json, ordinal if ordinal >= 0 else None))


def usage_of(raw: dict[str, object]) -> Usage:
    """The API's counts. `input` is without the caches, as the API has it."""
    return Usage(
        input=count(raw, "input_tokens"),
        output=count(raw, "output_tokens"),
        reasoning=count(raw, "output_tokens_details", "thinking_tokens"),
        cache_read=count(raw, "cache_read_input_tokens"),
        cache_write=count(raw, "cache_creation_input_tokens"),
        raw=raw,
    )
