"""The answer of streamGenerateContent, streamed or whole, as normalised events.

What providers.md ("Gemini streamGenerateContent") says of real streams holds here. Choices of our own:

- The end of the body ends the response, if a finish reason came, or a reason why the prompt was blocked: the API has no
  other terminal event, and a finish reason may come more than once. The last one counts.
- Text and thinking follow each other: the one ends where the other begins, or anything else.
- A call's arguments come as an object: its JSON without blanks is the raw argument string, however the body was laid
  out, for the same call must read the same streamed and whole.
- A call with the id and arguments of one that is complete is that call, and an image or other media
  with the bytes of another that one: they are told once.
- A call without an id is called ``call_<ordinal>``. Only an id of the provider's own goes back to it (`item_id`).
- A signature belongs to the part that it came with; on an empty text or alone, to the text or thinking that is open.
  Where neither is, or the open one has a signature already, the part is an item that goes back at its place.
- Every part without a name here (code that the provider runs, its own tools) is an `Extra` with an ordinal, and so is
  media that is no image. An image of a thought is a draft.
- Only candidate 0 is the answer; others are shown as `Extra`.
"""

from __future__ import annotations

from zlib import crc32

import msgspec

from tokenbus.errors import Malformed
from tokenbus.events.normalized import (
    BlockStart,
    BlockStop,
    Cut,
    Done,
    Extra,
    Failed,
    FinishReason,
    Image,
    Normalized,
    Opaque,
    OpenKind,
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
from tokenbus.providers.gemini import wire
from tokenbus.providers.gemini.partial_args import ArgsWriter
from tokenbus.providers.response.decoder import ResponseDecoder, finish_of
from tokenbus.providers.response.error_mapping import provider_failure
from tokenbus.providers.response.json_decode import is_null, read, text_of
from tokenbus.providers.response.repeats import Told
from tokenbus.providers.response.sse import SseEvent
from tokenbus.providers.response.usage import count, latest

FINISH: dict[str, FinishReason] = {
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
_OF_A_THOUGHT = frozenset({"thought", "thoughtSignature"})


class StreamedCall(msgspec.Struct):
    """A call whose arguments come in pieces."""

    ordinal: int
    name: str
    id: str
    """The provider's; empty for none."""
    writer: ArgsWriter = msgspec.field(default_factory=ArgsWriter)
    told: Told = msgspec.field(default_factory=Told)
    """Its arguments."""


class GeminiDecoder(ResponseDecoder, kw_only=True):
    """One response of generateContent or streamGenerateContent; see `tokenbus.providers.api.Decoder`."""

    started: bool = False
    next_ordinal: int = 0
    open_kind: OpenKind | None = None
    open_ordinal: int = -1
    """The open text or thinking block."""
    open_signed: bool = False
    call: StreamedCall | None = None
    calls: int = 0
    """Tool calls completed."""
    told_calls: dict[str, StreamedCall] = msgspec.field(default_factory=dict[str, StreamedCall])
    """Those with an id of the provider's, by it."""
    told_media: set[int] = msgspec.field(default_factory=set[int])
    """By fingerprint."""
    finish: str = ""
    block_reason: str = ""
    """Why the prompt was blocked."""
    usage: dict[str, object] | None = None
    usage_said: bytes = b""
    """The latest usage as it came: most chunks repeat it."""

    def _read(self, event: SseEvent, out: list[Normalized]) -> Terminal | None:
        data = event.data
        if data.startswith(b"[DONE]"):
            return None
        chunk = read(wire.chunk, data, "chunk")
        if chunk.error:
            return Failed(provider_failure(read(wire.anything, data, "chunk")))
        counted = bytes(chunk.usage_metadata) not in _NOTHING_COUNTED
        known = chunk.candidates is not msgspec.UNSET or counted or chunk.prompt_feedback
        if not self.started and (known or chunk.model_version):
            self.started = True
            out.append(Start(chunk.model_version or "", chunk.response_id or ""))
        for place, candidate in enumerate(chunk.candidates or ()):
            if candidate.index:
                self._extra("candidate", text_of(_raw_candidate(data, place)), out)
            else:
                self._candidate(candidate, data, place, out)
        if chunk.prompt_feedback and chunk.prompt_feedback.block_reason:
            self.block_reason = chunk.prompt_feedback.block_reason
            self._extra("promptFeedback", text_of(read(wire.raw_chunk, data, "chunk").prompt_feedback), out)
        if counted and (said := bytes(chunk.usage_metadata)) != self.usage_said:
            self._count(said, out)
        if self.started and not known:
            self._extra("chunk", data.decode(), out)
        return None

    def _closed(self, out: list[Normalized]) -> Terminal:
        if not (self.finish or self.block_reason):  # what is open stays open: it is not whole
            return Cut("the stream ended before finishReason" if self.started else "the body held no answer")
        self._shut(out)
        usage = usage_of(self.usage) if self.usage else None
        if self.finish:
            return Done(finish_of(FINISH.get(self.finish, "unknown"), self.calls), self.finish, usage)
        return Done("content_filter", self.block_reason, usage)

    def _candidate(self, candidate: wire.Candidate, data: bytes, place: int, out: list[Normalized]) -> None:
        for i, part in enumerate((candidate.content and candidate.content.parts) or ()):
            if not self._part(part, out):
                self._other_part(_raw_part(data, place, i), part.thought_signature, out)
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
            if FINISH.get(self.finish) == "content_filter" and not is_null(candidate.safety_ratings):
                self._extra("safetyRatings", text_of(candidate.safety_ratings), out)

    def _metadata(self, candidate: wire.Candidate, out: list[Normalized]) -> None:
        block = self.open_ordinal if self.open_kind else None
        for name, value in (
            ("groundingMetadata", candidate.grounding_metadata),
            ("citationMetadata", candidate.citation_metadata),
            ("urlContextMetadata", candidate.url_context_metadata),
        ):
            if not is_null(value):
                self._extra(name, text_of(value), out, block)

    def _count(self, said: bytes, out: list[Normalized]) -> None:
        if (raw := latest(self.usage, read(wire.usage, said, "usageMetadata"))) != self.usage:
            self.usage = raw
            out.append(UsageSeen(usage_of(raw)))
        self.usage_said = said

    # --- parts ------------------------------------------------------------------------------------------------

    def _part(self, part: wire.Part, out: list[Normalized]) -> bool:
        """A part that is all or a piece of a block; False where it is none."""
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
                self._shut(out)
                self.open_kind, self.open_ordinal = kind, self._take_ordinal()
                out.append(BlockStart(self.open_ordinal, kind))
            delta = TextDelta if kind == "text" else ThinkingDelta
            out.append(delta(self.open_ordinal, part.text))
        return not signature or self._sign(signature, kind, out)

    def _sign(self, signature: str, kind: OpenKind | None, out: list[Normalized]) -> bool:
        """Whether it is the signature of the open block."""
        if not self.open_kind or self.open_kind != kind or self.open_signed:
            return False
        self.open_signed = True
        out.append(Opaque(self.open_ordinal, "thought_signature", signature))
        return True

    def _image(self, blob: wire.Blob, part: wire.Part, out: list[Normalized]) -> bool:
        mark = crc32(f"{bool(part.thought)} {blob.mime_type} {blob.data}".encode())
        if mark in self.told_media:
            return True
        self._hold(16)
        self.told_media.add(mark)
        if not blob.mime_type.startswith("image/"):
            return False
        self._shut(out)
        ordinal = self._take_ordinal()
        out.append(BlockStart(ordinal, "image"))
        out.append(Image(ordinal, blob.mime_type, blob.data, final=True, draft=bool(part.thought)))
        if part.thought_signature:
            out.append(Opaque(ordinal, "thought_signature", part.thought_signature))
        out.append(BlockStop(ordinal))
        return True

    def _other_part(self, raw: msgspec.Raw, signature: str | None, out: list[Normalized]) -> None:
        """A part that goes back at its place as it came; a signature alone is the open block's, if that has none."""
        names = [name for name in read(wire.fields, bytes(raw), "part") if name not in _OF_A_THOUGHT]
        alone = not names or names == ["text"]
        if alone and (not signature or (not names and self._sign(signature, self.open_kind, out))):
            return
        self._shut(out)
        name = "thoughtSignature" if alone else names[0]
        out.append(Extra(f"gemini.{name}", text_of(raw), ordinal=self._take_ordinal()))

    # --- tool calls -------------------------------------------------------------------------------------------

    def _call(self, said: wire.FunctionCall, signature: str | None, out: list[Normalized]) -> None:
        streamed = said.will_continue or said.partial_args is not None
        call = self.call
        if said.name and not (call and streamed and said.name == call.name):
            known = None if streamed else self.told_calls.get(said.id or "")
            if known and known.name == said.name and known.told.rest(_compact(said.args)) == "":
                return
            self._shut(out)
            # Should the call before it not have ended, then it was not completed.
            call = StreamedCall(self._take_ordinal(), said.name, said.id or "")
            tool_id = said.id or f"call_{call.ordinal}"
            out.append(ToolCallStart(call.ordinal, tool_id, said.name, derived=not said.id))
            if said.id:
                out.append(Opaque(call.ordinal, "item_id", said.id))
        if call is None:
            if streamed or signature or not is_null(said.args):
                raise Malformed("functionCall", "it has no name")
            return
        if signature:
            out.append(Opaque(call.ordinal, "thought_signature", signature))
        pieces = [self._piece(call.writer, piece) for piece in said.partial_args or ()]
        self.call = call if said.will_continue else None
        if self.call is None:
            whole = not (call.writer.path or is_null(said.args))
            pieces.append(_compact(said.args) if whole else call.writer.end())
        if text := "".join(pieces):
            call.told.add(text)
            out.append(ToolCallDelta(call.ordinal, text))
        if self.call is None:
            out.append(ToolCallDone(call.ordinal))
            self.calls += 1
            if call.id:
                self._hold(len(call.id) + 128)
                self.told_calls[call.id] = StreamedCall(call.ordinal, call.name, call.id, told=call.told)

    def _piece(self, writer: ArgsWriter, piece: wire.PartialArg) -> str:
        self._hold(len(piece.json_path))
        return writer.write(piece)

    # ----------------------------------------------------------------------------------------------------------

    def _shut(self, out: list[Normalized]) -> None:
        if self.open_kind is not None:
            out.append(BlockStop(self.open_ordinal))
            self.open_kind, self.open_ordinal, self.open_signed = None, -1, False

    def _extra(self, name: str, json: str, out: list[Normalized], block: int | None = None) -> None:
        out.append(Extra(f"gemini.{name}", json, block))

    def _take_ordinal(self) -> int:
        self.next_ordinal += 1
        return self.next_ordinal - 1


def usage_of(raw: dict[str, object]) -> Usage:
    """The API's counts. Thoughts are beside `output` and not in it."""
    return Usage(
        input=count(raw, "promptTokenCount"),
        output=count(raw, "candidatesTokenCount"),
        reasoning=count(raw, "thoughtsTokenCount"),
        cache_read=count(raw, "cachedContentTokenCount"),
        total=count(raw, "totalTokenCount"),
        raw=raw,
    )


def _compact(args: msgspec.Raw) -> str:
    """JSON without blanks between its tokens, which stay as they are; none is an empty object."""
    return "{}" if is_null(args) else msgspec.json.format(bytes(args), indent=-1).decode()


def _raw_candidate(data: bytes, place: int) -> msgspec.Raw:
    """A candidate of a chunk as it is."""
    return (read(wire.raw_chunk, data, "chunk").candidates or [])[place]


def _raw_part(data: bytes, place: int, i: int) -> msgspec.Raw:
    """A part of a candidate of a chunk as it is."""
    content = read(wire.raw_candidate, bytes(_raw_candidate(data, place)), "candidate").content
    return ((content and content.parts) or [])[i]
