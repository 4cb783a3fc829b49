"""Decodes Messages API responses, streamed or whole, into normalized events.

providers.md ("Anthropic Messages") describes real streams. Design choices:

- A text block without text is dropped. A thinking block is kept even if empty, because it may hold only a signature.
- Calls and results of server-side tools, and blocks of unknown types, are items: their JSON, to send back in the next
  turn. An input is emitted as it streams.
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

from tokenbus.errors import Malformed
from tokenbus.events import normalized as n
from tokenbus.events.usage import Usage
from tokenbus.providers.anthropic import wire
from tokenbus.providers.anthropic.block_decoder import BlockDecoder
from tokenbus.providers.anthropic.stream_blocks import remaining_of
from tokenbus.providers.response.decoder import check_pieces, finish_of
from tokenbus.providers.response.end_of_stream import cut_before
from tokenbus.providers.response.error_mapping import provider_failure
from tokenbus.providers.response.json_decode import is_null, text_of
from tokenbus.providers.response.sse import SseEvent
from tokenbus.providers.response.unknown_fields import UnknownField, named
from tokenbus.providers.response.usage import count, latest

FINISH: dict[str, n.FinishReason] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_use",
    "refusal": "content_filter",
    "pause_turn": "pause",
    "compaction": "pause",  # the model continues after its compaction, which goes back with the message
}


class AnthropicDecoder(BlockDecoder, kw_only=True):
    """Decodes one Messages API response; see `tokenbus.providers.api.Decoder`."""

    message_id: str | None = None
    """None before `message_start`."""
    stop_reason: str = ""
    stop_sequence: str = ""
    usage: dict[str, object] | None = None

    def _read(self, event: SseEvent, out: list[n.Normalized]) -> n.Terminal | None:
        if event.data.startswith(b"[DONE]"):
            return None
        parsed, unknown = wire.read_event(event.data)
        if unknown:
            self._further(parsed, unknown, out)
        match parsed:
            case wire.BlockDelta():
                self._delta(parsed, out)
            case wire.Ping():
                pass
            case wire.Error() | wire.BareError():
                return n.Failed(provider_failure(parsed.error))
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

    def _closed(self, out: list[n.Normalized]) -> n.Terminal:
        began = self.message_id is not None
        return cut_before("message_stop", began=began, content="message")

    def _further(self, parsed: msgspec.Struct, unknown: list[UnknownField], out: list[n.Normalized]) -> None:
        """Keep fields without a meaning here: of a delta with its block, of other events with the message."""
        block = self.blocks.get(parsed.index) if isinstance(parsed, wire.BlockDelta) else None
        if block:
            self._beside_block(block, named("anthropic", unknown, parsed), out)
        else:
            self._note(named("anthropic", unknown, parsed))

    # --- the message ----------------------------------------------------------------------------------------

    def _begin(self, message: wire.Message, out: list[n.Normalized]) -> None:
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
        self.started = True
        out.append(n.Start(message.model or "", self.message_id, self.next_ordinal))
        self._stopped(message)
        self._count(message.usage, out)
        for index, block in enumerate(message.content or ()):
            self._open(index, bytes(block), out, whole=True)

    def _whole(self, message: wire.WholeMessage, out: list[n.Normalized]) -> n.Terminal:
        """Handle a non-streamed response. At the end of a stream, emit only what was not streamed."""
        check_pieces(len(message.content or ()))  # before each is read
        content, message.content = (
            [(bytes(block), wire.read_block(bytes(block))[0]) for block in message.content or ()],
            None,
        )
        if self.message_id is None:
            self._begin(message, out)
        else:
            self._stopped(message)
            self._count(message.usage, out)
        for index in list(self.blocks):
            self._end_as(index, content, out)
        left = remaining_of([parsed for _, parsed in content], self.emitted)
        for (data, _), rest in zip(content, left, strict=True):
            if rest is not None:
                index = max(self.last_index, *self.blocks, -1) + 1  # a call that the message lacks is still open
                self._open(index, data, out, text=rest)
                self._close_block(index, out)
        return self._finish(out)

    def _end_as(
        self, index: int, content: Sequence[tuple[bytes, wire.Block | wire.Unknown]], out: list[n.Normalized]
    ) -> None:
        """Close a block that is open when the whole message arrives. A call takes its input from the message, matched
        by id and by what was streamed of it; vendors send several calls without an id.
        """
        block = self.blocks[index]
        if block.kind == "tool":
            calls = [
                parsed
                for _, parsed in content
                if isinstance(parsed, wire.ToolUseBlock)
                and parsed.id == block.tool_id
                and (not block.streamed or block.emitted.rest(text_of(parsed.input)) is not None)
            ]
            if not calls:
                return
            if block.streamed and (rest := block.emitted.rest(text_of(calls[0].input))):
                out.append(n.ToolCallDelta(block.ordinal, rest))
            block.prefilled = block.prefilled if is_null(calls[0].input) else text_of(calls[0].input)
        self._close_block(index, out)

    def _message_delta(self, parsed: wire.MessageDelta, out: list[n.Normalized]) -> None:
        self._stopped(parsed.delta)
        if not is_null(parsed.context_management):
            self._note({"anthropic.context_management": text_of(parsed.context_management)})
        self._count(parsed.usage, out)

    def _stopped(self, parsed: wire.Message | wire.StopDelta) -> None:
        self.stop_reason = parsed.stop_reason or self.stop_reason
        self.stop_sequence = parsed.stop_sequence or self.stop_sequence
        for name, value in (("stop_details", parsed.stop_details), ("container", parsed.container)):
            if not is_null(value):
                self._note({f"anthropic.{name}": text_of(value)})
        if isinstance(parsed, wire.Message) and not is_null(parsed.context_management):
            self._note({"anthropic.context_management": text_of(parsed.context_management)})

    def _count(self, usage: dict[str, object] | None, out: list[n.Normalized]) -> None:
        if usage and (raw := latest(self.usage, usage)) != self.usage:
            self.usage = raw
            out.append(n.UsageSeen(usage_of(raw)))

    def _finish(self, out: list[n.Normalized]) -> n.Done:
        for index, block in list(self.blocks.items()):
            # A call or item without a stop event is incomplete; text and thinking are kept as they are.
            if block.whole or block.kind in ("text", "thinking"):
                self._close_block(index, out)
        finish = finish_of(FINISH.get(self.stop_reason, "unknown"), self.calls)
        usage = usage_of(self.usage) if self.usage else None
        return n.Done(finish, self.stop_reason, usage, self.stop_sequence)


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
