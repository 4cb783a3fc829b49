"""OpenAI Responses: recordings only. Source: "Responses" and "Streaming events" of the OpenAI API reference."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tokenbus.providers.api import ApiName
from tokenbus_services.replay.asked import Heard, Refused, Said, joined, read_as
from tokenbus_services.replay.openai_chat import error_object

_encode = msgspec.json.Encoder().encode


class _Part(msgspec.Struct):
    text: str = ""


class _Item(msgspec.Struct):
    """One item of the input: a message where it has a role, else as its ``type`` says."""

    type: str = "message"
    role: str = ""
    content: str | list[_Part] | None = None
    call_id: str = ""
    output: str | list[_Part] = ""


class _Request(msgspec.Struct):
    model: str
    input: str | list[_Item]
    stream: bool | None = False


class OpenAIResponses:
    """The Responses API."""

    name: ApiName = "openai-responses"
    route = re.compile(r"/v1/responses")

    def hear(
        self, route: re.Match[str], query: Mapping[str, str], headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> Heard:
        if body.get("previous_response_id"):
            raise Refused(400, "previous_response_id: the replay provider keeps no responses; send the whole input")
        request = read_as(body, _Request)
        items = [_Item(role="user", content=request.input)] if isinstance(request.input, str) else request.input
        said = [_said(item) for item in items]
        return Heard(model=request.model, stream=bool(request.stream), history="input", said=said)

    def error(self, status: int, message: str) -> bytes:
        return _encode(error_object(status, message))

    def error_event(self, status: int, message: str) -> bytes:
        code = "rate_limit_exceeded" if status == 429 else "server_error"
        event = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": 0}
        return b"event: error\ndata: %b\n\n" % _encode(event)


dialect = OpenAIResponses()


def _said(item: _Item) -> tuple[Said, ...]:
    match item.type, item.role:
        case "message", "user":
            return (Said(by="user", text=_text(item.content)),)
        case "message", "system" | "developer":
            return ()
        case "function_call" | "custom_tool_call", _:
            return (Said(by="model", calls=(item.call_id,)),)
        case "function_call_output" | "custom_tool_call_output", _:
            return (Said(by="tool", text=_text(item.output), answers=item.call_id),)
        case _:
            return (Said(by="model", text=_text(item.content)),)


def _text(content: str | list[_Part] | None) -> str:
    return joined(part.text for part in content) if isinstance(content, list) else content or ""
