"""A request of the Messages API as one of the bus: https://docs.anthropic.com/en/api/messages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, get_args

import msgspec

from tokenbus.events.requests import Cache, Effort, OutputSchema, TextPart, Thinking, Tool, ToolChoice
from tokenbus_services.gateway.problem import UNSUPPORTED, Problem, Refusal, invalid, unsupported
from tokenbus_services.gateway.surfaces.anthropic_messages.content import cache_mark, messages_of, system_of
from tokenbus_services.gateway.surfaces.contract import GatewayRequest, Translated, TranslationRules
from tokenbus_services.gateway.surfaces.fields import Fields, Json
from tokenbus_services.gateway.surfaces.surface import SurfaceRequest

BETA = "anthropic-beta"
NO_THREAD = "thread_unsupported_request"
"""The code at which the SDK continues without a thread by itself."""


def read(asked: GatewayRequest, rules: TranslationRules, body: Fields) -> Translated:
    """Translate a request. Raises Refusal."""
    name, stream = body.needed("model", body.text("model")), body.flag("stream") or False
    if body.has("thread"):
        raise Refusal(
            Problem(
                status=400,
                code=NO_THREAD,
                message="threads are not kept by this gateway: send the whole conversation",
                kind="invalid_request",
                param="thread",
            )
        )
    ask = SurfaceRequest(asked, rules, body, model=name, stream=stream, speaks="anthropic", shows_arguments=stream)
    system = _system(ask)
    tools, marked = _tools(ask)
    if marked and system:  # the prompt up to the system text begins with the tools
        system[0] = msgspec.structs.replace(system[0], cache=marked)
    fields: Json = {
        "system": system or None,
        "messages": messages_of(body),
        "max_tokens": body.needed("max_tokens", body.whole("max_tokens", least=1)),
        "stop": [stop for stop in body.texts("stop_sequences") if stop],
        "temperature": body.number("temperature"),
        "top_p": body.share("top_p"),
        **_thinking(ask),
        **_tool_choice(ask, tools),
        **_metadata(ask),
        "top_k": ask.optional("top_k", body, "top_k", body.whole),
    }
    _only_some(ask)
    if ask.passes and (betas := [name.strip() for name in asked.headers.get(BETA, "").split(",") if name.strip()]):
        ask.extra["anthropic_beta"] = betas
    return ask.translated(fields, tools=tools)


def _system(ask: SurfaceRequest) -> list[TextPart]:
    """The system text; what is more than that goes to a provider of this API as it is."""
    given = ask.body.peek("system")
    try:
        return system_of(ask.body)
    except Refusal as e:
        if not ask.passes or e.problem.code != UNSUPPORTED:
            raise
    ask.extra["system"] = given
    return []


def _thinking(ask: SurfaceRequest) -> Json:
    """Thinking, effort and output format: the last two share `output_config`."""
    thinking: Thinking | None = None
    kinds = ("enabled", "disabled", "adaptive")
    if ask.passes and _is_of_another_type(ask.body.peek("thinking"), kinds):
        ask.extra["thinking"] = ask.body.json("thinking")  # of a newer model
    elif asked := ask.body.fields("thinking"):
        kind = asked.needed("type", asked.one_of("type", kinds))
        budget = asked.whole("budget_tokens", least=1)
        if kind == "enabled" and budget is None:
            raise invalid("thinking.budget_tokens", "this field is required")
        asked.hint("display", "summarized")
        thinking = Thinking(enabled=kind != "disabled", budget_tokens=None if kind == "disabled" else budget)
    read: Json = {}
    if config := ask.body.fields("output_config"):
        effort = cast("Effort | None", config.one_of("effort", get_args(Effort)))
        if effort and thinking and thinking.enabled:
            thinking = msgspec.structs.replace(thinking, effort=effort)
        elif effort and ask.model.api == "anthropic":
            ask.extra["output_config"] = {"effort": effort}  # holds without thinking too
        elif effort and thinking:
            raise unsupported("output_config.effort", "this provider has no effort without thinking")
        elif effort:
            thinking = Thinking(effort=effort)
        if form := config.fields("format"):
            form.needed("type", form.one_of("type", ("json_schema",)))
            read["output_schema"] = OutputSchema(schema=form.needed("schema", form.json("schema")))
    return {**read, "thinking": thinking}


def _is_of_another_type(given: object, known: Sequence[str]) -> bool:
    kind = cast("Json", given).get("type") if isinstance(given, dict) else None
    return isinstance(kind, str) and kind not in known


def _tools(ask: SurfaceRequest) -> tuple[list[Tool], Cache]:
    """The client's tools, and the last cache mark among them."""
    marked: list[Cache] = [False]
    # Tools that the bus does not know follow the others. Beside them, one with more fields (a cache mark, say) stays in
    # its place.
    given = ask.body.peek("tools")
    mixed = isinstance(given, list) and any(_is_of_another_type(each, ("custom",)) for each in cast("list[Any]", given))

    def tool(fields: Fields) -> Tool | Json:
        fields.one_of("type", ("custom",))
        read = Tool(
            name=fields.needed("name", fields.text("name")),
            description=fields.text("description"),
            parameters=fields.needed("input_schema", fields.json("input_schema")),
            strict=ask.optional("strict_tools", fields, "strict", fields.flag, False),
        )
        if ask.passes:
            rest = fields.take_rest()
            if rest and mixed:
                return fields.value
            return msgspec.structs.replace(read, extra={"anthropic": rest}) if rest else read
        mark = cache_mark(fields)
        fields.hint("defer_loading", False)
        fields.only("allowed_callers", ["direct"])
        fields.hint("input_examples", [])
        fields.take("eager_input_streaming")  # arguments are passed on as the provider sends them
        marked.append(mark or marked[-1])
        return read

    tools = ask.raw_tools(ask.body.each_read("tools", tool, dict))
    return tools, marked[-1]


def _tool_choice(ask: SurfaceRequest, tools: list[Tool]) -> Json:
    given = ask.body.fields("tool_choice")
    if given is None:
        return {}
    kind = given.needed("type", given.one_of("type", ("auto", "any", "none", "tool")))
    choice = ToolChoice(name=given.needed("name", given.text("name"))) if kind == "tool" else kind
    ask.one_call("disable_parallel_tool_use", False, tools=tools, choice=choice, of=given)
    one = given.flag("disable_parallel_tool_use")
    return {"tool_choice": choice, "parallel_tool_calls": False if one else None}


def _metadata(ask: SurfaceRequest) -> Json:
    fields = ask.body.fields("metadata")
    user = fields.text("user_id") if fields else None
    if not user:
        return {}
    if "user_id" not in ask.has:
        ask.body.reading.leave_out("metadata.user_id")
    return {"metadata": {"client": {"user_id": user}}, "user_id": user if "user_id" in ask.has else None}


def _only_some(ask: SurfaceRequest) -> None:
    """Parameters that only some providers have, and values that change nothing."""
    body = ask.body
    if ask.model.api == "anthropic" and not ask.passes:
        if cache_mark(body):
            ask.extra["cache_control"] = body.value["cache_control"]
    else:
        body.hint("cache_control")
    body.hint("service_tier", "auto")
    body.hint("speed", "standard")
    body.only("context_management", {}, {"edits": []}, _KEEP_ALL, why="would change the conversation")


_KEEP_ALL: Json = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
"""Sent by Claude Code; keeps everything."""
