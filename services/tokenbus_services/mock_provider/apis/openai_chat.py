"""OpenAI Chat Completions, with thinking in ``reasoning_content`` as DeepSeek and others have it.

Source: "Chat", "Chat streaming" and "Error codes" of the OpenAI API reference; DeepSeek's guide to its reasoning model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tokenbus.providers.api import ApiName
from tokenbus_services.mock_provider.apis.provider_api import CREATED
from tokenbus_services.mock_provider.reply import Finish, Reply, ToolCall
from tokenbus_services.mock_provider.request import HistoryItem, ModelRequest, ParsedBody, decode_as, join_texts

FINISH_REASONS: dict[Finish, str] = {
    "stop": "stop",
    "length": "length",
    "tool_use": "tool_calls",
    "content_filter": "content_filter",
}
_ERROR_KINDS = {
    401: ("invalid_request_error", "invalid_api_key"),
    404: ("invalid_request_error", "model_not_found"),
    429: ("requests", "rate_limit_exceeded"),
}

_encode = msgspec.json.Encoder().encode


class _Part(msgspec.Struct):
    type: str
    text: str = ""


class _Call(msgspec.Struct):
    id: str


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str = ""


class StreamOptions(msgspec.Struct):
    """What else a stream is to hold."""

    include_usage: bool = False


class Request(msgspec.Struct, kw_only=True):
    """Request fields shared by both completions APIs."""

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: tuple[str, ...] | str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    @property
    def with_usage(self) -> bool:
        """Whether a stream is to end with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class _Request(Request, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1)]


class MockOpenAIChat:
    """The Chat Completions API."""

    name: ApiName = "openai-chat"
    route = re.compile(r"/v1/chat/completions")

    def parse(
        self, route: re.Match[str], query: Mapping[str, str], headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> ParsedBody:
        request = decode_as(body, _Request)
        return ParsedBody(
            model=request.model,
            stream=bool(request.stream),
            history_field="messages",
            messages=[_history_items(message) for message in request.messages],
            stop_strings=request.stops,
        )

    def error(self, status: int, message: str) -> bytes:
        return _encode(error_object(status, message))

    def error_event(self, status: int, message: str) -> bytes:
        return data_event(error_object(status, message))

    def stream(self, reply: Reply, request: ModelRequest) -> bytes:
        with_usage = decode_as(request.body, _Request).with_usage
        head = _head(request, "chat.completion.chunk")

        def chunk(delta: dict[str, object], finish: str | None = None) -> bytes:
            choice: dict[str, object] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
            if finish and reply.stop_string:
                choice["stop_reason"] = reply.stop_string  # as vLLM has it
            # If usage is requested, every chunk has the field, null in all but the last.
            return data_event({**head, "choices": [choice], **({"usage": None} if with_usage else {})})

        events = [chunk(delta) for delta in _deltas(reply, request)]
        events.append(chunk({}, FINISH_REASONS[reply.finish_reason]))
        if with_usage:
            events.append(data_event({**head, "choices": [], "usage": usage_object(reply)}))
        events.append(b"data: [DONE]\n\n")
        return b"".join(events)

    def body(self, reply: Reply, request: ModelRequest) -> bytes:
        message: dict[str, object] = {"role": "assistant", "content": reply.text or None, "refusal": None}
        if reply.thinking:
            message["reasoning_content"] = reply.thinking
        if reply.tool_calls:
            message["tool_calls"] = [
                {"id": _call_id(call, number, request), **_typed(call, {"name": call.name}, call.raw)}
                for number, call in enumerate(reply.tool_calls)
            ]
        finish = FINISH_REASONS[reply.finish_reason]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return _encode({**_head(request, "chat.completion"), "choices": [choice], "usage": usage_object(reply)})


mock_api = MockOpenAIChat()


def error_object(status: int, message: str) -> dict[str, object]:
    """The error object of all OpenAI APIs."""
    kind, code = _ERROR_KINDS.get(status, ("server_error" if status >= 500 else "invalid_request_error", None))
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _history_items(message: _Message) -> tuple[HistoryItem, ...]:
    parts = message.content or ""
    text = parts if isinstance(parts, str) else join_texts(part.text for part in parts)
    match message.role:
        case "assistant":
            return (HistoryItem(role="model", text=text, calls=tuple(call.id for call in message.tool_calls or ())),)
        case "tool":
            return (HistoryItem(role="tool", text=text, call_id=message.tool_call_id),)
        case "user":
            return (HistoryItem(role="user", text=text),)
        case _:
            return ()


def _deltas(reply: Reply, request: ModelRequest) -> Iterator[dict[str, object]]:
    content = "" if reply.text else None
    if reply.thinking:
        yield {"role": "assistant", "content": None, "reasoning_content": ""}
        for piece in reply.text_deltas(reply.thinking):
            yield {"content": None, "reasoning_content": piece}
    else:
        yield {"role": "assistant", "content": content, "refusal": None}
    for piece in reply.text_deltas(reply.text):
        yield {"content": piece}
    for number, call in enumerate(reply.tool_calls):
        head = {"index": number, "id": _call_id(call, number, request), **_typed(call, {"name": call.name}, "")}
        yield {"tool_calls": [head]}
        for fragment in reply.argument_deltas(call.raw):
            yield {"tool_calls": [{"index": number, **_typed(call, {}, fragment)}]}


def _typed(call: ToolCall, head: dict[str, object], text: str) -> dict[str, object]:
    """A call's fields with a piece of its input. A piece that follows the head has no type."""
    kind, field = ("custom", "input") if call.free_text else ("function", "arguments")
    return {**({"type": kind} if head else {}), kind: {**head, field: text}}


def _call_id(call: ToolCall, number: int, request: ModelRequest) -> str:
    return call.id or f"call_{request.key[:20]}{number:02d}"


def _head(request: ModelRequest, kind: str) -> dict[str, object]:
    return {
        "id": f"chatcmpl-{request.key[:28]}",
        "object": kind,
        "created": CREATED,
        "model": request.model,
        "service_tier": "default",
        "system_fingerprint": None,
    }


def usage_object(reply: Reply) -> dict[str, object]:
    """The usage object of both completions APIs."""
    usage = reply.reported_usage
    prompt, completion = usage.input or 0, usage.output or 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion if usage.total is None else usage.total,
        "prompt_tokens_details": {"cached_tokens": usage.cache_read or 0, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning or 0, "audio_tokens": 0},
    }


def data_event(event: dict[str, object]) -> bytes:
    return b"data: %b\n\n" % _encode(event)
