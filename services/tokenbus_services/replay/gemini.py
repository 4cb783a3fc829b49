"""Gemini: recordings only. Source: "Generating content" and "Errors" of the Gemini API reference."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal
from urllib.parse import unquote

import msgspec
from msgspec import Meta

from tokenbus.providers.api import ApiName
from tokenbus_services.replay.asked import Heard, Refused, Said, joined, read_as

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


class _Request(msgspec.Struct):
    contents: Annotated[list[_Content], Meta(min_length=1)]


class Gemini:
    """The generateContent and streamGenerateContent methods."""

    name: ApiName = "gemini"
    route = re.compile(r"/v1beta/models/(?P<model>[^/:]+):(?P<method>generateContent|streamGenerateContent)")

    def hear(
        self, route: re.Match[str], query: Mapping[str, str], headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> Heard:
        stream = route["method"] == "streamGenerateContent"
        if stream and query.get("alt") != "sse":
            # The real API answers with a JSON array then; nothing here asks for one.
            raise Refused(400, "alt: the replay provider streams with alt=sse only")
        said = [tuple(_said(content)) for content in read_as(body, _Request).contents]
        return Heard(model=unquote(route["model"]), stream=stream, history="contents", said=said)

    def error(self, status: int, message: str) -> bytes:
        return _encode({"error": {"code": status, "message": message, "status": _STATUSES.get(status, "INTERNAL")}})

    def error_event(self, status: int, message: str) -> bytes:
        return b"data: %b\r\n\r\n" % self.error(status, message)


dialect = Gemini()


def _said(content: _Content) -> Iterator[Said]:
    text = joined(part.text for part in content.parts)
    if content.role == "model":
        calls = (part.function_call for part in content.parts if part.function_call)
        yield Said(by="model", text=text, calls=tuple(call.id for call in calls if call.id))
        return
    results = [part.function_response for part in content.parts if part.function_response]
    for result in results:
        yield Said(by="tool", text=_encode(result.response).decode(), answers=result.id)
    if len(results) < len(content.parts):
        yield Said(by="user", text=text)
