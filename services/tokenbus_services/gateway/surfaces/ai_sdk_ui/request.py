"""A request of `useChat` as one of the bus. Pure."""

from __future__ import annotations

from typing import Any, cast, get_args

from tokenbus.events.requests import Effort, Generate, Thinking, Tool, ToolChoice
from tokenbus_services.gateway.problem import invalid, tool_not_open, unsupported
from tokenbus_services.gateway.surfaces.ai_sdk_ui.history import messages_of
from tokenbus_services.gateway.surfaces.contract import GatewayRequest, Translated, TranslationRules
from tokenbus_services.gateway.surfaces.extension import Extension, extension
from tokenbus_services.gateway.surfaces.fields import Fields, json_body

DEFAULT_MODEL = "default"
"""The alias of requests that name no model: `useChat` knows none."""
MAX_ID_CHARS = 256
VERSIONS = ("5", "6", "7")
_CHOICES = {"auto": "auto", "none": "none", "required": "any"}


def translate(request: GatewayRequest, rules: TranslationRules) -> Translated:
    """Translate a `POST` of `DefaultChatTransport`. Raises Refusal."""
    body = Fields(json_body(request.body), drop=rules.drop_unsupported)
    chat = body.needed("id", body.text("id"))
    if not 0 < len(chat) <= MAX_ID_CHARS:
        raise invalid("id", f"must have 1 to {MAX_ID_CHARS} characters")
    body.one_of("trigger", ("submit-message", "regenerate-message"))
    body.text("messageId")  # the client has already removed the message that it wants anew
    own = extension(body, request.headers, rules)
    ui = version(request)
    _check_ends(own, ui)
    model = rules.models.resolve(body.text("model") or request.query.get("model") or DEFAULT_MODEL)
    values = body.take("messages")
    if not isinstance(values, list) or not values:
        raise invalid("messages", "must be a list of one or more messages")
    tools, bus_tools = _tools(body, own, rules)
    generate = Generate(
        provider=model.provider,
        model=model.model,
        fallback=None if own.on_failure == "fail" else model.fallbacks,
        messages=messages_of(cast("list[object]", values)) or _nothing_said(),
        system=body.text("system"),
        tools=tools,
        tool_choice=_tool_choice(body),
        max_tool_depth=own.max_tool_depth if bus_tools and own.max_tool_depth is not None else 10 if bus_tools else 0,
        temperature=body.number("temperature"),
        top_p=body.number("topP"),
        top_k=body.whole("topK", 1),
        seed=body.whole("seed", -(2**63)),
        presence_penalty=body.number("presencePenalty"),
        frequency_penalty=body.number("frequencyPenalty"),
        max_tokens=body.whole("maxOutputTokens", 1),
        stop=body.texts("stopSequences"),
        thinking=_thinking(body),
        metadata=_metadata(body),
        extra=own.extra,
        **own.generate,
    )
    body.end()
    echo: dict[str, object] = {"chat": chat, "ui": ui, "bus_tools": [tool.name for tool in bus_tools]}
    if (continued := _continued(cast("list[Any]", values))) is not None:
        echo["message_id"] = continued
    return Translated(
        generate=generate, stream=True, model=model.name, echo=echo, on_disconnect=own.on_disconnect or "continue"
    )


def version(request: GatewayRequest) -> int:
    """The `ai` version that the client asks for, by `?ui=7`; 5 is the subset that all of them read."""
    requested = request.query.get("ui", "5")
    if requested not in VERSIONS:
        raise invalid("ui", "must be 5, 6 or 7")
    return int(requested)


def _check_ends(own: Extension, ui: int) -> None:
    if own.on_failure == "restart" and ui < 7:
        raise unsupported(
            "tokenbus.on_failure", "'restart' voids text that was shown; only clients with ?ui=7 know how"
        )
    if own.visible is False:
        raise unsupported("tokenbus.visible", "a chat shows its text")


def _tools(body: Fields, own: Extension, rules: TranslationRules) -> tuple[list[Tool], list[Tool]]:
    """All tools, and those that the bus runs: in the body a name is the bus's tool, an object the client's."""
    named, defined = list(own.tools), list[Tool]()
    values = body.take("tools")
    if values is not None and not isinstance(values, list):
        raise invalid("tools", "must be a list")
    for i, value in enumerate(cast("list[object]", values or [])):
        at = f"tools[{i}]"
        if isinstance(value, str):
            if rules.tools is not None and value not in rules.tools:
                raise invalid(at, tool_not_open(value))
            named.append(Tool(name=value))
        elif isinstance(value, dict):
            fields = Fields(cast("dict[str, Any]", value), at)
            name = fields.needed("name", fields.text("name"))
            parameters = fields.json("inputSchema") or {"type": "object"}
            defined.append(Tool(name=name, description=fields.text("description"), parameters=parameters))
            fields.end()
        else:
            raise invalid(at, "must be the name of a tool of the deployment, or an object for a tool of the client")
    if named and defined:
        raise unsupported("tools", "tools of the deployment and of the client in one request are not supported")
    return named or defined, named


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


def _thinking(body: Fields) -> Thinking | None:
    effort = body.one_of("reasoning", ("provider-default", *get_args(Effort)))
    return None if effort in (None, "provider-default") else Thinking(effort=cast("Effort", effort))


def _metadata(body: Fields) -> dict[str, object] | None:
    given = body.json("metadata")
    return None if given is None else {"client": given}


def _continued(values: list[Any]) -> str | None:
    """The id of the assistant's message that the answer continues: of one whose tool calls the client ran."""
    last: dict[str, Any] = values[-1]
    continued = last.get("id") if last.get("role") == "assistant" else None
    return continued if isinstance(continued, str) and continued else None


def _nothing_said() -> Any:
    raise invalid("messages", "they have no content")
