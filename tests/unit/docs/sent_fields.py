"""Requests with each object of a request in them, and another value for each field: an API to which a field is sent
gets another body for another value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Object = dict[str, Any]


class Sent(NamedTuple):
    """An object, other values of its fields, and the requests that contain it."""

    example: Object
    others: Object
    requests: tuple[Callable[[Object], Object], ...]


_HI: Object = {"role": "user", "content": "Hi"}
_PNG: Object = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
_PDF: Object = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
_IMAGE: Object = {"type": "image", "source": _PNG}
_CALL: Object = {"type": "tool_call", "tool_id": "toolu_01", "tool_name": "weather", "arguments": "{}"}
_RESULT: Object = {"type": "tool_result", "tool_id": "toolu_01", "content": "Rain."}
_TOOLS: Object = {"tools": [{"name": "weather", "parameters": {"type": "object"}}, {"name": "clock"}]}
_GRAMMAR: Object = {"type": "grammar", "syntax": "regex", "definition": "x"}
_NAMED: Object = {"role": "user", "content": "Hi", "participant": "Ann"}
_PREFILL: Object = {"mode": "prefill", "participant": "Claude", "messages": [_NAMED, _NAMED]}


def _of_user(part: Object) -> Object:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]}


def _of_model(part: Object) -> Object:
    return {"messages": [_HI, {"role": "assistant", "content": [part, {"type": "text", "text": "Hello"}]}, _HI]}


def _called(call: Object, result: Object) -> Object:
    answered = {"role": "tool", "content": [result | {"tool_id": call["tool_id"]}]}
    return {**_TOOLS, "messages": [_HI, {"role": "assistant", "content": [call]}, answered]}


def _image_of(source: Object) -> Object:
    return _of_user({"type": "image", "source": source})


def _document_of(source: Object) -> Object:
    return _of_user({"type": "document", "source": source})


SENT = {
    "a message": Sent(
        _HI,
        {"role": "assistant", "content": "Hello", "participant": "Ann", "id": "m1"},
        (
            lambda message: {"messages": [message]},
            lambda message: {"messages": [_HI, message, _HI], "names_in_text": True},
        ),
    ),
    "a text part": Sent({"type": "text", "text": "Hi"}, {"text": "Hello", "cache": True}, (_of_user,)),
    "a thinking part": Sent(
        {"type": "thinking", "text": "It may rain.", "signature": "EqQBCg"},
        {"text": "It will rain.", "signature": "EqQBCh"},
        (_of_model, lambda part: _of_model(part) | {"unsigned_thinking": "text"}),
    ),
    "an image part": Sent(
        _IMAGE, {"source": {**_PNG, "data": "iVBORw0KGgoA"}, "cache": True, "detail": "low"}, (_of_user,)
    ),
    "a document part": Sent(
        {"type": "document", "source": _PDF},
        {
            "source": {**_PDF, "data": "JVBERi0x"},
            "title": "Report",
            "cache": True,
            "citations": True,
            "context": "Draft.",
        },
        (_of_user,),
    ),
    "a tool call part": Sent(
        _CALL,
        {"tool_id": "toolu_02", "tool_name": "clock", "arguments": '{"city":"Oslo"}', "free_text": True},
        (lambda call: _called(call, _RESULT),),
    ),
    "a tool result part": Sent(
        _RESULT,
        {"tool_id": "toolu_02", "content": "Sun.", "tool_name": "clock", "is_error": True, "cache": True},
        (lambda result: _called(_CALL | {"tool_id": result["tool_id"]}, result),),
    ),
    "an extra part": Sent(
        {"type": "extra", "name": "web_search_call", "json": '{"type":"web_search_call","id":"ws_1"}'},
        {"name": "web_search", "json": '{"type":"web_search_call","id":"ws_2"}'},
        (_of_model,),
    ),
    "a base64 source": Sent(
        _PNG,
        {"media_type": "image/webp", "data": "iVBORw0KGgoA"},
        (_image_of, lambda source: _document_of(source | _PDF)),
    ),
    "a url source": Sent(
        {"type": "url", "url": "https://example.org/cat"},
        {"url": "https://example.org/dog", "media_type": "image/gif"},
        (_image_of, _document_of),
    ),
    "a file source": Sent(
        {"type": "file", "file_id": "file_1"},
        {"file_id": "file_2", "media_type": "image/png"},
        (_image_of, _document_of),
    ),
    "a tool": Sent(
        _TOOLS["tools"][0],
        {
            "name": "clock",
            "description": "The time.",
            "parameters": {"type": "object", "title": "t"},
            "format": {"type": "text"},
            "strict": True,
            "approval": "always",
            "kind": "client",
            "result": {"type": "string"},
            "timeout_s": 5,
        },
        (lambda tool: {"tools": [tool]},),
    ),
    "a grammar format": Sent(
        _GRAMMAR,
        {"syntax": "lark", "definition": "start: /y/"},
        (lambda grammar: {"tools": [{"name": "sql", "format": grammar}]},),
    ),
    "a tool choice": Sent({"name": "weather"}, {"name": "clock"}, (lambda choice: {**_TOOLS, "tool_choice": choice},)),
    "thinking options": Sent(
        {},
        {"enabled": False, "budget_tokens": 2000, "effort": "low", "display": "omitted"},
        (lambda options: {"thinking": options},),
    ),
    "an output schema": Sent(
        {"schema": {"type": "object"}},
        {"schema": {"type": "object", "properties": {"city": {"type": "string"}}}, "name": "city", "strict": True},
        (lambda schema: {"output_schema": schema},),
    ),
    "prefill options": Sent(
        {"end_of_turn": "<|end|>"},
        {
            "delimiter": "\n\n",
            "end_of_turn": "<|stop|>",
            "stop_on_end_of_turn": False,
            "first_user_message": "Go on.",
            "names_once": True,
            "unnamed": ["Ann"],
        },
        (lambda options: _PREFILL | {"prefill": options},),
    ),
    "image options": Sent(
        {},
        {
            "size": "1024x1024",
            "aspect_ratio": "16:9",
            "quality": "low",
            "format": "png",
            "background": "opaque",
            "model": "gpt-image-2",
            "count": 2,
            "previews": 2,
            "mask": _IMAGE,
            "deliver": "base64",
        },
        (lambda options: {"images": options}, lambda options: _of_user(_IMAGE) | {"images": options}),
    ),
}
"""By the name of the object on the page. What is missing here is the bus's own: no API sees it."""
OF_ONE_API = {
    "extra": "the API that it names",
    "opaque": "the API that it names",
    "opaque_blobs": "the API that it names",
}
