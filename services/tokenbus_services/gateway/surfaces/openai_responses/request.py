"""A request of the Responses API as one of the bus: https://platform.openai.com/docs/api-reference/responses. Pure."""

from __future__ import annotations

from typing import Any, cast, get_args

import msgspec

from tokenbus.events.requests import Effort, OutputSchema, Thinking, Tool, ToolChoice
from tokenbus.providers.request.options import RequestOption
from tokenbus_services.gateway.models import ResolvedModel
from tokenbus_services.gateway.problem import invalid, unsupported
from tokenbus_services.gateway.surfaces.answering import generate_of, options_of, tool_fields
from tokenbus_services.gateway.surfaces.contract import GatewayRequest, Translated, TranslationRules
from tokenbus_services.gateway.surfaces.extension import extension
from tokenbus_services.gateway.surfaces.fields import Fields, Json, json_body
from tokenbus_services.gateway.surfaces.openai_responses.input_items import messages_of
from tokenbus_services.gateway.surfaces.openai_responses.response_object import DEFAULTS, ResponseSettings, bounded

REFUSED = (
    "access_programs",
    "background_options",
    "context_management",
    "conversation",
    "image",
    "max_tool_calls",
    "moderation",
    "prompt",
    "prompt_cache_options",
    "prompt_cache_retention",
)
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
_OPENAI = ("openai-responses", "openai-chat")


def translate(request: GatewayRequest, rules: TranslationRules) -> Translated:
    """Translate a request. Raises Refusal."""
    body = Fields(json_body(request.body), drop=rules.drop_unsupported)
    show_tools = _show_tools(body)
    asked = extension(body, request.headers, rules)
    name = body.needed("model", body.text("model"))
    model = rules.models.resolve(name)
    options = options_of(model, rules.models)
    stream = body.flag("stream") or False
    background = body.flag("background") or False
    store = body.flag("store")
    if background and store is False:
        raise invalid("store", "a background response must be stored")
    if stream_options := body.fields("stream_options"):
        stream_options.flag("include_obfuscation")
        stream_options.end()
    body.refuse("is not supported by this gateway", *REFUSED)
    body.only("truncation", "disabled")
    body.only("top_logprobs", 0)
    _include(body)
    extra, echo = Json(), Json()
    echo["store"] = store
    echo["previous_response_id"] = body.text("previous_response_id")
    echo["instructions"] = instructions = body.text("instructions")
    echo["max_output_tokens"] = max_tokens = body.whole("max_output_tokens", least=1)
    echo["temperature"] = temperature = body.number("temperature")
    echo["top_p"] = top_p = body.share("top_p")
    tools = _tools(body, options, echo)
    fields: Json = {
        "messages": messages_of(body),
        "system": instructions or None,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "thinking": _thinking(body, echo),
        "tool_choice": _tool_choice(body, echo),
        "metadata": _metadata(body, echo),
        **tool_fields(tools, asked),
        **_text(body, model, options, extra, echo),
        **_optional(body, options, echo),
    }
    _only_some(body, model, extra, echo)
    body.end()
    echoed = {name: value for name, value in echo.items() if value is not None and value != DEFAULTS.get(name)}
    settings = ResponseSettings(
        response=bounded(echoed),
        background=background,
        on_failure=asked.on_failure or "before_first_visible",
        bus_tools=bool(asked.tools),
        show_tools=show_tools,
    )
    return Translated(
        generate=generate_of(model, asked, fields, extra, stream=stream or background),
        stream=stream,
        model=name,
        echo=msgspec.to_builtins(settings),
        on_disconnect="continue" if background else asked.on_disconnect or "cancel",
        background=background,
    )


def _show_tools(body: Fields) -> bool:
    """Read `tokenbus.show_tools`, which this surface alone has."""
    given = body.peek("tokenbus")
    if not isinstance(given, dict) or "show_tools" not in given:
        return False
    value = cast("Json", given).pop("show_tools")
    if not isinstance(value, bool):
        raise invalid("tokenbus.show_tools", "must be true or false")
    return value


def _include(body: Fields) -> None:
    """Reasoning has its encrypted content in any case."""
    for i, each in enumerate(body.texts("include")):
        if each != "reasoning.encrypted_content":
            raise unsupported(f"include[{i}]", f"{each[:100]!r} is not supported by this gateway")


def _thinking(body: Fields, echo: Json) -> Thinking | None:
    reasoning = body.fields("reasoning")
    if reasoning is None:
        return None
    effort = reasoning.one_of("effort", ("none", *get_args(Effort)))
    summary = reasoning.one_of("summary", ("auto", "concise", "detailed"))
    summary = reasoning.one_of("generate_summary", ("auto", "concise", "detailed")) or summary
    reasoning.end()
    echo["reasoning"] = {"effort": effort, "summary": summary}
    if effort == "none":
        return Thinking(enabled=False)
    return Thinking(effort=cast("Effort | None", effort)) if effort or summary else None


def _tools(body: Fields, options: frozenset[RequestOption], echo: Json) -> list[Tool]:
    tools: list[Tool] = []
    echoed: list[Json] = []
    for fields in body.each("tools"):
        fields.needed("type", fields.one_of("type", ("function",)))
        if "strict_tools" not in options:
            fields.only("strict", False, why="is not supported by this provider")
        fields.only("defer_loading", False)
        tool = Tool(
            name=fields.needed("name", fields.text("name")),
            description=fields.text("description"),
            parameters=fields.json("parameters") or {"type": "object"},
            strict=fields.flag("strict"),
        )
        tools.append(tool)
        described = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        echoed.append({"type": "function", **described, "strict": bool(tool.strict)})
    if echoed:
        echo["tools"] = echoed
    return tools


def _tool_choice(body: Fields, echo: Json) -> Any:
    given = body.peek("tool_choice")
    echo["tool_choice"] = given
    if isinstance(given, dict):
        choice = cast("Fields", body.fields("tool_choice"))
        choice.needed("type", choice.one_of("type", ("function",)))
        name = choice.needed("name", choice.text("name"))
        choice.end()
        return ToolChoice(name=name)
    choice = body.one_of("tool_choice", ("auto", "none", "required"))
    return "any" if choice == "required" else choice


def _text(body: Fields, model: ResolvedModel, options: frozenset[RequestOption], extra: Json, echo: Json) -> Json:
    """Format and verbosity of the text."""
    text = body.fields("text")
    if text is None:
        return {}
    read: Json = {}
    echo["text"] = echoed = Json(format={"type": "text"})
    if form := text.fields("format"):
        kind = form.needed("type", form.one_of("type", ("text", "json_schema", "json_object")))
        if kind == "json_object":
            if "json_object" not in options:
                raise unsupported(form.path("type"), "'json_object' is not supported by this provider; give a schema")
            read["json_object"] = True
            echoed["format"] = {"type": kind}
        if kind == "json_schema":
            read["output_schema"] = OutputSchema(
                name=form.needed("name", form.text("name")),
                schema=form.needed("schema", form.json("schema")),
                strict=form.flag("strict"),
            )
            described = form.text("description")
            settings = msgspec.structs.asdict(read["output_schema"])
            strict = bool(settings["strict"])
            echoed["format"] = {"type": kind, **settings, "description": described, "strict": strict}
        form.end()
    if model.api in _OPENAI:
        if verbosity := text.one_of("verbosity", ("low", "medium", "high")):
            echoed["verbosity"] = verbosity
            extra |= {"text": {"verbosity": verbosity}} if model.api == _OPENAI[0] else {"verbosity": verbosity}
    else:
        text.only("verbosity", "medium", why="is not supported by this provider")
    text.end()
    return read


def _metadata(body: Fields, echo: Json) -> Json | None:
    given = body.json("metadata")
    if not given:
        return None
    if len(given) > MAX_METADATA:
        raise invalid("metadata", f"at most {MAX_METADATA} keys")
    for name, value in given.items():
        if not isinstance(value, str) or len(name) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            why = f"keys have at most {MAX_METADATA_KEY} characters; values are texts of at most {MAX_METADATA_VALUE}"
            raise invalid(f"metadata.{name[:MAX_METADATA_KEY]}", why)
    echo["metadata"] = given
    return {"client": given}


def _optional(body: Fields, options: frozenset[RequestOption], echo: Json) -> Json:
    """Options of the bus. One that the provider lacks is refused here, by the name that the client knows."""
    why = "is not supported by this provider"
    if "parallel_tool_calls" not in options:
        body.only("parallel_tool_calls", True, why=why)
    if "user_id" not in options:
        body.refuse(why, "user", "safety_identifier")
    echo["parallel_tool_calls"] = parallel = body.flag("parallel_tool_calls")
    echo["user"], echo["safety_identifier"] = body.text("user"), body.text("safety_identifier")
    return {"parallel_tool_calls": parallel, "user_id": echo["safety_identifier"] or echo["user"] or None}


def _only_some(body: Fields, model: ResolvedModel, extra: Json, echo: Json) -> None:
    """Parameters that only OpenAI's APIs have, and values that change nothing."""
    if model.api in _OPENAI:
        for name in ("prompt_cache_key", "service_tier"):
            if (text := body.text(name)) is not None:
                echo[name] = extra[name] = text
        return
    body.only("service_tier", "auto", "default", why="is not supported by this provider")
    body.refuse("is not supported by this provider", "prompt_cache_key")
