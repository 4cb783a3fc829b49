"""A request of the Responses API as one of the bus: https://platform.openai.com/docs/api-reference/responses. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, get_args

import msgspec

from tokenbus.events.requests import Effort, OutputSchema, Thinking, Tool, ToolChoice
from tokenbus_services.gateway.problem import invalid
from tokenbus_services.gateway.surfaces.contract import GatewayRequest, Translated, TranslationRules
from tokenbus_services.gateway.surfaces.fields import Fields, Json
from tokenbus_services.gateway.surfaces.openai_responses.input_items import in_namespace, messages_of
from tokenbus_services.gateway.surfaces.openai_responses.response_object import DEFAULTS, ResponseSettings, bounded
from tokenbus_services.gateway.surfaces.surface import SurfaceRequest, client_metadata, format_of

_OPENAI = ("openai-responses", "openai-chat")


def read(asked: GatewayRequest, rules: TranslationRules, body: Fields) -> Translated:
    """Translate a request. Raises Refusal."""
    name, stream = body.needed("model", body.text("model")), body.flag("stream") or False
    background = body.flag("background") or False
    ask = SurfaceRequest(
        asked,
        rules,
        body,
        model=name,
        stream=stream or background,
        speaks="openai-responses",
        shows_arguments=stream,
    )
    store = body.flag("store")
    if background and store is False:
        raise invalid("store", "a background response must be stored")
    if stream_options := body.fields("stream_options"):
        stream_options.flag("include_obfuscation")
    body.only("truncation", "disabled")
    body.only("top_logprobs", 0)
    body.hint("prompt_cache_retention")
    body.hint("prompt_cache_options", {})
    body.hint("client_metadata", {})
    echo = Json(store=store, previous_response_id=body.text("previous_response_id"))
    if isinstance(body.peek("conversation"), dict) and (conversation := body.fields("conversation")):
        echo["conversation"] = {"id": conversation.needed("id", conversation.text("id"))}
    echo["instructions"] = instructions = body.text("instructions")
    echo["max_output_tokens"] = max_tokens = body.whole("max_output_tokens", least=1)
    echo["temperature"] = temperature = body.number("temperature")
    echo["top_p"] = top_p = body.share("top_p")
    _include(ask)
    tools, namespaces = _tools(ask, echo)
    fields: Json = {
        "messages": messages_of(body),
        "system": instructions or None,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "thinking": _thinking(body, echo),
        "tool_choice": (choice := _tool_choice(ask, tools, echo)),
        "metadata": client_metadata(body),
        **_text(ask, echo),
        **_optional(ask, echo, tools, choice),
    }
    if fields["metadata"]:
        echo["metadata"] = fields["metadata"]["client"]
    _only_some(ask, echo)
    show_tools = ask.bus.flag("show_tools") or False
    kept = {name: value for name, value in echo.items() if value is not None and value != DEFAULTS.get(name)}
    echoed: Json = {
        "response": bounded(kept),
        "background": background,
        "show_tools": show_tools,
        "client": ask.client_tools,
        "namespaces": namespaces,
    }
    found = ask.translated(fields, tools=tools, echo=ResponseSettings, echoed=echoed, background=background)
    return msgspec.structs.replace(found, stream=stream)


def _include(ask: SurfaceRequest) -> None:
    """Reasoning has its encrypted content in any case; what else is wanted has no place in an answer of another API."""
    wanted = [each for each in ask.body.texts("include") if each != "reasoning.encrypted_content"]
    if wanted and ask.passes:
        ask.extra["include"] = ["reasoning.encrypted_content", *wanted]
    elif wanted:
        ask.body.reading.leave_out("include")


def _thinking(body: Fields, echo: Json) -> Thinking | None:
    reasoning = body.fields("reasoning")
    if reasoning is None:
        return None
    effort = reasoning.one_of("effort", ("none", *get_args(Effort)))
    summary = reasoning.one_of("summary", ("auto", "concise", "detailed"))
    summary = reasoning.one_of("generate_summary", ("auto", "concise", "detailed")) or summary
    echo["reasoning"] = {"effort": effort, "summary": summary}
    if effort == "none":
        return Thinking(enabled=False)
    return Thinking(effort=cast("Effort | None", effort)) if effort or summary else None


def _tools(ask: SurfaceRequest, echo: Json) -> tuple[list[Tool], dict[str, str]]:
    """The client's tools, and the namespace of each that is in one, which is a part of its name on the bus."""
    namespaces: dict[str, str] = {}

    def one(fields: Fields) -> tuple[list[Tool], Json] | Json:
        """The tools of an object, and how the response shows it."""
        kinds = ("function", "custom", "namespace") if "free_text_tools" in ask.has else ("function", "namespace")
        kind = fields.needed("type", fields.one_of("type", kinds))
        if kind != "namespace":
            tool = function(fields) if kind == "function" else custom(fields)
            return [tool], _echoed(tool) if kind == "function" else fields.value
        space = fields.needed("name", fields.text("name"))
        fields.text("description")
        tools: list[Tool] = []
        for inner in fields.each("tools"):
            inner.one_of("type", ("function",))
            tool = function(inner)
            tools.append(msgspec.structs.replace(tool, name=in_namespace(space, tool.name)))
            namespaces[tools[-1].name] = space
        return tools, fields.value

    def function(fields: Fields) -> Tool:
        fields.hint("defer_loading", False)
        return Tool(
            name=fields.needed("name", fields.text("name")),
            description=fields.text("description"),
            parameters=fields.json("parameters") or {"type": "object"},
            strict=ask.optional("strict_tools", fields, "strict", fields.flag, False),
        )

    def custom(fields: Fields) -> Tool:
        fields.hint("defer_loading", False)
        return Tool(
            name=fields.needed("name", fields.text("name")),
            description=fields.text("description"),
            format=format_of(fields),
        )

    groups = ask.body.each_read("tools", one, dict)
    echo["tools"] = [group if isinstance(group, dict) else group[1] for group in groups]
    raw = ask.raw_tools([group for group in groups if isinstance(group, dict)])
    return [*raw, *(tool for group in groups if isinstance(group, tuple) for tool in group[0])], namespaces


def _echoed(tool: Tool) -> Json:
    described = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", **described, "strict": bool(tool.strict)}


def _tool_choice(ask: SurfaceRequest, tools: Sequence[Tool], echo: Json) -> Any:
    body = ask.body
    given = body.peek("tool_choice")
    echo["tool_choice"] = given
    if not isinstance(given, dict):
        choice = body.one_of("tool_choice", ("auto", "none", "required"))
        return "any" if choice == "required" else choice
    if ask.is_raw_tool(cast("Json", given), tools):
        return None
    kind = cast("Json", given).get("type")
    if kind not in ("function", "custom"):
        body.refuse(f"of type {str(kind)[:100]!r} is not supported", "tool_choice")
        return None
    choice = body.needed("tool_choice", body.fields("tool_choice"))
    choice.take("type")
    name = choice.needed("name", choice.text("name"))
    space = choice.text("namespace")
    return ToolChoice(name=in_namespace(space, name) if space else name)


def _text(ask: SurfaceRequest, echo: Json) -> Json:
    """Format and verbosity of the text."""
    text = ask.body.fields("text")
    if text is None:
        return {}
    read: Json = {}
    echo["text"] = echoed = Json(format={"type": "text"})
    if form := text.fields("format"):
        kind = form.needed("type", form.one_of("type", ("text", "json_schema", "json_object")))
        if kind == "json_object":
            read = ask.json_object()
            echoed["format"] = {"type": kind}
        if kind == "json_schema":
            read["output_schema"] = OutputSchema(
                name=form.needed("name", form.text("name")),
                schema=form.needed("schema", form.json("schema")),
                strict=form.flag("strict"),
            )
            described = form.peek("description")
            form.hint("description")
            settings = msgspec.structs.asdict(read["output_schema"])
            strict = bool(settings["strict"])
            echoed["format"] = {"type": kind, **settings, "description": described, "strict": strict}
    if ask.model.api in _OPENAI:
        if verbosity := text.one_of("verbosity", ("low", "medium", "high")):
            echoed["verbosity"] = verbosity
            here = ask.model.api == _OPENAI[0]
            ask.extra |= {"text": {"verbosity": verbosity}} if here else {"verbosity": verbosity}
    else:
        text.hint("verbosity", "medium")
    return read


def _optional(ask: SurfaceRequest, echo: Json, tools: list[Tool], choice: object) -> Json:
    """Options of the bus."""
    body = ask.body
    ask.one_call("parallel_tool_calls", True, tools=tools, choice=choice)
    echo["parallel_tool_calls"] = parallel = body.flag("parallel_tool_calls")
    for name in ("user", "safety_identifier"):
        echo[name] = ask.optional("user_id", body, name, body.text, "")
    return {"parallel_tool_calls": parallel, "user_id": echo["safety_identifier"] or echo["user"] or None}


def _only_some(ask: SurfaceRequest, echo: Json) -> None:
    """Parameters that only OpenAI's APIs have, and values that change nothing."""
    for name in ("prompt_cache_key", "service_tier"):
        if ask.model.api not in _OPENAI:
            ask.body.hint(name, "auto", "default")
        elif (text := ask.body.text(name)) is not None:
            echo[name] = ask.extra[name] = text
