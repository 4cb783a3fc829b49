"""A request of Chat Completions as one of the bus: https://platform.openai.com/docs/api-reference/chat/create. Pure."""

from __future__ import annotations

from typing import Any, cast, get_args

import msgspec

from tokenbus.events.requests import Effort, Generate, OutputSchema, Thinking, Tool, ToolChoice
from tokenbus.providers import registry
from tokenbus.providers.request.build import deep_merged
from tokenbus.providers.request.options import RequestOption
from tokenbus_services.gateway.models import ResolvedModel
from tokenbus_services.gateway.problem import invalid, unsupported
from tokenbus_services.gateway.surfaces.contract import GatewayRequest, Translated, TranslationRules
from tokenbus_services.gateway.surfaces.extension import Extension, extension
from tokenbus_services.gateway.surfaces.fields import Fields, Json, json_body
from tokenbus_services.gateway.surfaces.openai_chat.answer_fields import ChatEcho
from tokenbus_services.gateway.surfaces.openai_chat.messages import messages_of

MOST_METADATA, MOST_METADATA_KEY, MOST_METADATA_VALUE = 16, 64, 512
_NEVER = (
    *("audio", "prediction", "web_search_options", "functions", "function_call", "moderation"),
    *("prompt_cache_options", "prompt_cache_retention", "top_logprobs"),
)
"""Parameters that have no counterpart on the bus."""
_PASSED: dict[str, tuple[object, ...]] = {
    "service_tier": ("auto", "default"),
    "logit_bias": ({},),
    "verbosity": ("medium",),
    "prompt_cache_key": (),
    "safety_identifier": (),
}
"""Parameters that go to providers of the same API as they are, with the values that change nothing at others."""
_OPTIONS: dict[RequestOption, tuple[str, tuple[object, ...]]] = {
    "seed": ("seed", ()),
    "user_id": ("user", ("",)),
    "frequency_penalty": ("frequency_penalty", (0, 0.0)),
    "presence_penalty": ("presence_penalty", (0, 0.0)),
    "parallel_tool_calls": ("parallel_tool_calls", (True,)),
}
"""Options of the bus: the parameter of each, and the values of it that change nothing."""


def translate(request: GatewayRequest, rules: TranslationRules) -> Translated:
    """Translate a request. Raises Refusal."""
    body = Fields(json_body(request.body), drop=rules.drop_unsupported)
    own = _own_options(body)
    asked = extension(body, request.headers, rules)
    name = body.needed("model", body.text("model"))
    model = rules.models.resolve(name)
    stream = body.flag("stream") or False
    if stream and asked.on_failure == "restart":
        raise unsupported("tokenbus.on_failure", "'restart' takes back text, which a stream of this protocol cannot")
    extra: Json = {}
    fields: Json = {
        "messages": messages_of(body),
        "max_tokens": _max_tokens(body),
        "temperature": body.number("temperature"),
        "top_p": body.number("top_p"),
        "stop": _stop(body),
        "thinking": _thinking(body),
        **_output_format(body, model),
        **_tools(body, asked, model),
        **_options(body, model),
        "metadata": _metadata(body),
    }
    usage = _stream_options(body, stream=stream)
    _only_some(body, model, extra)
    _refused(body)
    body.end()
    given = {key: value for key, value in {**fields, **asked.generate}.items() if value is not None}
    generate = Generate(
        provider=model.provider,
        model=model.model,
        fallback=None if asked.on_failure == "fail" else model.fallbacks,
        extra=deep_merged(extra, asked.extra or {}) or None,
        stream=own.stream,
        **given,
    )
    echo = ChatEcho(usage=usage, reasoning=own.reasoning, bus_tools=bool(asked.tools), on_failure=generate.on_failure)
    return Translated(
        generate=generate,
        stream=stream,
        model=name,
        run=own.run,
        echo=msgspec.to_builtins(echo),
        on_disconnect=asked.on_disconnect or "cancel",
    )


class _Own(msgspec.Struct, frozen=True, kw_only=True):
    """Options in `tokenbus` of this surface."""

    reasoning: bool = True
    stream: bool = True
    """Whether the provider is asked for a stream."""
    run: str | None = None


def _own_options(body: Fields) -> _Own:
    """Take this surface's options out of `tokenbus`; the rest is every surface's."""
    given = body.json("tokenbus")
    if given is None:
        return _Own()
    fields = Fields({name: given[name] for name in ("reasoning", "stream", "run") if name in given}, "tokenbus")
    body.put("tokenbus", {name: value for name, value in given.items() if name not in ("reasoning", "stream", "run")})
    reasoning, stream = fields.flag("reasoning"), fields.flag("stream")
    return _Own(reasoning=reasoning is not False, stream=stream is not False, run=fields.text("run"))


def _max_tokens(body: Fields) -> int | None:
    new, old = body.whole("max_completion_tokens", least=1), body.whole("max_tokens", least=1)
    if new is not None and old is not None and new != old:
        raise invalid("max_tokens", "differs from max_completion_tokens")
    return old if new is None else new


def _stop(body: Fields) -> list[str]:
    given = body.take("stop")
    if isinstance(given, str):
        return [given] if given else []
    body.put("stop", given)
    return [stop for stop in body.texts("stop") if stop]


def _thinking(body: Fields) -> Thinking | None:
    effort = cast("Effort | None", body.one_of("reasoning_effort", get_args(Effort)))
    if effort is None:
        return None
    return Thinking(enabled=False) if effort == "none" else Thinking(effort=effort)


def _output_format(body: Fields, model: ResolvedModel) -> Json:
    form = body.fields("response_format")
    if form is None:
        return {}
    kind = form.needed("type", form.one_of("type", ("text", "json_schema", "json_object")))
    read: Json = {}
    if kind == "json_object":
        if "json_object" not in options_of(model):
            raise unsupported("response_format.type", "'json_object' is not supported by this provider; give a schema")
        read["json_object"] = True
    elif kind == "json_schema":
        schema = form.needed("json_schema", form.fields("json_schema"))
        schema.text("description")  # not visible, because providers put it in different places
        read["output_schema"] = OutputSchema(
            schema=schema.needed("schema", schema.json("schema")),
            name=schema.text("name") or "answer",
            strict=schema.flag("strict"),
        )
        schema.end()
    form.end()
    return read


def _tools(body: Fields, asked: Extension, model: ResolvedModel) -> Json:
    """Tools of the client, which runs the calls itself, or of the deployment."""
    own: list[Tool] = []
    for fields in body.each("tools"):
        fields.needed("type", fields.one_of("type", ("function",)))
        function = fields.needed("function", fields.fields("function"))
        if "strict_tools" not in options_of(model):
            function.only("strict", False, why="is not supported by this provider")
        own.append(
            Tool(
                name=function.needed("name", function.text("name")),
                description=function.text("description"),
                parameters=function.json("parameters") or {"type": "object"},
                strict=function.flag("strict"),
            )
        )
        function.end()
    choice = _tool_choice(body)
    if not asked.tools:
        if asked.max_tool_depth:
            raise unsupported("tokenbus.max_tool_depth", "this needs tools of the deployment: tokenbus.tools")
        return {"tools": own, "max_tool_depth": 0, "tool_choice": choice if own else None}
    if own:
        raise unsupported("tokenbus.tools", "a request names tools of the client or of the deployment, not both")
    return {"tools": asked.tools, "max_tool_depth": asked.max_tool_depth, "tool_choice": choice}


def _tool_choice(body: Fields) -> Any:
    given = body.take("tool_choice")
    match given:
        case None | "auto" | "none":
            return given
        case "required":
            return "any"
        case dict():
            choice = Fields(cast("Json", given), "tool_choice")
            choice.needed("type", choice.one_of("type", ("function",)))
            function = choice.needed("function", choice.fields("function"))
            name = function.needed("name", function.text("name"))
            function.end()
            choice.end()
            return ToolChoice(name=name)
        case _:
            raise unsupported("tool_choice", "must be 'auto', 'none', 'required' or a function")


def _metadata(body: Fields) -> Json | None:
    given = body.json("metadata")
    if given is None:
        return None
    if len(given) > MOST_METADATA:
        raise invalid("metadata", f"may have at most {MOST_METADATA} keys")
    for key, value in given.items():
        if len(key) > MOST_METADATA_KEY:
            raise invalid("metadata", f"a key may have at most {MOST_METADATA_KEY} characters")
        if not isinstance(value, str) or len(value) > MOST_METADATA_VALUE:
            raise invalid(f"metadata.{key}", f"must be a string of at most {MOST_METADATA_VALUE} characters")
    return {"client": given} if given else None


def _stream_options(body: Fields, *, stream: bool) -> bool:
    options = body.fields("stream_options")
    if options is None:
        return False
    if not stream:
        raise invalid("stream_options", "is for streams only")
    options.flag("include_obfuscation")  # accepted and not done: it only adds noise
    usage = options.flag("include_usage") or False
    options.end()
    return usage


def _only_some(body: Fields, model: ResolvedModel, extra: Json) -> None:
    for name, harmless in _PASSED.items():
        if model.api != "openai-chat":
            body.only(name, *harmless, why="is not supported by this provider")
        elif body.has(name):
            extra[name] = body.take(name)


def _options(body: Fields, model: ResolvedModel) -> Json:
    """Options of the bus. One that the provider lacks is refused here, by the name that the client knows."""
    for option, (name, harmless) in _OPTIONS.items():
        if option not in options_of(model):
            body.only(name, *harmless, why="is not supported by this provider")
    return {
        "seed": _whole(body, "seed"),
        "user_id": body.text("user") or None,
        "frequency_penalty": _penalty(body, "frequency_penalty"),
        "presence_penalty": _penalty(body, "presence_penalty"),
        "parallel_tool_calls": body.flag("parallel_tool_calls"),
    }


def _whole(body: Fields, name: str) -> int | None:
    value = body.number(name)
    if value is not None and not float(value).is_integer():
        raise invalid(name, "must be a whole number")
    return None if value is None else int(value)


def _penalty(body: Fields, name: str) -> float | None:
    value = body.number(name)
    if value is not None and not -2 <= value <= 2:
        raise invalid(name, "must be -2 to 2")
    return value or None


def options_of(model: ResolvedModel) -> frozenset[RequestOption]:
    """The options that the provider's API has; one of a plug-in may know of none."""
    return getattr(registry.get(model.api), "options", frozenset())


def _refused(body: Fields) -> None:
    body.only("n", 1, why="above 1 is not supported by this gateway")
    body.only("logprobs", False)
    body.only("store", False)
    body.only("modalities", ["text"], why="other than text is not supported by this gateway")
    body.only("top_logprobs", 0)
    body.only("functions", [])
    body.only("web_search_options", {})
    body.refuse("is not supported by this gateway", *_NEVER)
