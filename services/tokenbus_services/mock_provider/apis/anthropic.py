"""Anthropic Messages. Sources: "Messages", "Streaming messages" and "Errors" of the Claude API documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

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

_STOP_REASONS: dict[Finish, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_use": "tool_use",
    "content_filter": "refusal",
}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}

_encode = msgspec.json.Encoder().encode


class _Block(msgspec.Struct):
    type: str
    text: str = ""
    id: str = ""
    tool_use_id: str = ""
    content: Any = None


class _Message(msgspec.Struct):
    role: Literal["user", "assistant"]
    content: str | list[_Block]


class _Request(msgspec.Struct):
    model: str
    max_tokens: Annotated[int, Meta(ge=1)]
    messages: Annotated[list[_Message], Meta(min_length=1)]
    stream: bool = False
    stop_sequences: tuple[str, ...] = ()


class MockAnthropic:
    """The Messages API."""

    name: ApiName = "anthropic"
    route = re.compile(r"/v1/messages")

    def parse(
        self, route: re.Match[str], query: Mapping[str, str], headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> ParsedBody:
        if "anthropic-version" not in headers:
            raise HttpError(400, "anthropic-version: header is required")
        request = decode_as(body, _Request)
        return ParsedBody(
            model=request.model,
            stream=request.stream,
            history_field="messages",
            messages=[tuple(_history_items(message)) for message in request.messages],
            stop_strings=request.stop_sequences,
        )

    def error(self, status: int, message: str) -> bytes:
        kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return _encode({"type": "error", "error": {"type": kind, "message": message}})

    def error_event(self, status: int, message: str) -> bytes:
        return b"event: error\ndata: %b\n\n" % self.error(status, message)

    def stream(self, reply: Reply, request: ModelRequest) -> bytes:
        usage = _usage(reply)
        usage_so_far = {**usage, "output_tokens": 1}
        opening: dict[str, object] = {"content": [], "stop_reason": None, "usage": usage_so_far}
        events = [_event("message_start", message={**_envelope(request), **opening})]
        for index, block in enumerate(_blocks(reply, request)):
            events.append(_event("content_block_start", index=index, content_block=block.opened))
            if index == 0:
                events.append(_event("ping"))
            events += [_event("content_block_delta", index=index, delta=delta) for delta in block.deltas]
            events.append(_event("content_block_stop", index=index))
        ending = _ending(reply)
        events.append(_event("message_delta", delta=ending, usage=usage))
        events.append(_event("message_stop"))
        return b"".join(events)

    def body(self, reply: Reply, request: ModelRequest) -> bytes:
        return _encode(
            {
                **_envelope(request),
                "content": [block.complete for block in _blocks(reply, request)],
                **_ending(reply),
                "usage": _usage(reply),
            }
        )


mock_api = MockAnthropic()


class _Composed(msgspec.Struct):
    """One content block: as opened in a stream, its deltas, and complete."""

    opened: dict[str, object]
    deltas: list[dict[str, object]]
    complete: dict[str, object]


def _history_items(message: _Message) -> Iterator[HistoryItem]:
    blocks = [_Block(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    text = join_texts(block.text for block in blocks if block.type == "text")
    if message.role == "assistant":
        yield HistoryItem(
            role="model", text=text, calls=tuple(block.id for block in blocks if block.type == "tool_use")
        )
        return
    results = [block for block in blocks if block.type == "tool_result"]
    for block in results:
        yield HistoryItem(role="tool", text=_text_of(block.content), call_id=block.tool_use_id)
    if len(results) < len(blocks):
        yield HistoryItem(role="user", text=text)


def _text_of(content: Any) -> str:
    """The text of a tool result: a string, or the text blocks of a list."""
    if content is None or isinstance(content, str):
        return content or ""
    return join_texts(block.text for block in decode_as(content, list[_Block]))


def _blocks(reply: Reply, request: ModelRequest) -> Iterator[_Composed]:
    if reply.thinking:
        yield _Composed(
            opened={"type": "thinking", "thinking": "", "signature": ""},
            deltas=[
                *({"type": "thinking_delta", "thinking": piece} for piece in reply.text_deltas(reply.thinking)),
                {"type": "signature_delta", "signature": reply.signature},
            ],
            complete={"type": "thinking", "thinking": reply.thinking, "signature": reply.signature},
        )
    if reply.text:
        yield _Composed(
            opened={"type": "text", "text": ""},
            deltas=[{"type": "text_delta", "text": piece} for piece in reply.text_deltas(reply.text)],
            complete={"type": "text", "text": reply.text},
        )
    for number, call in enumerate(reply.tool_calls):
        head = {"type": "tool_use", "id": call.id or f"toolu_{request.key[:20]}{number:02d}", "name": call.name}
        fragments = ["", *reply.argument_deltas(call.raw)]  # the first fragment of a real stream is empty
        yield _Composed(
            opened={**head, "input": {}},
            deltas=[{"type": "input_json_delta", "partial_json": fragment} for fragment in fragments],
            complete={**head, "input": _parsed(call)},
        )


def _ending(reply: Reply) -> dict[str, object]:
    reason = "stop_sequence" if reply.stop_string else _STOP_REASONS[reply.finish_reason]
    return {"stop_reason": reason, "stop_sequence": reply.stop_string or None}


def _parsed(call: ToolCall) -> object:
    """The arguments as an object for a body. A stream can carry broken JSON, a body cannot."""
    try:
        return msgspec.json.decode(call.raw)
    except msgspec.DecodeError:
        return {}


def _envelope(request: ModelRequest) -> dict[str, object]:
    return {
        "id": f"msg_{request.key[:24]}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "stop_sequence": None,
    }


def _usage(reply: Reply) -> dict[str, object]:
    usage = reply.reported_usage
    counts: dict[str, object] = {
        "input_tokens": usage.input or 0,
        "cache_creation_input_tokens": usage.cache_write or 0,
        "cache_read_input_tokens": usage.cache_read or 0,
        "output_tokens": usage.output or 0,
    }
    if usage.reasoning is not None:
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning}
    return counts


def _event(kind: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))
