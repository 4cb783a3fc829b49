"""A request of Chat Completions as one of the bus: https://platform.openai.com/docs/api-reference/chat. Pure."""

from __future__ import annotations

from typing import Any, cast, get_args

from tokenbus.events.requests import Effort, OutputSchema, Tool, ToolChoice
from tokenbus_services.gateway.problem import invalid
from tokenbus_services.gateway.surfaces.contract import GatewayRequest, Translated, TranslationRules
from tokenbus_services.gateway.surfaces.fields import Fields, Json
from tokenbus_services.gateway.surfaces.openai_chat.answer import ChatEcho
from tokenbus_services.gateway.surfaces.openai_chat.messages import messages_of
from tokenbus_services.gateway.surfaces.surface import SurfaceRequest, client_metadata, effort_thinking, format_of

_HINTS: dict[str, tuple[object, ...]] = {
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "prompt_cache_options": ({},),
    "safety_identifier": (),
    "store": (False,),
}
"""Parameters that only providers of this API take and that change no answer's meaning, with what all do anyway."""
_NEUTRAL: dict[str, object] = {
    "n": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "logit_bias": {},
    "modalities": ["text"],
    "functions": [],
}
"""Parameters that have no counterpart on the bus, with the value of each that changes nothing."""


def read(asked: GatewayRequest, rules: TranslationRules, body: Fields) -> Translated:
    """Translate a request. Raises Refusal."""
    name, stream = body.needed("model", body.text("model")), body.flag("stream") or False
    ask = SurfaceRequest(asked, rules, body, model=name, stream=stream, speaks="openai-chat", shows_arguments=stream)
    usage = _stream_options(body, stream=stream)
    tools = ask.raw_tools(body.each_read("tools", lambda tool: _tool(tool, ask), dict))
    for name, value in _NEUTRAL.items():
        body.only(name, value, why="with this value is not supported by this gateway")
    for name, values in _HINTS.items():
        body.hint(name, *values)
    fields: Json = {
        "messages": messages_of(body),
        "max_tokens": _max_tokens(body),
        "temperature": body.number("temperature"),
        "top_p": body.share("top_p"),
        "stop": _stop(body),
        "thinking": effort_thinking(body.one_of("reasoning_effort", get_args(Effort))),
        **_output_format(body, ask),
        "seed": ask.optional("seed", body, "seed", lambda name: body.whole(name, least=None)),
        "user_id": ask.optional("user_id", body, "user", body.text, "") or None,
        "frequency_penalty": ask.optional("frequency_penalty", body, "frequency_penalty", body.penalty, 0, 0.0) or None,
        "presence_penalty": ask.optional("presence_penalty", body, "presence_penalty", body.penalty, 0, 0.0) or None,
        "tool_choice": _tool_choice(body) if tools or ask.extra.get("tools") or ask.bus_tools else _no_choice(body),
        "metadata": client_metadata(body),
    }
    ask.one_call("parallel_tool_calls", True, tools=tools, choice=fields["tool_choice"])
    fields["parallel_tool_calls"] = body.flag("parallel_tool_calls")
    reasoning = ask.bus.flag("reasoning") is not False
    return ask.translated(fields, tools=tools, echo=ChatEcho, echoed={"usage": usage, "reasoning": reasoning})


def _max_tokens(body: Fields) -> int | None:
    new, old = body.whole("max_completion_tokens", least=1), body.whole("max_tokens", least=1)
    if new is not None and old is not None and new != old:
        raise invalid("max_tokens", "differs from max_completion_tokens")
    return old if new is None else new


def _stop(body: Fields) -> list[str]:
    if body.is_text("stop"):
        return [stop] if (stop := body.text("stop")) else []
    return [stop for stop in body.texts("stop") if stop]


def _output_format(body: Fields, ask: SurfaceRequest) -> Json:
    form = body.fields("response_format")
    if form is None:
        return {}
    kind = form.needed("type", form.one_of("type", ("text", "json_schema", "json_object")))
    if kind == "json_object":
        return ask.json_object()
    if kind == "text":
        return {}
    schema = form.needed("json_schema", form.fields("json_schema"))
    schema.hint("description")
    output = OutputSchema(
        schema=schema.needed("schema", schema.json("schema")),
        name=schema.text("name") or "answer",
        strict=schema.flag("strict"),
    )
    return {"output_schema": output}


def _tool(tool: Fields, ask: SurfaceRequest) -> Tool | Json:
    kinds = ("function", "custom") if "free_text_tools" in ask.has else ("function",)
    if tool.needed("type", tool.one_of("type", kinds)) == "custom":
        custom = tool.needed("custom", tool.fields("custom"))
        name = custom.needed("name", custom.text("name"))
        return Tool(name=name, description=custom.text("description"), format=format_of(custom))
    function = tool.needed("function", tool.fields("function"))
    return Tool(
        name=function.needed("name", function.text("name")),
        description=function.text("description"),
        parameters=function.json("parameters") or {"type": "object"},
        strict=ask.optional("strict_tools", function, "strict", function.flag, False),
    )


def _tool_choice(body: Fields) -> Any:
    given = body.peek("tool_choice")
    if not isinstance(given, dict):
        choice = body.one_of("tool_choice", ("auto", "none", "required"))
        return "any" if choice == "required" else choice
    kind = cast("Json", given).get("type")
    if kind not in ("function", "custom"):
        body.refuse(f"of type {str(kind)[:100]!r} is not supported", "tool_choice")
        return None
    choice = body.needed("tool_choice", body.fields("tool_choice"))
    choice.take("type")
    function = choice.needed(kind, choice.fields(kind))
    return ToolChoice(name=function.needed("name", function.text("name")))


def _no_choice(body: Fields) -> None:
    """Without tools there is nothing to choose: clients send the field all the same."""
    _tool_choice(body)


def _stream_options(body: Fields, *, stream: bool) -> bool:
    options = body.fields("stream_options")
    if options is None:
        return False
    if not stream:
        raise invalid("stream_options", "is for streams only")
    options.flag("include_obfuscation")  # accepted and not done: it only adds noise
    return options.flag("include_usage") or False
