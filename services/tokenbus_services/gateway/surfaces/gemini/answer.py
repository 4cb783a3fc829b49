"""A run as chunks of the Gemini API, each a whole `GenerateContentResponse`: a stream, or one response. Pure."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from tokenbus.client.response import Response
from tokenbus.core.run.blocks.public_blocks import arguments_object
from tokenbus.events import public
from tokenbus.events.normalized import FinishReason
from tokenbus_services.gateway.problem import Problem, of_end
from tokenbus_services.gateway.surfaces.contract import Encoder, GatewayNote, WholeRun, blob_path, encode_line
from tokenbus_services.gateway.surfaces.errors import gemini_error, gemini_refusal
from tokenbus_services.gateway.surfaces.fields import ITEMS, LAST_ITEMS, pack_opaque
from tokenbus_services.gateway.surfaces.hosted import Steps, citations_of, is_own, original
from tokenbus_services.gateway.surfaces.owed_calls import OwedCall, OwedCalls
from tokenbus_services.gateway.surfaces.settling import Settling
from tokenbus_services.gateway.surfaces.surface import Echo
from tokenbus_services.pricing import token_counts

Json = dict[str, object]

_FINISH_REASONS: dict[FinishReason, str] = {
    "stop": "STOP",
    "length": "MAX_TOKENS",
    "tool_use": "STOP",
    "content_filter": "SAFETY",
    "pause": "OTHER",
    "requires_action": "STOP",
    "unknown": "OTHER",
    "error": "OTHER",
}
_OWN = {"thought_signature", "item_id", "api", "provider"}
"""What a part of this API may have beside its content, and the origin."""


_METADATA = ("groundingMetadata", "citationMetadata", "urlContextMetadata")
"""What a candidate of this API may have beside its content."""
_BESIDE = {"item": "", "json": ""}
"""Of a part whose item an earlier part has."""


class GeminiEcho(Echo, frozen=True, kw_only=True, omit_defaults=True):
    thoughts: bool = False
    """Whether the client asked for the thoughts."""


def echo_of(note: GatewayNote) -> GeminiEcho:
    return msgspec.convert(note.echo, GeminiEcho)


class AnswerWriter:
    """Writes the parts of one answer."""

    def __init__(self, note: GatewayNote, run: str) -> None:
        self._run = run
        self._model = note.model
        self._echo = echo_of(note)
        self._steps = Steps()
        self._beside: Json = {}
        """Fields of the candidate: what the provider searched for, and what it cites."""
        self._chunks: list[Json] = []
        self._supports: list[Json] = []
        self._queries: list[str] = []
        self._carried: list[Json] = []
        """The provider's items for which this API has no part; the next part that is signed has them."""

    def items(self, block: public.BlockComplete) -> list[Json]:
        """The parts of what the provider did itself: its own of this API, else code in this API's words. What it
        searched for is kept for the candidate.
        """
        step = self._steps.read(block)
        if is_own(block, "gemini") and not block.cut:
            with suppress(msgspec.DecodeError, RecursionError):
                return [msgspec.json.decode(block.content or "", type=Json)]
        if step is None:
            return []
        if step.tool == "web_search":
            self._queries += step.queries
        if step.tool not in ("code", "shell"):
            self._carried.append(original(block))
            return []
        parts: list[Json] = []
        if step.called is not None:
            language = "PYTHON" if step.tool == "code" else "LANGUAGE_UNSPECIFIED"
            parts.append({"executableCode": {"language": language, "code": step.code, "id": step.id}})
        if output := step.output:
            outcome = "OUTCOME_FAILED" if output.failed else "OUTCOME_OK"
            result = {"outcome": outcome, "output": output.text + output.errors, "id": step.id}
            parts.append({"codeExecutionResult": result})
        carried = {"item": block.item or "", "json": block.content or ""}
        for number, part in enumerate(parts):
            part["thoughtSignature"] = pack_opaque(carried if number == 0 else _BESIDE)
        return parts

    def cite(self, event: public.BlockComplete | public.Completed) -> None:
        """Keep the sources of a text, or of the answer, for the candidate."""
        text = (event.content or "") if isinstance(event, public.BlockComplete) else ""
        for extra in event.provider_extra or ():
            name = str(extra.get("name", "")).removeprefix("gemini.")
            if name in _METADATA and extra.get("json") != "{}":
                with suppress(msgspec.DecodeError, RecursionError):
                    self._beside[name] = msgspec.json.decode(str(extra.get("json")))
        for cited in citations_of(event):
            if cited.api == "gemini" or not cited.url:
                continue
            start, end = (len(text[:at].encode("utf-8", "replace")) for at in (cited.start, cited.end))
            segment = {"startIndex": start, "endIndex": end, "text": text[cited.start : cited.end]}
            self._supports.append({"segment": segment, "groundingChunkIndices": [len(self._chunks)]})
            self._chunks.append({"web": {"uri": cited.url, "title": cited.title}})

    def _grounding(self) -> Json:
        found = {"webSearchQueries": self._queries, "groundingChunks": self._chunks}
        found["groundingSupports"] = self._supports
        built = {name: value for name, value in found.items() if value}
        return {**({"groundingMetadata": built} if built else {}), **self._beside}

    def piece(self, chunk: public.Chunk) -> Json | None:
        """The part for a piece of a block; None if it is sent whole, or not at all."""
        if chunk.kind in ("text", "audio"):
            return {"text": chunk.text}
        if chunk.kind == "thinking" and self._echo.thoughts:
            return {"text": chunk.text, "thought": True}
        return None

    def rest(self, block: public.BlockComplete) -> Json | None:
        """The part for the end of a block that was sent in pieces: its signature; or for a block that is sent whole."""
        match block.kind:
            case "text":
                return {"text": "", **signed} if (signed := self._signature(block)) else None
            case "thinking" if self._echo.thoughts:
                return {"text": "", "thought": True, **signed} if (signed := _signature(block)) else None
            case _:
                return self._sent_whole(block)

    def parts(self, block: public.BlockComplete) -> list[Json]:
        self.cite(block)
        if block.kind == "server_tool":
            return self.items(block)
        said: list[Json] = [{"text": block.content}] if block.kind == "audio" and block.content else []
        return [*said, *([part] if (part := self.whole(block)) else [])]

    def whole(self, block: public.BlockComplete) -> Json | None:
        """The part for a whole block; None if it is not sent."""
        content = block.content or ""
        match block.kind:
            case "text" if content:
                return {"text": content, **self._signature(block)}
            case "thinking" if self._echo.thoughts and (content or _signature(block)):
                return {"text": content, "thought": True, **_signature(block)}
            case _:
                return self._sent_whole(block)

    def _sent_whole(self, block: public.BlockComplete) -> Json | None:
        match block:
            case public.BlockComplete(kind="tool_call") if not (block.cut or self._echo.bus_tools):
                called = {"id": block.tool_id, "name": block.tool_name, "args": arguments_object(block)}
                return {"functionCall": called, **self._signature(block)}
            case public.BlockComplete(kind="audio", audio=public.AudioRef() as audio) if not block.cut:
                own = {"audio": audio.audio_id, "api": "openai-chat"} if audio.audio_id else {}
                return {**_media(self._run, audio), **({"thoughtSignature": pack_opaque(own)} if own else {})}
            case public.BlockComplete(kind="image", image=public.ImageRef() as image):
                if image.draft and not self._echo.thoughts:
                    return None
                return {
                    **_media(self._run, image),
                    **({"thought": True} if image.draft else {}),
                    **_signature(block),
                }
            case _:
                return None

    def _signature(self, block: public.BlockComplete) -> Json:
        """The part's own signature, with the provider's items that come before it."""
        if not self._carried:
            return _signature(block)
        kept = {**(block.opaque or {}), **({"signature": block.signature} if block.signature else {})}
        return {"thoughtSignature": pack_opaque({**kept, ITEMS: self._taken()})}

    def _taken(self) -> str:
        items, self._carried = self._carried, []
        return msgspec.json.encode(items).decode()

    def last(self) -> list[Json]:
        """A part without content, for items that no part follows."""
        return [{"text": "", "thoughtSignature": pack_opaque({LAST_ITEMS: self._taken()})}] if self._carried else []

    def owed(self, calls: Iterable[OwedCall]) -> list[Json]:
        """The calls that the client owes a result."""
        return [{"functionCall": {"id": call.id, "name": call.name, "args": call.input}} for call in calls]

    def response(self, parts: Iterable[Json], end: public.Completed | None = None, *, owed: bool = False) -> Json:
        """A chunk, or the whole response."""
        candidate: Json = {"content": {"role": "model", "parts": list(parts)}, "index": 0}
        response: Json = {"candidates": [candidate], "modelVersion": self._model, "responseId": self._run}
        if end:
            self.cite(end)
            candidate |= self._grounding()
            candidate["finishReason"] = self._finish(end, owed=owed)
            response["usageMetadata"] = self._usage(end)
        return response

    def _finish(self, end: public.Completed, *, owed: bool) -> str:
        if end.finish == "tool_use" and self._echo.bus_tools and not owed:
            return "TOO_MANY_TOOL_CALLS"  # of the bus's tools, over `max_tool_depth`
        return _FINISH_REASONS[end.finish]

    def _usage(self, end: public.Completed) -> Json:
        counts = token_counts(end.usage, self._echo.api_of(end))
        usage: Json = {
            "promptTokenCount": counts.input,
            "candidatesTokenCount": max(0, counts.output - counts.reasoning),
            "thoughtsTokenCount": counts.reasoning,
            "totalTokenCount": counts.total,
        }
        return usage | ({"cachedContentTokenCount": counts.cache_read} if counts.cache_read else {})


def _media(run: str, media: public.ImageRef | public.AudioRef) -> Json:
    """The bytes, or the address at this gateway of a blob that was not loaded."""
    if media.base64 is not None:
        return {"inlineData": {"mimeType": media.media_type, "data": media.base64}}
    return {"fileData": {"mimeType": media.media_type, "fileUri": blob_path(run, media.blob_id or "")}}


def _signature(block: public.BlockComplete) -> Json:
    """The part's own signature; of another API, all that its provider wants back."""
    opaque = dict(block.opaque or {})
    if block.signature:
        opaque["signature"] = block.signature
    if not set(opaque) - {"api", "provider", "item_id"}:
        return {}
    if set(opaque) <= _OWN and opaque.get("api", "gemini") == "gemini":
        return {"thoughtSignature": opaque["thought_signature"]}
    return {"thoughtSignature": pack_opaque(opaque)}


class GeminiStream(Encoder):
    """Thinking and calls are sent once no retry can void them; calls whole."""

    def __init__(self, note: GatewayNote, run: str) -> None:
        self._answer = AnswerWriter(note, run)
        self._owed = OwedCalls()
        self._settling = Settling(hold_thinking=True, hold_calls=True, on_failure=echo_of(note).on_failure)

    def feed(self, event: public.PublicEvent) -> list[bytes]:
        self._owed.feed(event)
        return [data for settled in self._settling.feed(event) for data in self._encode(settled)]

    def broken(self, problem: Problem) -> list[bytes]:
        return [self._last(gemini_error(problem))]

    @abstractmethod
    def _more(self, chunk: Json) -> bytes:
        """A chunk that others follow."""

    @abstractmethod
    def _last(self, chunk: Json) -> bytes:
        """The last chunk."""

    def _encode(self, event: public.PublicEvent) -> list[bytes]:
        match event:
            case public.Chunk():
                part = self._answer.piece(event)
            case public.BlockComplete(kind="server_tool"):
                return [self._more(self._answer.response([part])) for part in self._answer.items(event)]
            case public.BlockComplete():
                self._answer.cite(event)
                part = self._answer.rest(event)
            case public.Completed():
                owed = self._answer.owed(self._owed.calls)
                rest = [*owed, *self._answer.last()] or [{"text": ""}]
                return [self._last(self._answer.response(rest, event, owed=bool(owed)))]
            case public.Incomplete() | public.RunFailedEvent() | public.Cancelled():
                return self.broken(of_end(event))
            case _:
                part = None
        return [self._more(self._answer.response([part]))] if part else []


class EventStream(GeminiStream):
    """Server-sent events (`alt=sse`). Clients take no other lines than `data:`."""

    def _more(self, chunk: Json) -> bytes:
        return b"data: %b\n\n" % encode_line(chunk)

    def _last(self, chunk: Json) -> bytes:
        return self._more(chunk)


class ArrayStream(GeminiStream):
    """One JSON array, whose elements come one by one."""

    def __init__(self, note: GatewayNote, run: str) -> None:
        super().__init__(note, run)
        self._before = b"["

    def _more(self, chunk: Json) -> bytes:
        before, self._before = self._before, b",\n"
        return before + encode_line(chunk)

    def _last(self, chunk: Json) -> bytes:
        return self._more(chunk) + b"]\n"


def whole_response(note: GatewayNote, run: str) -> WholeRun:
    answer = AnswerWriter(note, run)

    def body(response: Response, end: public.Completed, owed: Sequence[OwedCall]) -> Json:
        parts = [part for block in response.blocks for part in answer.parts(block)]
        return answer.response([*parts, *answer.owed(owed), *answer.last()], end, owed=bool(owed))

    return WholeRun(body, gemini_refusal)
