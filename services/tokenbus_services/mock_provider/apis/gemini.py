"""Gemini, with call ids and, after thinking, signatures, as in Gemini 3.

Source: "Generating content", "Thought signatures" and "Errors" of the Gemini API reference.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal
from urllib.parse import unquote

import msgspec
from msgspec import Meta

from tokenbus.providers.api import ApiName
from tokenbus_services.mock_provider.reply import Finish, Reply, ToolCall
from tokenbus_services.mock_provider.request import (
    HistoryItem,
    HttpError,
    ModelRequest,
    ParsedBody,
    decode_as,
    join_texts,
)

_FINISH_REASONS: dict[Finish, str] = {
    "stop": "STOP",
    "length": "MAX_TOKENS",
    "tool_use": "STOP",
    "content_filter": "SAFETY",
}
_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}

_encode = msgspec.json.Encoder().encode

Json = dict[str, object]


class _FunctionCall(msgspec.Struct):
    id: str = ""


class _FunctionResponse(msgspec.Struct):
    id: str = ""
    response: Any = None


class _Part(msgspec.Struct, rename="camel"):
    text: str = ""
    function_call: _FunctionCall | None = None
    function_response: _FunctionResponse | None = None


class _Content(msgspec.Struct):
    parts: list[_Part]
    role: Literal["user", "model", "function"] = "user"


class _Config(msgspec.Struct, frozen=True, rename="camel"):
    stop_sequences: tuple[str, ...] = ()


class _Request(msgspec.Struct, rename="camel"):
    contents: Annotated[list[_Content], Meta(min_length=1)]
    generation_config: _Config = _Config()


class MockGemini:
    """The generateContent and streamGenerateContent methods."""

    name: ApiName = "gemini"
    route = re.compile(r"/v1(?:beta)?/models/(?P<model>[^/:]+):(?P<method>generateContent|streamGenerateContent)")

    def parse(
        self, route: re.Match[str], query: Mapping[str, str], headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> ParsedBody:
        stream = route["method"] == "streamGenerateContent"
        if stream and query.get("alt") != "sse":
            # The real API answers with a JSON array then; nothing here asks for one.
            raise HttpError(400, "alt: the mock provider streams only with alt=sse only")
        request = decode_as(body, _Request)
        return ParsedBody(
            model=unquote(route["model"]),
            stream=stream,
            history_field="contents",
            messages=[tuple(_history_items(content)) for content in request.contents],
            stop_strings=request.generation_config.stop_sequences,
        )

    def error(self, status: int, message: str) -> bytes:
        return _encode({"error": {"code": status, "message": message, "status": _STATUSES.get(status, "INTERNAL")}})

    def error_event(self, status: int, message: str) -> bytes:
        return b"data: %b\r\n\r\n" % self.error(status, message)

    def stream(self, reply: Reply, request: ModelRequest) -> bytes:
        parts: list[Json] = [{"text": piece, "thought": True} for piece in reply.text_deltas(reply.thinking)]
        parts.extend({"text": piece} for piece in reply.text_deltas(reply.text))
        parts += _pictures(reply)
        parts += _calls(reply, request)
        chunks = [_chunk(request, [part], _usage_so_far(reply)) for part in parts]
        # The last chunk of a real stream has an empty text, and the signature of a text before it.
        last = _chunk(
            request, [{"text": ""} | _signature_of_text(reply)], _usage(reply), _FINISH_REASONS[reply.finish_reason]
        )
        return b"".join(b"data: %b\r\n\r\n" % _encode(chunk) for chunk in [*chunks, last])

    def body(self, reply: Reply, request: ModelRequest) -> bytes:
        parts: list[Json] = [{"text": reply.thinking, "thought": True}] if reply.thinking else []
        if reply.text:
            parts.append({"text": reply.text} | _signature_of_text(reply))
        parts += _pictures(reply)
        parts += _calls(reply, request)
        return msgspec.json.format(_encode(_chunk(request, parts, _usage(reply), _FINISH_REASONS[reply.finish_reason])))


mock_api = MockGemini()


def _history_items(content: _Content) -> Iterator[HistoryItem]:
    text = join_texts(part.text for part in content.parts)
    if content.role == "model":
        calls = (part.function_call for part in content.parts if part.function_call)
        yield HistoryItem(role="model", text=text, calls=tuple(call.id for call in calls if call.id))
        return
    results = [part.function_response for part in content.parts if part.function_response]
    for result in results:
        yield HistoryItem(role="tool", text=_text_of(result.response), call_id=result.id)
    if len(results) < len(content.parts):
        yield HistoryItem(role="user", text=text)


def _text_of(response: Any) -> str:
    """The text of a tool result: its usual text field, or else the object as JSON."""
    match response:
        case {"output": str(text)} | {"error": str(text)}:
            return text
        case _:
            return _encode(response).decode()


def _chunk(request: ModelRequest, parts: list[Json], usage: Json, finish: str | None = None) -> Json:
    candidate: Json = {"content": {"parts": parts, "role": "model"}, "index": 0}
    if finish:
        candidate["finishReason"] = finish
    return {
        "candidates": [candidate],
        "usageMetadata": usage,
        "modelVersion": request.model,
        "responseId": request.key[:22],
    }


def _pictures(reply: Reply) -> list[Json]:
    """Images, each complete and signed, because the model must continue from them later. There are no previews."""
    return [
        {
            "inlineData": {"mimeType": picture.media_type, "data": b64encode(picture.data).decode()},
            "thoughtSignature": reply.signature,
        }
        for picture in reply.pictures
    ]


def _calls(reply: Reply, request: ModelRequest) -> list[Json]:
    """The calls, each complete. Only the first of several parallel calls is signed."""
    calls: list[Json] = [
        {
            "functionCall": {
                "name": call.name,
                "args": arguments_object(call),
                "id": call.id or f"{request.key[:12]}{number:02d}",
            }
        }
        for number, call in enumerate(reply.tool_calls)
    ]
    if calls and reply.thinking:
        calls[0]["thoughtSignature"] = reply.signature
    return calls


def arguments_object(call: ToolCall) -> object:
    """The arguments as an object; the API cannot carry broken JSON."""
    try:
        return msgspec.json.decode(call.raw, type=dict[str, object])
    except (msgspec.DecodeError, msgspec.ValidationError):
        return {}


def _signature_of_text(reply: Reply) -> Json:
    return {"thoughtSignature": reply.signature} if reply.thinking and not reply.tool_calls else {}


def _usage(reply: Reply) -> Json:
    """Thinking tokens are reported separately from candidate tokens, so they are subtracted from the output."""
    usage = reply.reported_usage
    given, written, thoughts = usage.input or 0, usage.output or 0, usage.reasoning or 0
    counts: Json = {
        "promptTokenCount": given,
        "candidatesTokenCount": max(0, written - thoughts),
        "totalTokenCount": given + written if usage.total is None else usage.total,
    }
    if thoughts:
        counts["thoughtsTokenCount"] = thoughts
    if usage.cache_read:
        counts["cachedContentTokenCount"] = usage.cache_read
    return counts


def _usage_so_far(reply: Reply) -> Json:
    given = reply.reported_usage.input or 0
    return {"promptTokenCount": given, "totalTokenCount": given}
