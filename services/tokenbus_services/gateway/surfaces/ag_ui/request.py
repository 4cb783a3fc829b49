"""`RunAgentInput` as a request of the bus. Pure.

Model and options of the bus are in `forwardedProps`. `state` belongs to the client: no model sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, get_args

import msgspec

from tokenbus.events import requests
from tokenbus_services.gateway.problem import invalid, unsupported
from tokenbus_services.gateway.surfaces.contract import GatewayRequest, GivenAnswer, Translated, TranslationRules
from tokenbus_services.gateway.surfaces.fields import Fields, Json
from tokenbus_services.gateway.surfaces.hosted import originals
from tokenbus_services.gateway.surfaces.surface import DEFAULT_MODEL, Echo, SurfaceRequest

_ROLES = ("developer", "system", "user", "assistant", "tool", "reasoning", "activity")
_KINDS = ("text", "image", "document")
"""Of content parts."""


class AgUiEcho(Echo, frozen=True, kw_only=True, omit_defaults=True):
    thread: str = ""
    run: str = ""
    """The client's own id of its run."""
    when_busy: requests.WhenBusy = "enqueue"
    when_busy_given: bool = False
    answered: str = ""
    """The id of the model's last message that the client has."""


def read(asked: GatewayRequest, rules: TranslationRules, body: Fields) -> Translated:
    """Translate the body of `HttpAgent`. Raises Refusal."""
    thread = body.needed("threadId", body.text("threadId"))
    run = run_id(body)
    for name in ("protocolVersion", "parentRunId"):
        body.text(name)
    body.take("state")
    given = [_resumed(entry) for entry in body.each("resume")]
    context = list(_context(body))
    props = body.fields("forwardedProps") or Fields({}, "forwardedProps", body.reading)
    model = props.text("model") or asked.query.get("model") or DEFAULT_MODEL
    ask = SurfaceRequest(asked, rules, body, model=model, stream=True, options=props, takes_back=True)
    ask.refuse_hidden()
    if ask.run is not None:
        raise unsupported(ask.bus.path("run"), "`runId` names the run of this protocol")
    tools = list(_tools(body))
    if ask.bus_tools:  # the run goes on with the results of both
        ask.bus_tools += [msgspec.structs.replace(tool, kind="client") for tool in tools]
        tools = []
    is_clients = bool(ask.client_tools)
    values: list[Json] = body.value.get("messages") or []
    messages = _messages(body)
    if not messages and not given:
        raise invalid("messages", "they have no content")
    fields: Json = {
        "messages": messages,
        "system": "\n\n".join(context) or None,
        "temperature": props.number("temperature"),
        "top_p": props.share("topP"),
        "max_tokens": props.whole("maxTokens", 1),
    }
    echoed: Json = {"thread": thread, "run": run, "answered": _answered(values)}
    if is_clients:
        given += _results(values)
    if when_busy := props.one_of("whenBusy", get_args(requests.WhenBusy)):
        echoed |= {"when_busy": when_busy, "when_busy_given": True}
    found = ask.translated(fields, tools=tools, echo=AgUiEcho, echoed=echoed, on_disconnect="continue")
    says = bool(messages) and messages[-1].role not in ("assistant", "tool")
    return msgspec.structs.replace(found, given=given, only_answers=not says)


def run_id(body: Fields) -> str:
    """The client's id of its run. Raises Refusal."""
    run = body.needed("runId", body.text("runId"))
    if not 0 < len(run) <= 256:
        raise invalid("runId", "must have 1 to 256 characters")
    return run


def _resumed(entry: Fields) -> GivenAnswer:
    """The answer to an interrupt."""
    interrupt = entry.needed("interruptId", entry.text("interruptId"))
    status = entry.needed("status", entry.one_of("status", ("resolved", "cancelled")))
    entry.take("metadata")
    payload = entry.json("payload") or {}
    approved, reason, edited = (payload.get(name) for name in ("approved", "reason", "editedArgs"))
    at = entry.path("payload")
    if not isinstance(approved, bool | None):
        raise invalid(f"{at}.approved", "must be true or false")
    if not isinstance(reason, str | None):
        raise invalid(f"{at}.reason", "must be a string")
    if not isinstance(edited, dict | None):
        raise invalid(f"{at}.editedArgs", "must be an object")
    return GivenAnswer(
        at=entry.path("interruptId"),
        name=interrupt or "-",
        approved=approved,
        left=status == "cancelled",
        reason=reason,
        arguments=cast("dict[str, object] | None", edited),
        content=payload,
    )


def _results(messages: list[Json]) -> list[GivenAnswer]:
    """What tools of the client have returned since the model's last message."""
    last = max((n for n, message in enumerate(messages) if message.get("role") == "assistant"), default=len(messages))
    run = str(messages[last].get("id") or "").partition(":")[0] if last < len(messages) else ""
    return [
        GivenAnswer(
            at=f"messages[{n}]",
            run=run,
            tool_id=str(message.get("toolCallId")),
            content=message.get("content") or message.get("error") or "",
            is_error=message.get("error") is not None,
        )
        for n, message in enumerate(messages[last + 1 :], last + 1)
        if message.get("role") == "tool"
    ]


def _answered(messages: list[Json]) -> str:
    ids = [str(message.get("id") or "") for message in messages if message.get("role") == "assistant"]
    return ids[-1] if ids else ""


def _context(body: Fields) -> Any:
    for entry in body.each("context"):
        description = entry.needed("description", entry.text("description"))
        yield f"{description}:\n{entry.needed('value', entry.text('value'))}"


def _tools(body: Fields) -> Any:
    for tool in body.each("tools"):
        tool.take("metadata")
        yield requests.Tool(
            name=tool.needed("name", tool.text("name")),
            description=tool.text("description"),
            parameters=tool.json("parameters") or {"type": "object"},
        )


def _messages(body: Fields) -> list[requests.Message]:
    """The conversation. Thinking goes into the assistant's message that follows it."""
    messages: list[requests.Message] = []
    thinking: list[requests.ContentPart] = []

    def unanswered() -> None:
        """Keep the provider's items that end a turn."""
        if any(isinstance(part, requests.ExtraPart) for part in thinking):
            messages.append(requests.Message(role="assistant", content=[*thinking]))
            thinking.clear()

    for message in body.each("messages"):
        for name in ("id", "metadata", "subagentRunId"):
            message.take(name)
        match message.needed("role", message.one_of("role", _ROLES)):
            case "developer" | "system":
                messages.append(requests.Message(role="system", content=message.text("content") or ""))
                message.text("name")
                message.text("encryptedValue")
            case "user":
                message.text("encryptedValue")
                content = _content(message)
                if content:
                    unanswered()
                    messages.append(requests.Message(role="user", content=content, participant=message.text("name")))
            case "reasoning":
                text, back = message.text("content") or "", _given_back(message)
                thinking += originals(back.pop("items", []))
                if text or back:
                    thinking.append(requests.ThinkingPart(text=text, **back))
            case "assistant":
                parts = [*thinking, *_content_of(message)]
                thinking.clear()
                if parts:
                    messages.append(requests.Message(role="assistant", content=parts))
            case "tool":
                _add_result(messages, message)
            case _:  # of the screen alone
                message.take("activityType")
                message.take("content")
    return messages


def _content_of(message: Fields) -> list[requests.ContentPart]:
    message.text("name")
    text, back = message.text("content"), _given_back(message)
    back.pop("signature", None)
    parts: list[requests.ContentPart] = [*originals(back.pop("items", []))]
    parts += [requests.TextPart(text=text, **back)] if text else []
    for call in message.each("toolCalls"):
        call.take("metadata")
        call.only("type", "function")
        function = call.needed("function", call.fields("function"))
        kept = _given_back(call)
        kept.pop("signature", None)
        parts += originals(kept.pop("items", []))
        parts.append(
            requests.ToolCallPart(
                tool_id=call.needed("id", call.text("id")),
                tool_name=function.needed("name", function.text("name")),
                arguments=function.text("arguments") or "{}",
                **kept,
            )
        )
    return parts


def _add_result(messages: list[requests.Message], message: Fields) -> None:
    """Add a tool's result to those of the same turn."""
    error = message.text("error")
    message.text("encryptedValue")
    parts = _content(message, ("text", "image"))
    content: Any = "".join(part.text for part in parts if isinstance(part, requests.TextPart))
    if any(isinstance(part, requests.ImagePart) for part in parts):
        content = parts
    result = requests.ToolResultPart(
        tool_id=message.needed("toolCallId", message.text("toolCallId")),
        content=content or error or "",
        is_error=error is not None,
    )
    if messages and messages[-1].role == "tool" and isinstance(messages[-1].content, list):
        messages[-1].content.append(result)
    else:
        messages.append(requests.Message(role="tool", content=[result]))


def _content(message: Fields, kinds: Sequence[str] = _KINDS) -> list[requests.ContentPart]:
    value = message.take("content")
    if isinstance(value, str):
        return [requests.TextPart(text=value)] if value else []
    if value is None:
        return []
    return [
        _part(part, kinds)
        for part in Fields({"content": value}, message.path("content")[: -len(".content")], message.reading).each(
            "content"
        )
    ]


def _part(part: Fields, kinds: Sequence[str]) -> requests.ContentPart:
    for name in ("id", "metadata"):
        part.take(name)
    match part.needed("type", part.one_of("type", kinds)):
        case "text":
            return requests.TextPart(text=part.needed("text", part.text("text")))
        case "image":
            return requests.ImagePart(source=_source(part))
        case _:
            return requests.DocumentPart(source=_source(part))


def _source(part: Fields) -> requests.Source:
    source = part.needed("source", part.fields("source"))
    kind = source.one_of("type", ("data", "url", "file"))
    value = source.needed("value", source.text("value"))
    media_type = source.text("mimeType")
    source.text("provider")
    match kind:
        case "data":
            return requests.Base64Source(media_type=source.needed("mimeType", media_type), data=value)
        case "url":
            return requests.UrlSource(url=value)
        case _:
            return requests.FileSource(file_id=value, media_type=media_type)


class _Kept(msgspec.Struct, frozen=True):
    items: list[dict[str, str]] = []
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
