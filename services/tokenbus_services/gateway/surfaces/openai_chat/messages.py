"""Messages and content parts of Chat Completions as those of the bus. Pure."""

from __future__ import annotations

import re
from typing import Literal, cast

import msgspec

from tokenbus.events.requests import (
    Base64Source,
    ContentPart,
    DocumentPart,
    ExtraPart,
    FileSource,
    ImagePart,
    Message,
    Source,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    UrlSource,
)
from tokenbus_services.gateway.problem import invalid, unsupported
from tokenbus_services.gateway.surfaces.fields import Fields, Json

_ROLES = ("system", "developer", "user", "assistant", "tool")
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)(?:;[\w=.+-]+)*;base64,(.*)", re.DOTALL)
_IGNORED = ("reasoning_content", "reasoning", "reasoning_details", "annotations", "refusal", "parsed")
"""Fields of an assistant message that clients send back. Thinking is unsigned here, so no provider would take it."""


def messages_of(body: Fields) -> list[Message]:
    """Read the conversation. Raises Refusal."""
    messages: list[Message] = []
    for fields in body.each("messages"):
        role = fields.needed("role", fields.one_of("role", _ROLES))
        messages.append(_message(fields, role))
    if not messages:
        raise invalid("messages", "at least one message is required")
    return messages


def _message(fields: Fields, role: str) -> Message:
    name = fields.text("name")
    match role:
        case "tool":
            tool_id = fields.needed("tool_call_id", fields.text("tool_call_id"))
            content = _content(fields)
            parts = content if isinstance(content, str) else _texts_only(content, fields)
            return Message(role="tool", content=[ToolResultPart(tool_id=tool_id, tool_name=name, content=parts)])
        case "assistant":
            return Message(role="assistant", content=_assistant(fields), participant=name)
        case "developer":
            return Message(role="system", content=_content(fields), participant=name)
        case _:
            return Message(role=cast(Literal["system", "user"], role), content=_content(fields), participant=name)


def _assistant(fields: Fields) -> str | list[ContentPart]:
    for name in _IGNORED:
        fields.take(name)
    fields.refuse("is not supported by this gateway", "function_call")
    content: str | list[ContentPart] = "" if not fields.has("content") else _content(fields)
    if spoken := _spoken(fields):
        content = [*(content if isinstance(content, list) else []), spoken]
    calls: list[ContentPart] = []
    for call in fields.each("tool_calls"):
        call.take("index")  # of a stream's delta, sent back by some clients
        kind = call.needed("type", call.one_of("type", ("function", "custom")))
        field = "input" if kind == "custom" else "arguments"
        function = call.needed(kind, call.fields(kind))
        calls.append(
            ToolCallPart(
                tool_id=call.needed("id", call.text("id")),
                tool_name=function.needed("name", function.text("name")),
                arguments=function.needed(field, function.text(field)),
                free_text=kind == "custom",
            )
        )
    if not calls:
        return content
    parts: list[ContentPart] = [TextPart(text=content)] if isinstance(content, str) and content else []
    return [*(content if isinstance(content, list) else parts), *calls]


def _spoken(fields: Fields) -> TextPart | None:
    """What the model said as sound: a text for all providers, by its id for the one that made it."""
    audio = fields.fields("audio")
    if audio is None:
        return None
    said, own = audio.text("transcript"), audio.text("id")
    audio.take_rest()
    return TextPart(text=said, opaque={"audio": own, "api": "openai-chat"} if own else None) if said else None


def _content(fields: Fields) -> str | list[ContentPart]:
    if fields.is_text("content"):
        return fields.text("content") or ""
    if not isinstance(fields.peek("content"), list):
        raise invalid(fields.path("content"), "must be a string or a list of parts")
    if fields.value.get("role") == "user":
        return fields.each_read("content", lambda part: _part(part, whole=True), _raw)
    return fields.each_read("content", lambda part: _part(part, whole=False), None)


def _raw(part: Json) -> ContentPart:
    return ExtraPart(name=f"openai-chat.{part.get('type')}", json=msgspec.json.encode(part).decode())


def _cache_mark(part: Fields, *, whole: bool) -> bool:
    """Whether the prompt is cached up to here. A provider with this API gets the mark with the ``whole`` part, where it
    can have parts.
    """
    if part.reading.passes and whole:
        part.hint("prompt_cache_breakpoint")
    if (mark := part.take("prompt_cache_breakpoint")) and part.reading.passes:
        part.reading.leave_out(part.path("prompt_cache_breakpoint"))
    return bool(mark)


def _part(part: Fields, *, whole: bool) -> ContentPart:
    cache = _cache_mark(part, whole=whole)
    match part.needed("type", part.one_of("type", ("text", "image_url", "file", "refusal"))):
        case "text":
            return TextPart(text=part.needed("text", part.text("text")), cache=cache)
        case "refusal":
            return TextPart(text=part.needed("refusal", part.text("refusal")))
        case "image_url":
            image = part.needed("image_url", part.fields("image_url"))
            image.hint("detail", "auto")
            return ImagePart(source=_source(image.needed("url", image.text("url")), image.path("url")), cache=cache)
        case _:
            file = part.needed("file", part.fields("file"))
            title, data, file_id = file.text("filename"), file.text("file_data"), file.text("file_id")
            if file_id is not None:
                return DocumentPart(source=FileSource(file_id=file_id), title=title, cache=cache)
            source = _source(file.needed("file_data", data), file.path("file_data"))
            return DocumentPart(source=source, title=title, cache=cache)


def _source(url: str, where: str) -> Source:
    if found := _DATA_URL.fullmatch(url):
        return Base64Source(media_type=found[1], data=found[2])
    if url.startswith(("http://", "https://")):
        return UrlSource(url=url)
    raise invalid(where, "must be an http(s) URL, or a data: URL in base64")


def _texts_only(content: list[ContentPart], fields: Fields) -> list[TextPart | ImagePart]:
    parts = [part for part in content if isinstance(part, TextPart | ImagePart)]
    if len(parts) != len(content):
        raise unsupported(fields.path("content"), "a tool's result holds text and images only")
    return parts
