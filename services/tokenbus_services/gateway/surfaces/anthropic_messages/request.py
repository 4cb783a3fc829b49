"""A request of the Messages API as one of the bus: https://docs.anthropic.com/en/api/messages. Pure."""

from __future__ import annotations

from typing import cast, get_args

import msgspec

from tokenbus.events.requests import Cache, Effort, OutputSchema, Thinking, Tool, ToolChoice
from tokenbus.providers.request.options import RequestOption
from tokenbus_services.gateway.models import ResolvedModel
from tokenbus_services.gateway.problem import invalid, unsupported
from tokenbus_services.gateway.surfaces.answering import echo_of, generate_of, options_of, tool_fields
from tokenbus_services.gateway.surfaces.anthropic_messages.content import cache_mark, messages_of, system_of
from tokenbus_services.gateway.surfaces.contract import GatewayRequest, Translated, TranslationRules
from tokenbus_services.gateway.surfaces.extension import extension
from tokenbus_services.gateway.surfaces.fields import Fields, Json, json_body

NOT_HERE = "is not supported by this provider"


def translate(request: GatewayRequest, rules: TranslationRules) -> Translated:
    """Translate a request. Raises Refusal."""
    body = Fields(json_body(request.body), drop=rules.drop_unsupported)
    asked = extension(body, request.headers, rules)
    name = body.needed("model", body.text("model"))
    model = rules.models.resolve(name)
    stream = body.flag("stream") or False
    extra: Json = {}
    has = options_of(model, rules.models)
    system = system_of(body)
    tools, marked = _tools(body, has)
    if marked and system:  # the prompt up to the system text begins with the tools
        system[0] = msgspec.structs.replace(system[0], cache=marked)
    fields: Json = {
        "system": system or None,
        "messages": messages_of(body),
        "max_tokens": body.needed("max_tokens", body.whole("max_tokens", least=1)),
        "stop": [stop for stop in body.texts("stop_sequences") if stop],
        "temperature": body.number("temperature"),
        "top_p": body.share("top_p"),
        **_thinking(body, model, extra),
        **tool_fields(tools, asked),
        **_tool_choice(body, has),
        **_metadata(body, has),
        "top_k": body.whole("top_k", least=1) if "top_k" in has else None,
    }
    _only_some(body, model, extra)
    body.end()
    return Translated(
        generate=generate_of(model, asked, fields, extra, stream=stream),
        stream=stream,
        model=name,
        echo=echo_of(model, rules.models, asked),
        on_disconnect=asked.on_disconnect or "cancel",
        run=asked.run,
    )


def _thinking(body: Fields, model: ResolvedModel, extra: Json) -> Json:
    """Thinking, effort and output format: the last two share `output_config`."""
    thinking: Thinking | None = None
    if asked := body.fields("thinking"):
        kind = asked.needed("type", asked.one_of("type", ("enabled", "disabled", "adaptive")))
        budget = asked.whole("budget_tokens", least=1)
        if kind == "enabled" and budget is None:
            raise invalid("thinking.budget_tokens", "this field is required")
        asked.only("display", "summarized", why="with this value would hide thinking, which this gateway does not do")
        asked.end()
        thinking = Thinking(enabled=kind != "disabled", budget_tokens=None if kind == "disabled" else budget)
    read: Json = {}
    if config := body.fields("output_config"):
        effort = cast("Effort | None", config.one_of("effort", get_args(Effort)))
        if effort and thinking and thinking.enabled:
            thinking = msgspec.structs.replace(thinking, effort=effort)
        elif effort and model.api == "anthropic":
            extra["output_config"] = {"effort": effort}  # holds without thinking too
        elif effort and thinking:
            raise unsupported("output_config.effort", "this provider has no effort without thinking")
        elif effort:
            thinking = Thinking(effort=effort)
        if form := config.fields("format"):
            form.needed("type", form.one_of("type", ("json_schema",)))
            read["output_schema"] = OutputSchema(schema=form.needed("schema", form.json("schema")))
            form.end()
        config.end()
    return {**read, "thinking": thinking}


def _tools(body: Fields, has: frozenset[RequestOption]) -> tuple[list[Tool], Cache]:
    """The client's tools, and the last cache mark among them."""
    tools: list[Tool] = []
    marked: Cache = False
    for fields in body.each("tools"):
        fields.one_of("type", ("custom",))
        marked = cache_mark(fields) or marked
        if "strict_tools" not in has:
            fields.only("strict", False, why=NOT_HERE)
        fields.only("defer_loading", False)
        fields.only("allowed_callers", ["direct"])
        fields.only("input_examples", [])
        fields.take("eager_input_streaming")  # arguments are passed on as the provider sends them
        tools.append(
            Tool(
                name=fields.needed("name", fields.text("name")),
                description=fields.text("description"),
                parameters=fields.needed("input_schema", fields.json("input_schema")),
                strict=fields.flag("strict"),
            )
        )
    return tools, marked


def _tool_choice(body: Fields, has: frozenset[RequestOption]) -> Json:
    given = body.fields("tool_choice")
    if given is None:
        return {}
    kind = given.needed("type", given.one_of("type", ("auto", "any", "none", "tool")))
    choice = ToolChoice(name=given.needed("name", given.text("name"))) if kind == "tool" else kind
    if "parallel_tool_calls" not in has:
        given.only("disable_parallel_tool_use", False, why=NOT_HERE)
    one = given.flag("disable_parallel_tool_use")
    given.end()
    return {"tool_choice": choice, "parallel_tool_calls": False if one else None}


def _metadata(body: Fields, has: frozenset[RequestOption]) -> Json:
    fields = body.fields("metadata")
    if fields is None:
        return {}
    user = fields.text("user_id")
    fields.end()
    if not user:
        return {}
    return {"metadata": {"client": {"user_id": user}}, "user_id": user if "user_id" in has else None}


def _only_some(body: Fields, model: ResolvedModel, extra: Json) -> None:
    """Parameters that only some providers have, and values that change nothing."""
    body.refuse(NOT_HERE, "top_k")
    if model.api == "anthropic":
        if cache_mark(body):
            extra["cache_control"] = {"type": "ephemeral"}
    else:
        body.refuse("is supported on content blocks only, by this provider", "cache_control")
    body.only("service_tier", "auto")
    body.only("context_management", {}, {"edits": []}, _KEEP_ALL, why="would change the conversation")


_KEEP_ALL: Json = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
"""Sent by Claude Code; keeps everything."""
