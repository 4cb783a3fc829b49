"""Messages and content blocks of the Messages API as messages and parts of the bus. Pure."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Literal, cast

import msgspec

from tokenbus.events.requests import (
    Base64Source,
    Cache,
    ContentPart,
    DocumentPart,
    ExtraPart,
    FileSource,
    ImagePart,
    Message,
    Source,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolResultPart,
    UrlSource,
)
from tokenbus_services.gateway.problem import invalid
from tokenbus_services.gateway.surfaces.fields import Fields, Json
from tokenbus_services.gateway.surfaces.hosted import originals
from tokenbus_services.gateway.surfaces.signatures import unpack

Role = Literal["user", "assistant", "system"]
_Readers = Mapping[str, Callable[[Fields], ContentPart]]
_HOSTED = (
    *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
    *("bash_code_execution_tool_result", "mcp_tool_use", "mcp_tool_result"),
)


def messages_of(body: Fields) -> list[Message]:
    """Read the conversation. Raises Refusal."""
    messages: list[Message] = []
    for fields in body.each("messages"):
        role = cast("Role", fields.needed("role", fields.one_of("role", _READERS)))
        messages.append(Message(role=role, content=_content(fields, _READERS[role])))
    if not messages:
        raise invalid("messages", "at least one message is required")
    return messages


def system_of(body: Fields) -> list[TextPart]:
    """Read the system prompt: a string or text blocks. Raises Refusal."""
    if body.is_text("system"):
        text = body.text("system")
        return [TextPart(text=text)] if text else []
    parts: list[TextPart] = []
    for block in body.each("system"):
        block.needed("type", block.one_of("type", ("text",)))
        parts.append(_text(block))
    return parts


def cache_mark(fields: Fields) -> Cache:
    """Read `cache_control`. Raises Refusal for a lifetime that there is not."""
    control = fields.fields("cache_control")
    if control is None:
        return False
    control.one_of("type", ("ephemeral",))
    return "1h" if control.one_of("ttl", ("5m", "1h")) == "1h" else True


def _content(fields: Fields, readers: _Readers) -> str | list[ContentPart]:
    if fields.is_text("content"):
        return fields.text("content") or ""
    if not fields.has("content"):
        raise invalid(fields.path("content"), "this field is required")
    return [part for part in fields.each_read("content", lambda block: _part(block, readers), _raw) if part]


def _raw(block: Json) -> ContentPart | None:
    if block.get("type") in ("tool_use", "tool_result"):
        return None  # the bus pairs them
    return ExtraPart(name=f"anthropic.{block.get('type')}", json=msgspec.json.encode(block).decode())


def _part(block: Fields, readers: _Readers) -> ContentPart | None:
    if block.peek("tokenbus") and block.peek("type") in _HOSTED:
        # What stands for another API's item has it; a result beside its call has none.
        parts = originals(block.take_rest()["tokenbus"].get("items"))
        return parts[0] if parts else None
    return readers[block.needed("type", block.one_of("type", readers))](block)


def _text(block: Fields) -> TextPart:
    block.hint("citations")  # of this API they pass as they are
    return TextPart(text=block.needed("text", block.text("text")), cache=cache_mark(block))


def _image(block: Fields) -> ImagePart:
    block.only("transformations", {})
    return ImagePart(source=_source(block, ("base64", "url", "file")), cache=cache_mark(block))


def _document(block: Fields) -> DocumentPart:
    if citations := block.fields("citations"):
        citations.only("enabled", False, why="only providers of this API make citations when asked")
    source = _source(block, ("base64", "text", "url", "file"))
    return DocumentPart(source=source, title=block.text("title"), cache=cache_mark(block))


def _source(block: Fields, kinds: tuple[str, ...]) -> Source:
    source = block.needed("source", block.fields("source"))
    kind = source.needed("type", source.one_of("type", kinds))

    def needed(name: str) -> str:
        return source.needed(name, source.text(name))

    read: Source
    match kind:
        case "base64":
            read = Base64Source(media_type=needed("media_type"), data=needed("data"))
        case "text":
            source.one_of("media_type", ("text/plain",))
            data = b64encode(needed("data").encode("utf-8", "replace")).decode()
            read = Base64Source(media_type="text/plain", data=data)
        case "url":
            read = UrlSource(url=needed("url"))
        case _:
            read = FileSource(file_id=needed("file_id"))
    return read


def _thinking(block: Fields) -> ThinkingPart:
    text, signature = block.text("thinking") or "", block.text("signature") or ""
    if opaque := unpack(signature):
        return ThinkingPart(text=text, signature=opaque.pop("signature", None), opaque=opaque or None)
    return ThinkingPart(text=text, signature=signature or None)


def _redacted(block: Fields) -> ThinkingPart:
    data = block.needed("data", block.text("data"))
    return ThinkingPart(opaque=unpack(data) or {"redacted": data})


def _tool_use(block: Fields) -> ToolCallPart:
    tool_id, name = block.needed("id", block.text("id")), block.needed("name", block.text("name"))
    arguments = msgspec.json.encode(block.json("input") or {}).decode()
    # The call stays one of the bus, which pairs it with its result; what else it has goes back with it.
    if block.reading.passes and (rest := block.take_rest()):
        return ToolCallPart(
            tool_id=tool_id,
            tool_name=name,
            arguments=arguments,
            opaque={"api": "anthropic", "fields": msgspec.json.encode(rest).decode()},
        )
    cache_mark(block)  # the bus marks no calls; the result that follows is the better place
    if caller := block.fields("caller"):
        caller.only("type", "direct")
    block.take("toolset_name")
    return ToolCallPart(tool_id=tool_id, tool_name=name, arguments=arguments)


def _tool_result(block: Fields) -> ToolResultPart:
    content: str | list[TextPart | ImagePart] = ""
    if block.is_text("content"):
        content = block.text("content") or ""
    elif block.has("content"):
        inside: _Readers = {"text": _text, "image": _image}
        content = cast("list[TextPart | ImagePart]", [_part(inner, inside) for inner in block.each("content")])
    tool_id, failed = block.needed("tool_use_id", block.text("tool_use_id")), block.flag("is_error") or False
    cache = cache_mark(block)
    rest = block.take_rest() if block.reading.passes else {}
    block.take("toolset_name")
    return ToolResultPart(
        tool_id=tool_id, content=content, is_error=failed, cache=cache, extra={"anthropic": rest} if rest else None
    )


_READERS: Mapping[str, _Readers] = {
    "user": {"text": _text, "image": _image, "document": _document, "tool_result": _tool_result},
    "assistant": {"text": _text, "thinking": _thinking, "redacted_thinking": _redacted, "tool_use": _tool_use},
    "system": {"text": _text},
}
