"""A run as chunks of the Gemini API, each a whole `GenerateContentResponse`. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from tokenbus.core.run.blocks.tool_arguments import parse_arguments
from tokenbus.events.normalized import FinishReason
from tokenbus.events.public import BlockComplete, Chunk, Completed
from tokenbus_services.gateway.surfaces.answering import Echo
from tokenbus_services.gateway.surfaces.signatures import pack
from tokenbus_services.pricing.token_counts import token_counts

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


class GeminiEcho(Echo, frozen=True, kw_only=True, omit_defaults=True):
    thoughts: bool = False
    """Whether the client asked for the thoughts."""


class AnswerWriter:
    """Writes the parts of one answer."""

    def __init__(self, run: str, model: str, echo: GeminiEcho) -> None:
        self._run = run
        self._model = model
        self._echo = echo

    def piece(self, chunk: Chunk) -> Json | None:
        """The part for a piece of a block; None if it is sent whole, or not at all."""
        if chunk.kind == "text":
            return {"text": chunk.text}
        if chunk.kind == "thinking" and self._echo.thoughts:
            return {"text": chunk.text, "thought": True}
        return None

    def rest(self, block: BlockComplete) -> Json | None:
        """The part for the end of a block that was sent in pieces: its signature; or for a block that is sent whole."""
        match block.kind:
            case "text":
                return {"text": "", **signed} if (signed := _signature(block)) else None
            case "thinking" if self._echo.thoughts:
                return {"text": "", "thought": True, **signed} if (signed := _signature(block)) else None
            case _:
                return self._sent_whole(block)

    def whole(self, block: BlockComplete) -> Json | None:
        """The part for a whole block; None if it is not sent."""
        content = block.content or ""
        match block.kind:
            case "text" if content:
                return {"text": content, **_signature(block)}
            case "thinking" if self._echo.thoughts and (content or _signature(block)):
                return {"text": content, "thought": True, **_signature(block)}
            case _:
                return self._sent_whole(block)

    def _sent_whole(self, block: BlockComplete) -> Json | None:
        match block:
            case BlockComplete(kind="tool_call") if not (block.cut or self._echo.bus_tools):
                called = {"id": block.tool_id, "name": block.tool_name, "args": _args(block)}
                return {"functionCall": called, **_signature(block)}
            case BlockComplete(kind="image", image=image) if image and image.base64:
                if image.draft and not self._echo.thoughts:
                    return None
                data = {"mimeType": image.media_type, "data": image.base64}
                return {"inlineData": data, **({"thought": True} if image.draft else {}), **_signature(block)}
            case _:
                return None

    def response(self, parts: Iterable[Json], end: Completed | None = None) -> Json:
        """A chunk, or the whole response."""
        candidate: Json = {"content": {"role": "model", "parts": list(parts)}, "index": 0}
        response: Json = {"candidates": [candidate], "modelVersion": self._model, "responseId": self._run}
        if end:
            candidate["finishReason"] = self._finish(end)
            response["usageMetadata"] = self._usage(end)
        return response

    def _finish(self, end: Completed) -> str:
        if end.finish == "tool_use" and self._echo.bus_tools:
            return "TOO_MANY_TOOL_CALLS"  # of the bus's tools, over `max_tool_depth`
        return _FINISH_REASONS[end.finish]

    def _usage(self, end: Completed) -> Json:
        counts = token_counts(end.usage, self._echo.api_of(end))
        usage: Json = {
            "promptTokenCount": counts.input,
            "candidatesTokenCount": max(0, counts.output - counts.reasoning),
            "thoughtsTokenCount": counts.reasoning,
            "totalTokenCount": counts.total,
        }
        return usage | ({"cachedContentTokenCount": counts.cache_read} if counts.cache_read else {})


def _args(block: BlockComplete) -> Json:
    """The arguments as an object. Broken ones have no other form: the model sees them beside its error result."""
    if block.input is not None:
        return block.input
    parsed, _ = parse_arguments(block.arguments or "")
    return {"invalid_arguments": block.arguments} if parsed is None else parsed


def _signature(block: BlockComplete) -> Json:
    """The part's own signature; of another API, all that its provider wants back."""
    opaque = dict(block.opaque or {})
    if block.signature:
        opaque["signature"] = block.signature
    if not set(opaque) - {"api", "provider", "item_id"}:
        return {}
    if set(opaque) <= _OWN and opaque.get("api", "gemini") == "gemini":
        return {"thoughtSignature": opaque["thought_signature"]}
    return {"thoughtSignature": pack(opaque)}
