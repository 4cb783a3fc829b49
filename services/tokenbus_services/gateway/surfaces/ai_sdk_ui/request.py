"""A request of `useChat` as one of the bus. Pure."""

from __future__ import annotations

from typing import Any, cast, get_args

import msgspec

from tokenbus.events.requests import Effort, Tool, ToolChoice, WhenBusy
from tokenbus_services.gateway.problem import invalid
from tokenbus_services.gateway.surfaces.ai_sdk_ui.history import given_in, messages_of
from tokenbus_services.gateway.surfaces.contract import GatewayRequest, Translated, TranslationRules
from tokenbus_services.gateway.surfaces.fields import Fields, Json
from tokenbus_services.gateway.surfaces.surface import (
    DEFAULT_MODEL,
    Echo,
    SurfaceRequest,
    effort_thinking,
    open_tool,
)

MAX_ID_CHARS = 256
VERSIONS = ("5", "6", "7")
_CHOICES = {"auto": "auto", "none": "none", "required": "any"}


class UiEcho(Echo, frozen=True, kw_only=True, omit_defaults=True):
    chat: str = ""
    ui: int = 5
    """The `ai` version of the client that began."""
    named: list[str] = msgspec.field(default_factory=list[str])
    """Tools that the bus runs."""
    client: list[str] = msgspec.field(default_factory=list[str])
    """Tools whose calls wait for the page's result."""
    message_id: str | None = None
    """Of the assistant's message that the answer continues."""
    when_busy: WhenBusy = "interrupt"
    when_busy_given: bool = False
    rewrites: bool = False
    """The client wants another answer, or has changed what it said: its messages are the history."""


def read(asked: GatewayRequest, rules: TranslationRules, body: Fields) -> Translated:
    """Translate a `POST` of `DefaultChatTransport`. Raises Refusal."""
    chat = body.needed("id", body.text("id"))
    if not 0 < len(chat) <= MAX_ID_CHARS:
        raise invalid("id", f"must have 1 to {MAX_ID_CHARS} characters")
    trigger, message = body.one_of("trigger", ("submit-message", "regenerate-message")), body.text("messageId")
    when_busy = body.one_of("whenBusy", get_args(WhenBusy))
    ui = version(asked)
    model = body.text("model") or asked.query.get("model") or DEFAULT_MODEL
    # Only clients with ?ui=7 know how to void text that was shown.
    ask = SurfaceRequest(asked, rules, body, model=model, stream=True, takes_back=ui >= 7)
    ask.refuse_hidden()
    values = body.take("messages")
    if not isinstance(values, list) or not values:
        raise invalid("messages", "must be a list of one or more messages")
    fields: Json = {
        "messages": messages_of(cast("list[object]", values)) or _nothing_said(),
        "system": body.text("system"),
        "tool_choice": _tool_choice(body),
        "temperature": body.number("temperature"),
        "top_p": body.share("topP"),
        "top_k": ask.optional("top_k", body, "topK", lambda name: body.whole(name, 1)),
        "seed": ask.optional("seed", body, "seed", lambda name: body.whole(name, -(2**63))),
        "presence_penalty": ask.optional("presence_penalty", body, "presencePenalty", body.penalty, 0, 0.0),
        "frequency_penalty": ask.optional("frequency_penalty", body, "frequencyPenalty", body.penalty, 0, 0.0),
        "max_tokens": body.whole("maxOutputTokens", 1),
        "stop": body.texts("stopSequences"),
        "thinking": effort_thinking(_effort(body)),
    }
    metadata = body.json("metadata")
    fields["metadata"] = None if metadata is None else {"client": metadata}
    tools = _tools(ask, rules)
    last = cast("Json", values[-1])
    # Of a message that is edited the client names the id, and has cut what followed it.
    edits = message is not None and last.get("role") == "user" and last.get("id") == message
    client = ask.client_tools
    echoed: Json = {
        "chat": chat,
        "when_busy": when_busy or "interrupt",
        "when_busy_given": when_busy is not None,
        "rewrites": trigger == "regenerate-message" or edits,
        "ui": ui,
        "named": [tool.name for tool in ask.bus_tools if tool.name not in client],
        "client": client,
        "message_id": _continued(cast("list[Any]", values)),
    }
    found = ask.translated(fields, tools=tools, echo=UiEcho, echoed=echoed, on_disconnect="continue")
    if trigger == "regenerate-message":
        return found
    given, alone = given_in(cast("list[Json]", values), results=bool(client))
    return msgspec.structs.replace(found, given=given, only_answers=alone)


def version(request: GatewayRequest) -> int:
    """The `ai` version that the client asks for, by `?ui=7`; 5 is the subset that all of them read."""
    requested = request.query.get("ui", "5")
    if requested not in VERSIONS:
        raise invalid("ui", "must be 5, 6 or 7")
    return int(requested)


def _tools(ask: SurfaceRequest, rules: TranslationRules) -> list[Tool]:
    """The client's tools, if the run ends with their calls. A name in the list is a tool of the deployment; beside one,
    the run waits for the results of the client's.
    """
    defined: list[Tool] = []
    named: list[str] = []
    values = ask.body.take("tools")
    if values is not None and not isinstance(values, list):
        raise invalid("tools", "must be a list")
    for i, value in enumerate(cast("list[object]", values or [])):
        at = f"tools[{i}]"
        if isinstance(value, str):
            open_tool(value, rules, at)
            named.append(value)
        elif isinstance(value, dict):
            fields = Fields(cast("Json", value), at, ask.body.reading, listed=True)
            name = fields.needed("name", fields.text("name"))
            parameters = fields.json("inputSchema") or {"type": "object"}
            strict = ask.optional("strict_tools", fields, "strict", fields.flag, False)
            defined.append(
                Tool(name=name, description=fields.text("description"), parameters=parameters, strict=strict)
            )
            fields.end()
        else:
            raise invalid(at, "must be the name of a tool of the deployment, or an object for a tool of the client")
    ask.bus_tools += [Tool(name=name) for name in named]
    if not ask.bus_tools:
        return defined
    # The run goes on with the results of both.
    ask.bus_tools += [msgspec.structs.replace(tool, kind="client") for tool in defined]
    return []


def _tool_choice(body: Fields) -> Any:
    value = body.take("toolChoice")
    if value is None:
        return None
    if isinstance(value, str) and value in _CHOICES:
        return _CHOICES[value]
    if isinstance(value, dict):
        fields = Fields(cast("dict[str, Any]", value), "toolChoice")
        fields.only("type", "tool")
        name = fields.needed("toolName", fields.text("toolName"))
        fields.end()
        return ToolChoice(name=name)
    raise invalid("toolChoice", "must be auto, none, required, or an object with toolName")


def _effort(body: Fields) -> str | None:
    effort = body.one_of("reasoning", ("provider-default", *get_args(Effort)))
    return None if effort == "provider-default" else effort


def _continued(values: list[Any]) -> str | None:
    """The id of the assistant's message that the answer continues: of one whose tool calls the client ran."""
    last: dict[str, Any] = values[-1]
    continued = last.get("id") if last.get("role") == "assistant" else None
    return continued if isinstance(continued, str) and continued else None


def _nothing_said() -> Any:
    raise invalid("messages", "they have no content")
