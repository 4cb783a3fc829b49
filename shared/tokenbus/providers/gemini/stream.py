"""Decodes streamGenerateContent responses, streamed or whole, into normalized events.

providers.md ("Gemini streamGenerateContent") describes real streams. Design choices:

- The end of the body ends the response if a finish reason or a block reason came: the API has no other terminal event.
  A finish reason may come more than once; the last one counts.
- Text and thinking alternate: one ends when the other, or anything else, begins.
- A call's arguments arrive as an object. The raw argument string is its JSON without whitespace, so that streamed and
  whole responses agree.
- A repeated call (same id and arguments as a complete one) is emitted once, and so are repeated images and other media.
- A call without an id gets ``call_<ordinal>``. Only ids from the provider are sent back to it (`item_id`).
- A signature belongs to the part it came with. On an empty text or alone, it belongs to the open text or thinking. If
  nothing is open, or the open block is already signed, the part is kept as an item to send back in place.
- A part of unknown type (code that the provider runs, its own tools) is an item, and so is media other than images and
  audio. Pieces of audio of one type are one block.
  An image inside a thought is a draft.
- Only candidate 0 is the answer; others become `Extra`.
"""

from __future__ import annotations

from zlib import crc32

import msgspec

from tokenbus.errors import Malformed
from tokenbus.events import normalized as n
from tokenbus.events.usage import Usage
from tokenbus.providers.gemini import wire
from tokenbus.providers.gemini.partial_args import ArgsWriter
from tokenbus.providers.response import sound
from tokenbus.providers.response.decoder import ResponseDecoder, finish_of
from tokenbus.providers.response.end_of_stream import cut_before
from tokenbus.providers.response.error_mapping import provider_failure
from tokenbus.providers.response.json_decode import compact, is_null, read, text_of
from tokenbus.providers.response.repeats import EmittedText
from tokenbus.providers.response.sse import SseEvent
from tokenbus.providers.response.unknown_fields import UnknownField, has_value, named, read_known
from tokenbus.providers.response.usage import count, latest

FINISH: dict[str, n.FinishReason] = {
    "STOP": "stop",
    "MAX_TOKENS": "length",
    "SAFETY": "content_filter",
    "RECITATION": "content_filter",
    "BLOCKLIST": "content_filter",
    "PROHIBITED_CONTENT": "content_filter",
    "SPII": "content_filter",
    "MODEL_ARMOR": "content_filter",
    "IMAGE_SAFETY": "content_filter",
    "IMAGE_PROHIBITED_CONTENT": "content_filter",
    "IMAGE_RECITATION": "content_filter",
    "MALFORMED_FUNCTION_CALL": "error",
    "UNEXPECTED_TOOL_CALL": "error",
}
_NOTHING_COUNTED = (b"", b"null", b"{}")
_TOOLS = {
    "executableCode": "code_execution",
    "codeExecutionResult": "code_execution",
    "toolCall": "",
    "toolResponse": "",
}
"""Parts of tools that the provider runs: the tool's name, unless the part has it."""
_OF_A_THOUGHT = frozenset({"thought", "thoughtSignature"})


class StreamedCall(msgspec.Struct):
    """A call whose arguments arrive in pieces."""

    ordinal: int
    name: str
    id: str
    """The provider's id; empty if none."""
    writer: ArgsWriter = msgspec.field(default_factory=ArgsWriter)
    emitted: EmittedText = msgspec.field(default_factory=EmittedText)
    """Its arguments emitted so far."""


class GeminiDecoder(ResponseDecoder, kw_only=True):
    """Decodes one response of generateContent or streamGenerateContent; see `tokenbus.providers.api.Decoder`."""

    open_kind: n.OpenKind | None = None
    open_ordinal: int = -1
    """Ordinal of the open text or thinking block."""
    open_signed: bool = False
    sound: list[str] = msgspec.field(default_factory=list[str])
    """The sound of the open audio block, in pieces of base64."""
    sound_type: str = ""
    call: StreamedCall | None = None
    calls: int = 0
    """Number of completed tool calls."""
    emitted_calls: dict[str, StreamedCall] = msgspec.field(default_factory=dict[str, StreamedCall])
    """Completed calls by the provider's id."""
    emitted_media: set[int] = msgspec.field(default_factory=set[int])
    """Fingerprints of emitted media."""
    finish: str = ""
    block_reason: str = ""
    """Why the prompt was blocked."""
    usage: dict[str, object] | None = None
    usage_reported: bytes = b""
    """The latest raw usage: most chunks repeat it."""

    def _read(self, event: SseEvent, out: list[n.Normalized]) -> n.Terminal | None:
        data = event.data
        if data.startswith(b"[DONE]"):
            return None
        chunk, unknown = read_known(wire.chunk, wire.Chunk, data, "chunk")
        if chunk.error:
            return n.Failed(provider_failure(read(wire.anything, data, "chunk")))
        counted = bytes(chunk.usage_metadata) not in _NOTHING_COUNTED
        known = chunk.candidates is not msgspec.UNSET or counted or chunk.prompt_feedback
        if not self.started and (known or chunk.model_version):
            self.started = True
            out.append(n.Start(chunk.model_version or "", chunk.response_id or ""))
        for place, candidate in enumerate(chunk.candidates or ()):
            if candidate.index:
                self._extra("candidate", text_of(wire.candidate_in(data, place)), out)
            else:
                further = (
                    [field for field in unknown if field.path[:2] == ("candidates", place)] if unknown else unknown
                )
                self._candidate(candidate, data, place, further, out)
        if chunk.prompt_feedback:
            self.block_reason = chunk.prompt_feedback.block_reason or self.block_reason
            feedback = read(wire.raw_chunk, data, "chunk").prompt_feedback
            if has_value(feedback):
                self._note({"gemini.promptFeedback": text_of(feedback)})
        if unknown and known:
            self._note(named("gemini", (field for field in unknown if field.path[0] != "candidates")))
        if counted and (parsed := bytes(chunk.usage_metadata)) != self.usage_reported:
            self._count(parsed, out)
        if self.started and not known:
            self._extra("chunk", data.decode(), out)
        return None

    def _closed(self, out: list[n.Normalized]) -> n.Terminal:
        if not (self.finish or self.block_reason):  # open blocks stay open: they are incomplete
            return cut_before("finishReason", began=self.started, content="answer")
        self._close_open_block(out)
        usage = usage_of(self.usage) if self.usage else None
        if self.finish:
            return n.Done(finish_of(FINISH.get(self.finish, "unknown"), self.calls), self.finish, usage)
        return n.Done("content_filter", self.block_reason, usage)

    def _candidate(
        self, candidate: wire.Candidate, data: bytes, place: int, unknown: list[UnknownField], out: list[n.Normalized]
    ) -> None:
        for i, part in enumerate((candidate.content and candidate.content.parts) or ()):
            if not self._part(part, out):
                self._other_part(wire.part_in(data, place, i), part.thought_signature, out)
            elif unknown:
                own = named("gemini", (field for field in unknown if field.path[2:5] == ("content", "parts", i)))
                self._beside(own, self.open_ordinal if self.open_kind else None, out)
        if unknown:
            self._note(named("gemini", (field for field in unknown if field.path[2:4] != ("content", "parts"))))
        if candidate.logprobs_result is not wire.NOTHING and not is_null(candidate.logprobs_result):
            block = self.open_ordinal if self.open_kind else None
            self._extra("logprobsResult", text_of(candidate.logprobs_result), out, block)
        if not (
            candidate.grounding_metadata
            is candidate.citation_metadata
            is candidate.url_context_metadata
            is wire.NOTHING
        ):
            self._metadata(candidate, out)
        if candidate.finish_reason:
            self.finish = candidate.finish_reason
            if candidate.finish_message:
                self._extra("finishMessage", msgspec.json.encode(candidate.finish_message).decode(), out)
        for name, value in (
            ("safetyRatings", candidate.safety_ratings),
            ("avgLogprobs", candidate.avg_logprobs),
            ("tokenCount", candidate.token_count),
        ):
            if value is not wire.NOTHING and has_value(value):
                self._note({f"gemini.{name}": text_of(value)})

    def _metadata(self, candidate: wire.Candidate, out: list[n.Normalized]) -> None:
        block = self.open_ordinal if self.open_kind else None
        for name, value in (
            ("groundingMetadata", candidate.grounding_metadata),
            ("citationMetadata", candidate.citation_metadata),
            ("urlContextMetadata", candidate.url_context_metadata),
        ):
            if not is_null(value):
                self._extra(name, text_of(value), out, block)

    def _count(self, parsed: bytes, out: list[n.Normalized]) -> None:
        if (raw := latest(self.usage, read(wire.usage, parsed, "usageMetadata"))) != self.usage:
            self.usage = raw
            out.append(n.UsageSeen(usage_of(raw)))
        self.usage_reported = parsed

    # --- parts ------------------------------------------------------------------------------------------------

    def _part(self, part: wire.Part, out: list[n.Normalized]) -> bool:
        """Emit a part that is a block or a piece of one. Return False if it is neither."""
        signature = part.thought_signature
        if part.function_call is not None:
            self._call(part.function_call, signature, out)
            return True
        if part.inline_data is not None:
            return self._image(part.inline_data, part, out)
        if part.text is None:
            return False
        kind = "thinking" if part.thought else "text"
        if part.text:
            if self.open_kind != kind or (signature and self.open_signed):
                self._close_open_block(out)
                self.open_kind, self.open_ordinal = kind, self._take_ordinal()
                out.append(n.BlockStart(self.open_ordinal, kind))
            delta = n.TextDelta if kind == "text" else n.ThinkingDelta
            out.append(delta(self.open_ordinal, part.text))
        return not signature or self._sign(signature, kind, out)

    def _sign(self, signature: str, kind: n.OpenKind | None, out: list[n.Normalized]) -> bool:
        """Attach a signature to the open block. Return False if it does not belong there."""
        if not self.open_kind or self.open_kind != kind or self.open_signed:
            return False
        self.open_signed = True
        out.append(n.Opaque(self.open_ordinal, "thought_signature", signature))
        return True

    def _image(self, blob: wire.Blob, part: wire.Part, out: list[n.Normalized]) -> bool:
        if blob.mime_type.startswith("audio/") and not part.thought_signature:
            return self._sound(blob, out)
        mark = crc32(f"{bool(part.thought)} {blob.mime_type} {blob.data}".encode())
        if mark in self.emitted_media:
            return True
        self._hold(16)
        self.emitted_media.add(mark)
        if not blob.mime_type.startswith("image/"):
            return False
        self._close_open_block(out)
        ordinal = self._take_ordinal()
        out.append(n.BlockStart(ordinal, "image"))
        out.append(n.Image(ordinal, blob.mime_type, blob.data, final=True, draft=bool(part.thought)))
        if part.thought_signature:
            out.append(n.Opaque(ordinal, "thought_signature", part.thought_signature))
        out.append(n.BlockStop(ordinal))
        return True

    def _sound(self, blob: wire.Blob, out: list[n.Normalized]) -> bool:
        """Collect a piece of the spoken answer. Equal pieces are no repetition: silence has many."""
        if self.open_kind != "audio" or self.sound_type != blob.mime_type:
            self._close_open_block(out)
            self.open_kind, self.open_ordinal, self.sound_type = "audio", self._take_ordinal(), blob.mime_type
            out.append(n.BlockStart(self.open_ordinal, "audio"))
        self._hold(len(blob.data) + 64)
        self.sound.append(blob.data)
        return True

    def _other_part(self, raw: msgspec.Raw, signature: str | None, out: list[n.Normalized]) -> None:
        """Keep a part verbatim to send back in place. A lone signature goes to the open block if that has none."""
        fields = read(wire.fields, bytes(raw), "part")
        names = [name for name in fields if name not in _OF_A_THOUGHT]
        alone = not names or names == ["text"]
        if alone and (not signature or (not names and self._sign(signature, self.open_kind, out))):
            return
        self._close_open_block(out)
        name = "thoughtSignature" if alone else names[0]
        ordinal = self._take_ordinal()
        tool = read(wire.tool, bytes(fields[name]), name) if name in _TOOLS else None
        tool_name = (tool and tool.tool_type and tool.tool_type.lower()) or _TOOLS.get(name, "")
        out += [
            n.ItemStart(ordinal, f"gemini.{name}", tool_name, (tool and tool.id) or ""),
            n.ToolCallDelta(ordinal, text_of(raw)),
            n.BlockStop(ordinal),
        ]

    # --- tool calls -------------------------------------------------------------------------------------------

    def _call(self, parsed: wire.FunctionCall, signature: str | None, out: list[n.Normalized]) -> None:
        streamed = parsed.will_continue or parsed.partial_args is not None
        call = self.call
        if parsed.name and not (call and streamed and parsed.name == call.name):
            known = None if streamed else self.emitted_calls.get(parsed.id or "")
            if known and known.name == parsed.name and known.emitted.rest(compact(parsed.args)) == "":
                return
            self._close_open_block(out)
            # If the previous call has not ended, it was never completed.
            call = StreamedCall(self._take_ordinal(), parsed.name, parsed.id or "")
            tool_id = parsed.id or f"call_{call.ordinal}"
            out.append(n.ToolCallStart(call.ordinal, tool_id, parsed.name, derived=not parsed.id))
            if parsed.id:
                out.append(n.Opaque(call.ordinal, "item_id", parsed.id))
        if call is None:
            if streamed or signature or not is_null(parsed.args):
                raise Malformed("functionCall", "the call has no name")
            return
        if signature:
            out.append(n.Opaque(call.ordinal, "thought_signature", signature))
        pieces = [self._piece(call.writer, piece) for piece in parsed.partial_args or ()]
        self.call = call if parsed.will_continue else None
        if self.call is None:
            whole = not (call.writer.path or is_null(parsed.args))
            pieces.append(compact(parsed.args) if whole else call.writer.end())
        if text := "".join(pieces):
            call.emitted.add(text)
            out.append(n.ToolCallDelta(call.ordinal, text))
        if self.call is None:
            out.append(n.ToolCallDone(call.ordinal))
            self.calls += 1
            if call.id:
                self._hold(len(call.id) + 128)
                self.emitted_calls[call.id] = StreamedCall(call.ordinal, call.name, call.id, emitted=call.emitted)

    def _piece(self, writer: ArgsWriter, piece: wire.PartialArg) -> str:
        self._hold(len(piece.json_path))
        return writer.write(piece)

    # ----------------------------------------------------------------------------------------------------------

    def _close_open_block(self, out: list[n.Normalized]) -> None:
        if self.open_kind == "audio":
            out.append(n.Audio(self.open_ordinal, self.sound_type, sound.joined(self.sound)))
            self._hold(-sum(len(piece) + 64 for piece in self.sound))
            self.sound = []
        if self.open_kind is not None:
            out.append(n.BlockStop(self.open_ordinal))
            self.open_kind, self.open_ordinal, self.open_signed = None, -1, False

    def _extra(self, name: str, json: str, out: list[n.Normalized], block: int | None = None) -> None:
        out.append(n.Extra(f"gemini.{name}", json, block))


def usage_of(raw: dict[str, object]) -> Usage:
    """The API's token counts. `reasoning` is in addition to `output`, not part of it."""
    return Usage(
        input=count(raw, "promptTokenCount"),
        output=count(raw, "candidatesTokenCount"),
        reasoning=count(raw, "thoughtsTokenCount"),
        cache_read=count(raw, "cachedContentTokenCount"),
        total=count(raw, "totalTokenCount"),
        raw=raw,
    )
