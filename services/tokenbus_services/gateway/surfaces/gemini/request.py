"""A request of the Gemini API as one of the bus: https://ai.google.dev/api/generate-content. Pure."""

from __future__ import annotations

from typing import Any, cast, get_args

import msgspec

from tokenbus.events.requests import Effort, ImageOptions, OutputSchema, Thinking, Tool, ToolChoice
from tokenbus_services.gateway.problem import invalid, unsupported
from tokenbus_services.gateway.surfaces.answering import answering
from tokenbus_services.gateway.surfaces.contract import GatewayRequest, Translated, TranslationRules
from tokenbus_services.gateway.surfaces.fields import Fields, Json, is_whole
from tokenbus_services.gateway.surfaces.gemini.answer import GeminiEcho
from tokenbus_services.gateway.surfaces.gemini.contents import messages_of, system_of
from tokenbus_services.gateway.surfaces.surface import SurfaceRequest, seconds

_SCHEMAS = ("items",)
_LISTS = ("anyOf", "prefixItems")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
"""64-bit numbers, which Google's JSON writes as strings."""
_NO_EFFECT = ("propertyOrdering", "property_ordering", "example", "nullable")
_CAMEL = {
    name: "".join(part if i == 0 else part.title() for i, part in enumerate(name.split("_")))
    for name in (
        *("any_of", "prefix_items", "min_items", "max_items", "min_length", "max_length", "additional_properties"),
        *("min_properties", "max_properties"),
    )
}


def json_schema(schema: Json, at: str) -> Json:
    """Convert a schema. JSON Schema itself comes out unchanged. Raises Refusal, naming the place."""
    out: Json = {}
    for given, value in schema.items():
        name = _CAMEL.get(given, given)
        where = f"{at}.{given}"
        if name == "type":
            out["type"] = value.lower() if isinstance(value, str) else value
        elif name == "properties":
            out[name] = {key: _inner(inner, f"{where}.{key}") for key, inner in _object(value, where).items()}
        elif name in _SCHEMAS:
            out[name] = _inner(value, where)
        elif name in _LISTS:
            if not isinstance(value, list):
                raise invalid(where, "must be a list")
            out[name] = [_inner(inner, f"{where}[{i}]") for i, inner in enumerate(cast("list[Any]", value))]
        elif name in _COUNTS:
            out[name] = int(value) if isinstance(value, str) and is_whole(value) else value
        elif name not in _NO_EFFECT:
            out[name] = value
    if schema.get("nullable") is True and isinstance(out.get("type"), str):
        out["type"] = [out["type"], "null"]
        if isinstance(out.get("enum"), list):
            out["enum"] = [*cast("list[Any]", out["enum"]), None]
    return out


def _inner(value: Any, where: str) -> Json:
    return json_schema(_object(value, where), where)


def _object(value: Any, where: str) -> Json:
    if not isinstance(value, dict):
        raise invalid(where, "must be an object")
    return cast("Json", value)


METHODS = {"generateContent": False, "streamGenerateContent": True}
"""Whether each method streams."""
SERVER_TIMEOUT = "x-server-timeout"

_LENIENT = ("OFF", "BLOCK_NONE", "BLOCK_ONLY_HIGH")
"""Thresholds that ask for less filtering than the API does by itself. Other APIs have no filter to weaken."""
KEY_IN_URL = "a key in the URL ends up in logs: send it in the header x-goog-api-key"


def read(asked: GatewayRequest, rules: TranslationRules, body: Fields) -> Translated:
    """Translate a request. Its path holds ``model`` and ``method``. Raises Refusal."""
    if "key" in asked.query:
        raise unsupported("key", KEY_IN_URL)
    stream = METHODS[asked.path["method"]]
    ask = SurfaceRequest(asked, rules, body, model=asked.path["model"], stream=stream, speaks="gemini")
    tools = _tools(ask)
    config = body.fields("generationConfig") or Fields({}, "generationConfig", body.reading)
    thinking, thoughts = _thinking(config)
    fields: Json = {
        "system": system_of(body) or None,
        "messages": messages_of(body),
        "thinking": thinking,
        "max_tokens": config.whole("maxOutputTokens", least=1),
        "stop": [stop for stop in config.texts("stopSequences") if stop],
        "temperature": config.number("temperature"),
        "top_p": config.share("topP"),
        **_output_format(config, ask),
        "images": _images(config),
        "tool_choice": _tool_choice(body, tools),
        "top_k": ask.optional("top_k", config, "topK", lambda name: config.whole(name, least=1)),
        "seed": ask.optional("seed", config, "seed", lambda name: config.whole(name, least=None)),
        "frequency_penalty": ask.optional("frequency_penalty", config, "frequencyPenalty", config.number, 0, 0.0),
        "presence_penalty": ask.optional("presence_penalty", config, "presencePenalty", config.number, 0, 0.0),
    }
    if ask.deadline_s is None and (timeout := asked.headers.get(SERVER_TIMEOUT)) is not None:
        fields["deadline_s"] = _positive(timeout)
    _without_effect(body, config)
    return answering(ask.translated(fields, tools=tools, echo=GeminiEcho, echoed={"thoughts": thoughts}), "contents")


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
    if level and level != "THINKING_LEVEL_UNSPECIFIED":
        if level.lower() not in get_args(Effort):
            raise unsupported("generationConfig.thinkingConfig.thinkingLevel", f"{level[:100]!r} is not supported")
        if budget is not None:
            raise invalid("generationConfig.thinkingConfig.thinkingBudget", "cannot be given with thinkingLevel")
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


def _output_format(config: Fields, ask: SurfaceRequest) -> Json:
    given = config.json("responseSchema")
    schema = json_schema(given, config.path("responseSchema")) if given else None
    schema = config.json("responseJsonSchema") or schema
    kind = config.one_of("responseMimeType", ("text/plain", "application/json"))
    if schema is not None:
        return {"output_schema": OutputSchema(schema=schema)}
    return ask.json_object() if kind == "application/json" else {}


def _images(config: Fields) -> ImageOptions | None:
    """The answer may hold images if the client asks for them. What else it may be goes to a provider of this API as it
    is, where some models make images without being asked.
    """
    given = config.peek("responseModalities")
    makes = {str(each).upper() for each in cast("list[object]", given)} if isinstance(given, list) else set[str]()
    if config.reading.passes and makes not in ({"IMAGE"}, {"TEXT", "IMAGE"}):
        return None
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
    return options


def _without_effect(body: Fields, config: Fields) -> None:
    """Values that change nothing, and hints."""
    config.only("candidateCount", 1)
    config.only("responseLogprobs", False)
    config.only("audioTimestamp", False)
    config.hint("mediaResolution", "MEDIA_RESOLUTION_UNSPECIFIED")
    body.only("store", False)
    body.hint("labels", {})
    if _is_lenient(body.value.get("safetySettings", body.value.get("safety_settings"))):
        body.hint("safetySettings")
    else:
        body.only("safetySettings", [])


def _is_lenient(safety: object) -> bool:
    try:
        settings = msgspec.convert(safety, list[dict[str, object]])
    except msgspec.ValidationError:
        return False
    return all(each.get("threshold") in _LENIENT for each in settings)


def _tools(ask: SurfaceRequest) -> list[Tool]:
    def group(fields: Fields) -> list[Tool] | Json:
        return [_declared(each) for each in fields.each("functionDeclarations")]

    groups = ask.body.each_read("tools", group, dict)
    tools = ask.raw_tools([each for each in groups if isinstance(each, dict)])
    return [*tools, *(tool for each in groups if isinstance(each, list) for tool in each)]


def _declared(fields: Fields) -> Tool:
    given = fields.json("parameters")
    schema = fields.json("parametersJsonSchema")
    fields.hint("response", {})
    fields.hint("responseJsonSchema", {})
    fields.only("behavior", "UNSPECIFIED", "BLOCKING")
    if schema is None:
        schema = json_schema(given, fields.path("parameters")) if given else dict[str, object](type="object")
    name = fields.needed("name", fields.text("name"))
    return Tool(name=name, description=fields.text("description"), parameters=schema)


def _tool_choice(body: Fields, tools: list[Tool]) -> Any:
    config = body.fields("toolConfig")
    if config is None:
        return None
    calling = config.fields("functionCallingConfig")
    choice: Any = None
    if calling:
        mode = None
        if calling.value.get("mode") == "VALIDATED":  # as AUTO, and arguments fit their schemas
            calling.hint("mode")
        else:
            mode = calling.one_of("mode", ("MODE_UNSPECIFIED", "AUTO", "ANY", "NONE"))
        choice = {"AUTO": "auto", "ANY": "any", "NONE": "none"}.get(mode or "")
        names = calling.texts("allowedFunctionNames")
        if names and mode == "ANY" and len(names) == 1:
            choice = ToolChoice(name=names[0])
        elif names and set(names) != {tool.name for tool in tools}:
            where = calling.path("allowedFunctionNames")
            raise unsupported(where, "only one function or all of them can be allowed: leave the others out")
        calling.only("streamFunctionCallArguments", False)
    config.only("includeServerSideToolInvocations", False)
    return choice


def _positive(timeout: str) -> float:
    """The seconds after which the client gives up."""
    what = "a number of seconds greater than 0"
    value = seconds(timeout, SERVER_TIMEOUT, what)
    if value <= 0:
        raise invalid(SERVER_TIMEOUT, f"must be {what}")
    return value
