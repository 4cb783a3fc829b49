"""Gemini's Interactions API, stateless as with `store` false.

Source: "Streaming interactions" and "Interactions API errors" of the Gemini API's documents, and the types of Google's
SDK, whose client reads these streams in `tests/services/mock_provider/test_sdks_read_it.py`. Nothing was recorded.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec

from tokenbus.providers.api import ApiName
from tokenbus_services.mock_provider.apis.gemini import arguments_object
from tokenbus_services.mock_provider.reply import Finish, Reply
from tokenbus_services.mock_provider.request import (
    HistoryItem,
    HttpError,
    ModelRequest,
    ParsedBody,
    decode_as,
    join_texts,
)

_STATUS: dict[Finish, str] = {
    "stop": "completed",
    "length": "incomplete",
    "tool_use": "requires_action",
}
_CODES = {
    400: "invalid_request",
    401: "authentication",
    403: "permission_denied",
    404: "not_found",
    429: "rate_limit_exceeded",
    503: "service_unavailable",
    504: "deadline_exceeded",
}
_TIME = "2025-06-15T15:06:40Z"

_encode = msgspec.json.Encoder().encode

Json = dict[str, object]


class _Content(msgspec.Struct):
    text: str = ""


class _Step(msgspec.Struct):
    """A step of the input, or an entry of a content list."""

    type: str
    content: list[_Content] | None = None
    text: str = ""
    id: str = ""
    call_id: str = ""
    result: Any = None
    signature: str = ""


class _Request(msgspec.Struct):
    model: str
    input: str | _Step | list[_Step]
    stream: bool | None = False
    background: bool | None = False
    store: bool | None = True


class _Composed(msgspec.Struct):
    """One step: as it starts, its deltas, and complete."""

    start: Json
    deltas: list[Json]
    complete: Json


class MockGeminiInteractions:
    name: ApiName = "gemini-interactions"
    resumes = False
    route = re.compile(r"/v1(?:beta)?/interactions")

    def parse(
        self, route: re.Match[str], query: Mapping[str, str], headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> ParsedBody:
        if body.get("previous_interaction_id"):
            raise HttpError(400, "previous_interaction_id: the mock provider stores nothing; send the whole input")
        request = decode_as(body, _Request)
        if request.background and not request.store:
            raise HttpError(400, "background interactions are stored: store must not be false")
        if isinstance(request.input, str):
            steps = [_Step(type="user_input", content=[_Content(request.input)])]
        else:
            steps = request.input if isinstance(request.input, list) else [request.input]
        if not steps or steps[-1].type not in ("user_input", "function_result", *_MEDIA):
            raise HttpError(400, "input: it must end with what the user or a function says")
        return ParsedBody(
            model=request.model,
            stream=bool(request.stream),
            history_field="input",
            messages=[(_history_item(step),) for step in steps],
        )

    def error(self, status: int, message: str) -> bytes:
        return _encode({"error": {"message": message, "code": _CODES.get(status, "api_error")}})

    def error_event(self, status: int, message: str) -> bytes:
        error = {"message": message, "code": _CODES.get(status, "api_error")}
        return _event({"error": error, "event_type": "error"})

    def stream(self, reply: Reply, request: ModelRequest) -> bytes:
        about: Json = {"id": self.id_of(request), "object": "interaction", "model": request.model}
        events: list[Json] = [
            {"interaction": about | {"status": "in_progress"}, "event_type": "interaction.created"},
            {"interaction_id": self.id_of(request), "status": "in_progress", "event_type": "interaction.status_update"},
        ]
        for index, step in enumerate(_steps(reply, request)):
            events.append({"index": index, "step": step.start, "event_type": "step.start"})
            events.extend({"index": index, "delta": delta, "event_type": "step.delta"} for delta in step.deltas)
            events.append({"index": index, "event_type": "step.stop"})
        if reply.finish_reason == "content_filter":
            events.append({"error": _BLOCKED, "event_type": "error"})
        else:
            events.append({"interaction": _ended(reply, request), "event_type": "interaction.completed"})
        return b"".join(map(_event, events)) + b"event: done\ndata: [DONE]\n\n"

    def body(self, reply: Reply, request: ModelRequest) -> bytes:
        if reply.finish_reason == "content_filter":
            return _encode(_ended(reply, request) | {"status": "failed", "errors": [_BLOCKED]})
        return _encode(_ended(reply, request) | {"steps": [step.complete for step in _steps(reply, request)]})

    def id_of(self, request: ModelRequest) -> str:
        return f"v1_{request.key}"

    def without_output(self, request: ModelRequest, status: str) -> bytes:
        about = {"id": self.id_of(request), "status": status, "object": "interaction", "model": request.model}
        return _encode(about | {"created": _TIME, "updated": _TIME})


mock_api = MockGeminiInteractions()

_MEDIA = ("text", "image", "audio", "document", "video")
_BLOCKED: Json = {"message": "The content was blocked.", "code": "safety"}


def _event(event: Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(event["event_type"]).encode(), _encode(event))


def _history_item(step: _Step) -> HistoryItem:
    text = join_texts(entry.text for entry in step.content or ()) or step.text
    match step.type:
        case "user_input" | "text" | "image" | "audio" | "document" | "video":
            return HistoryItem(role="user", text=text)
        case "function_result":
            return HistoryItem(role="tool", text=_result_text(step.result), call_id=step.call_id)
        case "function_call":
            return HistoryItem(role="model", calls=(step.id,))
        case "thought" if not step.signature:
            raise HttpError(400, "a thought has no signature")
        case _:
            return HistoryItem(role="model", text=text)


def _result_text(result: Any) -> str:
    match result:
        case str():
            return result
        case list():
            return join_texts(entry.text for entry in decode_as(cast(object, result), list[_Content]))
        case _:
            return _encode(result).decode()


def _steps(reply: Reply, request: ModelRequest) -> Iterator[_Composed]:
    if reply.thinking:
        summary: list[Json] = [
            {"content": {"text": piece, "type": "text"}, "type": "thought_summary"}
            for piece in reply.text_deltas(reply.thinking)
        ]
        yield _Composed(
            start={"type": "thought"},
            deltas=[*summary, {"signature": reply.signature, "type": "thought_signature"}],
            complete={
                "type": "thought",
                "summary": [{"type": "text", "text": reply.thinking}],
                "signature": reply.signature,
            },
        )
    pictures: list[Json] = [
        {"type": "image", "mime_type": picture.media_type, "data": b64encode(picture.data).decode()}
        for picture in reply.pictures
    ]
    if reply.text or pictures:
        texts: list[Json] = [{"text": reply.text, "type": "text"}] if reply.text else []
        yield _Composed(
            start={"type": "model_output"},
            deltas=[*({"text": piece, "type": "text"} for piece in reply.text_deltas(reply.text)), *pictures],
            complete={"type": "model_output", "content": [*texts, *pictures]},
        )
    for number, call in enumerate(reply.tool_calls):
        head: Json = {
            "id": call.id or f"{request.key[:12]}{number:02d}",
            "type": "function_call",
            "name": call.name,
        }
        yield _Composed(
            start={**head, "arguments": dict[str, object]()},
            deltas=[{"arguments": piece, "type": "arguments_delta"} for piece in reply.argument_deltas(call.raw)],
            complete=head | {"arguments": arguments_object(call)},
        )


def _ended(reply: Reply, request: ModelRequest) -> Json:
    usage = reply.reported_usage
    given, written, thoughts = usage.input or 0, usage.output or 0, usage.reasoning or 0
    return {
        "id": mock_api.id_of(request),
        "status": _STATUS.get(reply.finish_reason, "completed"),
        "usage": {
            "total_tokens": given + written if usage.total is None else usage.total,
            "total_input_tokens": given,
            "input_tokens_by_modality": [{"modality": "text", "tokens": given}],
            "total_cached_tokens": usage.cache_read or 0,
            "total_output_tokens": max(0, written - thoughts),
            "total_tool_use_tokens": 0,
            "total_thought_tokens": thoughts,
        },
        "created": _TIME,
        "updated": _TIME,
        "service_tier": "standard",
        "object": "interaction",
        "model": request.model,
    }
