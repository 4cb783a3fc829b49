"""A request of the Gemini API as one of the bus: https://ai.google.dev/api/generate-content. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast, get_args

from tokenbus.events.requests import Effort, ImageOptions, OutputSchema, Thinking, Tool, ToolChoice
from tokenbus.providers.request.options import RequestOption
from tokenbus_services.gateway.problem import invalid, unsupported
from tokenbus_services.gateway.surfaces.answering import echo_of, generate_of, options_of, tool_fields
from tokenbus_services.gateway.surfaces.contract import GatewayRequest, Translated, TranslationRules
from tokenbus_services.gateway.surfaces.extension import extension
from tokenbus_services.gateway.surfaces.fields import Fields, Json, json_body
from tokenbus_services.gateway.surfaces.gemini.contents import messages_of, system_of
from tokenbus_services.gateway.surfaces.gemini.schema import json_schema

METHODS = {"generateContent": False, "streamGenerateContent": True}
"""Whether each method streams."""
SERVER_TIMEOUT = "x-server-timeout"

KEY_IN_URL = "a key in the URL ends up in logs: send it in the header x-goog-api-key"
NOT_HERE = "is not supported by this provider"


def translate(request: GatewayRequest, rules: TranslationRules) -> Translated:
    """Translate a request. Its path holds ``model`` and ``method``. Raises Refusal."""
    if "key" in request.query:
        raise unsupported("key", KEY_IN_URL)
    body = Fields(json_body(request.body), drop=rules.drop_unsupported, spelling=camel)
    asked = extension(body, request.headers, rules)
    name = request.path["model"]
    model = rules.models.resolve(name)
    stream = METHODS[request.path["method"]]
    has = options_of(model, rules.models)
    tools = _tools(body)
    config = body.fields("generationConfig") or Fields({}, "generationConfig")
    thinking, thoughts = _thinking(config)
    fields: Json = {
        "system": system_of(body) or None,
        "messages": messages_of(body),
        "thinking": thinking,
        "max_tokens": config.whole("maxOutputTokens", least=1),
        "stop": [stop for stop in config.texts("stopSequences") if stop],
        "temperature": config.number("temperature"),
        "top_p": config.share("topP"),
        **_output_format(config, has),
        "images": _images(config),
        "tool_choice": _tool_choice(body, tools),
        **tool_fields(tools, asked),
        **_sampling(config, has),
    }
    if asked.deadline_s is None and (deadline_s := _server_timeout(request.headers)):
        fields["deadline_s"] = deadline_s
    _without_effect(body, config)
    extra: Json = {}
    if model.api == "gemini" and body.has("safetySettings"):
        extra["safetySettings"] = body.take("safetySettings")
    else:
        body.only("safetySettings", [], why=NOT_HERE)
    config.end()
    body.end()
    return Translated(
        generate=generate_of(model, asked, fields, extra, stream=stream),
        stream=stream,
        model=name,
        echo={**echo_of(model, rules.models, asked), "thoughts": thoughts},
        on_disconnect=asked.on_disconnect or "cancel",
        run=asked.run,
    )


def camel(name: str) -> str:
    """The API takes every field in camelCase and in snake_case."""
    first, *rest = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)


def _thinking(config: Fields) -> tuple[Thinking | None, bool]:
    """How much the model may think, and whether the client gets its thoughts."""
    asked = config.fields("thinkingConfig")
    if asked is None:
        return None, False
    thoughts = asked.flag("includeThoughts") or False
    budget = asked.number("thinkingBudget")
    level = asked.text("thinkingLevel")
    asked.end()
    if level and level != "THINKING_LEVEL_UNSPECIFIED":
        if level.lower() not in get_args(Effort):
            raise unsupported("generationConfig.thinkingConfig.thinkingLevel", f"{level[:100]!r} is not supported")
        return Thinking(effort=cast("Effort", level.lower())), thoughts
    match budget:
        case None:
            return (Thinking() if thoughts else None), thoughts
        case 0:
            return Thinking(enabled=False), thoughts
        case -1:
            return Thinking(), thoughts
        case _ if budget > 0 and float(budget).is_integer():
            return Thinking(budget_tokens=int(budget)), thoughts
        case _:
            raise invalid("generationConfig.thinkingConfig.thinkingBudget", "must be -1, 0 or a number of tokens")


def _output_format(config: Fields, has: frozenset[RequestOption]) -> Json:
    given = config.json("responseSchema")
    schema = json_schema(given, config.path("responseSchema")) if given else None
    schema = config.json("responseJsonSchema") or schema
    if schema is not None or "json_object" in has:
        kind = config.one_of("responseMimeType", ("text/plain", "application/json"))
    else:
        kind = None
        config.only("responseMimeType", "text/plain", why="needs a responseSchema with this provider")
    if schema is not None:
        return {"output_schema": OutputSchema(schema=schema)}
    return {"json_object": kind == "application/json"}


def _images(config: Fields) -> ImageOptions | None:
    """The answer may hold images if the client asks for them."""
    modalities = config.texts("responseModalities")
    form = config.fields("imageConfig")
    for i, modality in enumerate(modalities):
        if modality.upper() not in ("TEXT", "IMAGE"):
            raise unsupported(f"generationConfig.responseModalities[{i}]", f"{modality[:100]!r} is not supported")
    if "IMAGE" not in (modality.upper() for modality in modalities):
        if form:
            raise unsupported("generationConfig.imageConfig", "this needs IMAGE in responseModalities")
        return None
    options = ImageOptions(deliver="base64")
    if form:
        size, ratio = form.text("imageSize"), form.text("aspectRatio")
        options = ImageOptions(deliver="base64", size=size, aspect_ratio=ratio)
        form.end()
    return options


def _sampling(config: Fields, has: frozenset[RequestOption]) -> Json:
    """Options that only some providers have."""
    for option, name in _OPTIONS.items():
        if option not in has:
            config.only(name, *_NEUTRAL.get(name, ()), why=NOT_HERE)
    return {
        "top_k": config.whole("topK", least=1),
        "seed": config.whole("seed", least=None),
        "frequency_penalty": config.number("frequencyPenalty"),
        "presence_penalty": config.number("presencePenalty"),
    }


_OPTIONS: Mapping[RequestOption, str] = {
    "top_k": "topK",
    "seed": "seed",
    "frequency_penalty": "frequencyPenalty",
    "presence_penalty": "presencePenalty",
}
_NEUTRAL = {"frequencyPenalty": (0, 0.0), "presencePenalty": (0, 0.0)}


def _without_effect(body: Fields, config: Fields) -> None:
    """Values that change nothing."""
    config.only("candidateCount", 1)
    config.only("responseLogprobs", False)
    config.only("audioTimestamp", False)
    config.only("mediaResolution", "MEDIA_RESOLUTION_UNSPECIFIED")
    body.only("store", False)
    body.only("labels", {})


def _tools(body: Fields) -> list[Tool]:
    tools: list[Tool] = []
    for group in body.each("tools"):
        for fields in group.each("functionDeclarations"):
            given = fields.json("parameters")
            schema = fields.json("parametersJsonSchema")
            fields.only("behavior", "UNSPECIFIED", "BLOCKING")
            if schema is None:
                schema = json_schema(given, fields.path("parameters")) if given else dict[str, object](type="object")
            name = fields.needed("name", fields.text("name"))
            tools.append(Tool(name=name, description=fields.text("description"), parameters=schema))
    return tools


def _tool_choice(body: Fields, tools: list[Tool]) -> Any:
    config = body.fields("toolConfig")
    if config is None:
        return None
    calling = config.fields("functionCallingConfig")
    choice: Any = None
    if calling:
        mode = calling.one_of("mode", ("MODE_UNSPECIFIED", "AUTO", "ANY", "NONE"))
        choice = {"AUTO": "auto", "ANY": "any", "NONE": "none"}.get(mode or "")
        names = calling.texts("allowedFunctionNames")
        if names and mode == "ANY" and len(names) == 1:
            choice = ToolChoice(name=names[0])
        elif names and set(names) != {tool.name for tool in tools}:
            where = calling.path("allowedFunctionNames")
            raise unsupported(where, "only one function or all of them can be allowed: leave the others out")
        calling.only("streamFunctionCallArguments", False)
        calling.end()
    config.only("includeServerSideToolInvocations", False)
    config.end()
    return choice


def _server_timeout(headers: Mapping[str, str]) -> float | None:
    """The seconds after which the client gives up."""
    value = headers.get(SERVER_TIMEOUT)
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise invalid(SERVER_TIMEOUT, "must be a number of seconds greater than 0")
    return seconds
