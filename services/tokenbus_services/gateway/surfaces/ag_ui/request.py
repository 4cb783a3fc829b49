"""`RunAgentInput` as a request of the bus. Pure.

Model and options of the bus are in `forwardedProps`. `state` belongs to the client: no model sees it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenbus.events.requests import (
    Base64Source,
    ContentPart,
    DocumentPart,
    FileSource,
    Generate,
    ImagePart,
    Message,
    Source,
    TextPart,
    ThinkingPart,
    Tool,
    ToolCallPart,
    ToolResultPart,
    UrlSource,
)
from tokenbus_services.gateway.problem import invalid, unsupported
from tokenbus_services.gateway.surfaces.contract import GatewayRequest, Translated, TranslationRules
from tokenbus_services.gateway.surfaces.extension import extension
from tokenbus_services.gateway.surfaces.fields import Fields, Json, json_body

DEFAULT_MODEL = "default"
"""The alias of requests that name no model."""


def translate(request: GatewayRequest, rules: TranslationRules) -> Translated:
    """Translate the body of `HttpAgent`. Raises Refusal."""
    body = Fields(json_body(request.body), drop=rules.drop_unsupported)
    thread = body.needed("threadId", body.text("threadId"))
    run = run_id(body)
    for name in ("protocolVersion", "parentRunId"):
        body.text(name)
    body.take("state")
    body.only("resume", [], why="has no effect: no run of the bus waits for an answer")
    context = list(_context(body))
    props = body.fields("forwardedProps") or Fields({}, "forwardedProps")
    own = extension(props, request.headers, rules)
    if own.visible is False:
        raise unsupported("forwardedProps.tokenbus.visible", "a chat shows its text")
    model = rules.models.resolve(props.text("model") or request.query.get("model") or DEFAULT_MODEL)
    tools = list(_tools(body))
    if tools and own.tools:
        raise unsupported("tools", "tools of the deployment and of the client in one request are not supported")
    messages = _messages(body)
    if not messages:
        raise invalid("messages", "they have no content")
    depth = 10 if own.max_tool_depth is None else own.max_tool_depth
    generate = Generate(
        provider=model.provider,
        model=model.model,
        fallback=None if own.on_failure == "fail" else model.fallbacks,
        messages=messages,
        system="\n\n".join(context) or None,
        tools=tools or own.tools,
        max_tool_depth=depth if own.tools else 0,
        temperature=props.number("temperature"),
        top_p=props.number("topP"),
        max_tokens=props.whole("maxTokens", 1),
        extra=own.extra,
        **own.generate,
    )
    props.end()
    body.end()
    return Translated(
        generate=generate,
        stream=True,
        model=model.name,
        echo={"thread": thread, "run": run},
        on_disconnect=own.on_disconnect or "continue",
    )


def run_id(body: Fields) -> str:
    """The client's id of its run. Raises Refusal."""
    run = body.needed("runId", body.text("runId"))
    if not 0 < len(run) <= 256:
        raise invalid("runId", "must have 1 to 256 characters")
    return run


def _context(body: Fields) -> Any:
    for entry in body.each("context"):
        description = entry.needed("description", entry.text("description"))
        yield f"{description}:\n{entry.needed('value', entry.text('value'))}"


def _tools(body: Fields) -> Any:
    for tool in body.each("tools"):
        tool.take("metadata")
        yield Tool(
            name=tool.needed("name", tool.text("name")),
            description=tool.text("description"),
            parameters=tool.json("parameters") or {"type": "object"},
        )


def _messages(body: Fields) -> list[Message]:
    """The conversation. Thinking goes into the assistant's message that follows it."""
    messages: list[Message] = []
    thinking: list[ContentPart] = []
    for message in body.each("messages"):
        for name in ("id", "metadata", "subagentRunId"):
            message.take(name)
        role = message.one_of("role", ("developer", "system", "user", "assistant", "tool", "reasoning", "activity"))
        match role:
            case "developer" | "system":
                messages.append(Message(role="system", content=message.text("content") or ""))
                message.text("name")
                message.text("encryptedValue")
            case "user":
                message.text("encryptedValue")
                content = _content(message)
                if content:
                    messages.append(Message(role="user", content=content, participant=message.text("name")))
            case "reasoning":
                text, back = message.text("content") or "", _given_back(message)
                if text or back:
                    thinking.append(ThinkingPart(text=text, **back))
            case "assistant":
                parts = [*thinking, *_content_of(message)]
                thinking = []
                if parts:
                    messages.append(Message(role="assistant", content=parts))
            case "tool":
                _add_result(messages, message)
            case _:  # of the screen alone
                message.take("activityType")
                message.take("content")
    return messages


def _content_of(message: Fields) -> list[ContentPart]:
    message.text("name")
    text, back = message.text("content"), _given_back(message)
    back.pop("signature", None)
    parts: list[ContentPart] = [TextPart(text=text, **back)] if text else []
    for call in message.each("toolCalls"):
        call.take("metadata")
        call.only("type", "function")
        function = call.needed("function", call.fields("function"))
        kept = _given_back(call)
        kept.pop("signature", None)
        parts.append(
            ToolCallPart(
                tool_id=call.needed("id", call.text("id")),
                tool_name=function.needed("name", function.text("name")),
                arguments=function.text("arguments") or "{}",
                **kept,
            )
        )
        function.end()
    return parts


def _add_result(messages: list[Message], message: Fields) -> None:
    """Add a tool's result to those of the same turn."""
    error = message.text("error")
    message.text("encryptedValue")
    parts = _content(message)
    if any(isinstance(part, DocumentPart) for part in parts):
        raise unsupported(message.path("content"), "a document in a tool's result is not supported")
    content: Any = "".join(part.text for part in parts if isinstance(part, TextPart))
    if any(isinstance(part, ImagePart) for part in parts):
        content = parts
    result = ToolResultPart(
        tool_id=message.needed("toolCallId", message.text("toolCallId")),
        content=content or error or "",
        is_error=error is not None,
    )
    if messages and messages[-1].role == "tool" and isinstance(messages[-1].content, list):
        messages[-1].content.append(result)
    else:
        messages.append(Message(role="tool", content=[result]))


def _content(message: Fields) -> list[ContentPart]:
    """A text, or parts."""
    value = message.take("content")
    if isinstance(value, str):
        return [TextPart(text=value)] if value else []
    if value is None:
        return []
    return [
        _part(part) for part in Fields({"content": value}, message.path("content")[: -len(".content")]).each("content")
    ]


def _part(part: Fields) -> ContentPart:
    for name in ("id", "metadata"):
        part.take(name)
    match part.one_of("type", ("text", "image", "document")):
        case "text":
            return TextPart(text=part.needed("text", part.text("text")))
        case "image":
            return ImagePart(source=_source(part))
        case _:
            return DocumentPart(source=_source(part))


def _source(part: Fields) -> Source:
    source = part.needed("source", part.fields("source"))
    kind = source.one_of("type", ("data", "url", "file"))
    value = source.needed("value", source.text("value"))
    media_type = source.text("mimeType")
    source.text("provider")
    source.end()
    match kind:
        case "data":
            return Base64Source(media_type=source.needed("mimeType", media_type), data=value)
        case "url":
            return UrlSource(url=value)
        case _:
            return FileSource(file_id=value, media_type=media_type)


class _Kept(msgspec.Struct, frozen=True):
    signature: str | None = None
    opaque: dict[str, str] | None = None
    opaque_blobs: dict[str, str] | None = None


def _given_back(fields: Fields) -> Json:
    """What the encoder put into `encryptedValue`; a value of another server is left out."""
    value = fields.text("encryptedValue")
    if value is None:
        return {}
    try:
        kept = msgspec.json.decode(value, type=_Kept)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return {name: each for name, each in msgspec.structs.asdict(kept).items() if each}
