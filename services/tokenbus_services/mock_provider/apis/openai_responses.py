"""OpenAI Responses, with thinking as the summary of a reasoning item.

Source: "Responses" and "Streaming events" of the OpenAI API reference.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tokenbus.providers.api import ApiName
from tokenbus_services.mock_provider.apis.openai_chat import error_object
from tokenbus_services.mock_provider.apis.provider_api import CREATED
from tokenbus_services.mock_provider.reply import Finish, Picture, Reply
from tokenbus_services.mock_provider.request import (
    HistoryItem,
    HttpError,
    ModelRequest,
    ParsedBody,
    decode_as,
    join_texts,
)

_INCOMPLETE: dict[Finish, str] = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ENCRYPTED = "reasoning.encrypted_content"

_encode = msgspec.json.Encoder().encode

Json = dict[str, object]


class _Part(msgspec.Struct):
    text: str = ""


class _Item(msgspec.Struct):
    """One item of the input: a message if it has a role, else as its ``type`` says."""

    type: str = "message"
    role: str = ""
    content: str | list[_Part] | None = None
    call_id: str = ""
    output: str | list[_Part] = ""


class _Tool(msgspec.Struct):
    """A tool; the fields are those of the one for images."""

    type: str = ""
    size: str = "1024x1024"
    quality: str = "high"
    partial_images: int = 0


class _Request(msgspec.Struct):
    model: str
    input: str | list[_Item]
    stream: bool | None = False
    include: list[str] | None = None
    tools: list[_Tool] | None = None


class MockOpenAIResponses:
    name: ApiName = "openai-responses"
    resumes = True
    route = re.compile(r"/v1/responses")

    def parse(
        self, route: re.Match[str], query: Mapping[str, str], headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> ParsedBody:
        # Nothing is stored: after a `previous_response_id` the turns are counted in the new input alone.
        request = decode_as(body, _Request)
        items = [_Item(role="user", content=request.input)] if isinstance(request.input, str) else request.input
        history = [_history_items(item) for item in items]
        return ParsedBody(model=request.model, stream=bool(request.stream), history_field="input", messages=history)

    def error(self, status: int, message: str) -> bytes:
        return _encode(error_object(status, message))

    def error_event(self, status: int, message: str) -> bytes:
        code = "rate_limit_exceeded" if status == 429 else "server_error"
        event = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": 0}
        return b"event: error\ndata: %b\n\n" % _encode(event)

    def stream(self, reply: Reply, request: ModelRequest) -> bytes:
        begun = _response(request, "in_progress", output=[], usage=None)
        events: list[Json] = [{"type": "response.created", "response": begun}]
        if request.body.get("background"):
            queued = _response(request, "queued", output=[], usage=None)
            events.insert(0, {"type": "response.queued", "response": queued})
        events.append({"type": "response.in_progress", "response": begun})
        for index, item in enumerate(_items(reply, request)):
            events.append({"type": "response.output_item.added", "output_index": index, "item": item.opened})
            at: Json = {"item_id": item.complete["id"], "output_index": index}
            events += [{**event, **at} for event in item.events]
            events.append({"type": "response.output_item.done", "output_index": index, "item": item.complete})
        ended = _ended(reply, request)
        events.append({"type": f"response.{ended['status']}", "response": ended})
        numbered = ({**event, "sequence_number": number} for number, event in enumerate(events))
        return b"".join(b"event: %b\ndata: %b\n\n" % (str(e["type"]).encode(), _encode(e)) for e in numbered)

    def body(self, reply: Reply, request: ModelRequest) -> bytes:
        return _encode(_ended(reply, request))

    def id_of(self, request: ModelRequest) -> str:
        return f"resp_{request.key[:28]}"

    def without_output(self, request: ModelRequest, status: str) -> bytes:
        """The response of a job that has no output (yet)."""
        return _encode(_response(request, status, output=[], usage=None))


mock_api = MockOpenAIResponses()


class _Composed(msgspec.Struct):
    """One item of the output: as it is announced, the events inside of it, and complete."""

    opened: Json
    events: list[Json]
    complete: Json


def _history_items(item: _Item) -> tuple[HistoryItem, ...]:
    match item.type, item.role:
        case "message", "user":
            return (HistoryItem(role="user", text=_text(item.content)),)
        case "message", "system" | "developer":
            return ()
        case "function_call" | "custom_tool_call", _:
            return (HistoryItem(role="model", calls=(item.call_id,)),)
        case "function_call_output" | "custom_tool_call_output", _:
            return (HistoryItem(role="tool", text=_text(item.output), call_id=item.call_id),)
        case _:
            return (HistoryItem(role="model", text=_text(item.content)),)


def _text(content: str | list[_Part] | None) -> str:
    return join_texts(part.text for part in content) if isinstance(content, list) else content or ""


def _items(reply: Reply, request: ModelRequest) -> Iterator[_Composed]:
    key = request.key[:24]
    if reply.thinking:
        yield _reasoning(reply, request, f"rs_{key}")
    if reply.text:
        yield _message(reply, f"msg_{key}")
    for number, picture in enumerate(reply.pictures):
        yield _picture(picture, request, f"ig_{key}{number:02d}")
    for number, call in enumerate(reply.tool_calls):
        family, field = ("custom_tool_call", "input") if call.free_text else ("function_call", "arguments")
        head: Json = {
            "id": f"{'ctc' if call.free_text else 'fc'}_{key}{number:02d}",
            "type": family,
            "call_id": call.id or f"call_{key[:20]}{number:02d}",
            "name": call.name,
        }
        kind, named = f"response.{family}_{field}", {} if call.free_text else {"name": call.name}
        deltas: list[Json] = [
            {"type": f"{kind}.delta", "delta": fragment} for fragment in reply.argument_deltas(call.raw)
        ]
        yield _Composed(
            opened={**head, field: "", "status": "in_progress"},
            events=[*deltas, {"type": f"{kind}.done", **named, field: call.raw}],
            complete={**head, field: call.raw, "status": "completed"},
        )


def _reasoning(reply: Reply, request: ModelRequest, item_id: str) -> _Composed:
    head: Json = {"id": item_id, "type": "reasoning"}
    complete: Json = {**head, "summary": [{"type": "summary_text", "text": reply.thinking}]}
    if _ENCRYPTED in (decode_as(request.body, _Request).include or ()):
        complete["encrypted_content"] = reply.signature
    kind, at = "response.reasoning_summary", {"summary_index": 0}
    return _Composed(
        opened={**head, "summary": []},
        events=[
            {"type": f"{kind}_part.added", **at, "part": {"type": "summary_text", "text": ""}},
            *({"type": f"{kind}_text.delta", **at, "delta": piece} for piece in reply.text_deltas(reply.thinking)),
            {"type": f"{kind}_text.done", **at, "text": reply.thinking},
            {"type": f"{kind}_part.done", **at, "part": {"type": "summary_text", "text": reply.thinking}},
        ],
        complete=complete,
    )


def _message(reply: Reply, item_id: str) -> _Composed:
    head: Json = {"id": item_id, "type": "message", "role": "assistant"}
    empty: Json = {"type": "output_text", "annotations": [], "logprobs": [], "text": ""}
    part: Json = {**empty, "text": reply.text}
    at, more = {"content_index": 0}, {"logprobs": list[object]()}
    kind = "response.output_text"
    return _Composed(
        opened={**head, "status": "in_progress", "content": []},
        events=[
            {"type": "response.content_part.added", **at, "part": empty},
            *({"type": f"{kind}.delta", **at, "delta": piece, **more} for piece in reply.text_deltas(reply.text)),
            {"type": f"{kind}.done", **at, "text": reply.text, **more},
            {"type": "response.content_part.done", **at, "part": part},
        ],
        complete={
            **head,
            "status": "incomplete" if reply.finish_reason in _INCOMPLETE else "completed",
            "content": [part],
        },
    )


def _picture(picture: Picture, request: ModelRequest, item_id: str) -> _Composed:
    tools = decode_as(request.body, _Request).tools or []
    tool = next((tool for tool in tools if tool.type == "image_generation"), None)
    if tool is None:
        raise HttpError(501, "a picture needs the request's image_generation tool")
    head: Json = {"id": item_id, "type": "image_generation_call"}
    form: Json = {"size": tool.size, "quality": tool.quality, "background": "opaque"}
    form["output_format"] = picture.media_type.removeprefix("image/")
    kind = "response.image_generation_call"
    previews: list[Json] = [
        {"type": f"{kind}.partial_image", "partial_image_index": i, "partial_image_b64": b64encode(preview).decode()}
        for i, preview in enumerate(picture.previews[: tool.partial_images])
    ]
    return _Composed(
        opened={**head, "status": "in_progress"},
        events=[
            {"type": f"{kind}.in_progress"},
            {"type": f"{kind}.generating"},
            *({**preview, **form} for preview in previews),
            {"type": f"{kind}.completed"},
        ],
        complete={
            **head,
            **form,
            "status": "completed",
            "result": b64encode(picture.data).decode(),
            "revised_prompt": picture.revised_prompt,
        },
    )


def _ended(reply: Reply, request: ModelRequest) -> Json:
    reason = _INCOMPLETE.get(reply.finish_reason)
    return _response(
        request,
        "incomplete" if reason else "completed",
        output=[item.complete for item in _items(reply, request)],
        usage=_usage(reply),
        incomplete_details={"reason": reason} if reason else None,
    )


def _response(request: ModelRequest, status: str, **fields: object) -> Json:
    """The response object, which repeats the request's settings."""
    return {
        "id": f"resp_{request.key[:28]}",
        "object": "response",
        "created_at": CREATED,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": request.body.get("instructions"),
        "metadata": {},
        "model": request.model,
        "parallel_tool_calls": True,
        "temperature": request.body.get("temperature", 1.0),
        "tool_choice": request.body.get("tool_choice", "auto"),
        "tools": request.body.get("tools", []),
        "top_p": request.body.get("top_p", 1.0),
        **fields,
    }


def _usage(reply: Reply) -> Json:
    usage = reply.reported_usage
    given, written = usage.input or 0, usage.output or 0
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": usage.cache_read or 0, "cache_write_tokens": usage.cache_write or 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning or 0},
        "total_tokens": given + written if usage.total is None else usage.total,
    }
