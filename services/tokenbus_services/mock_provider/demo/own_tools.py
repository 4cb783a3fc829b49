"""Calls of a newcomer's own tools: there is no model, so the text names the tool, and may give its arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec

from tokenbus_services.mock_provider.reply import ToolCall

_SCHEMAS = ("parameters", "input_schema", "parametersJsonSchema")
"""Where the APIs have the schema of a tool's arguments."""
_QUOTED = re.compile(r"[\"“]([^\"”]+)[\"”]")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_SAMPLES: Mapping[str, object] = {"boolean": True, "array": [], "object": {}, "null": None}

Json = dict[str, Any]


def named_call(text: str, tools: object) -> ToolCall | None:
    """The call of the first tool that the text names as a word; None if it names none.

    The arguments are the text's JSON object, or else one for each required property: quoted words and numbers of the
    text, in their order.
    """
    for name, schema in _declared(tools):
        if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text, re.IGNORECASE):
            return ToolCall(name=name, arguments=_given(text) or _made(text, schema))
    return None


def _declared(value: object) -> Iterator[tuple[str, Json]]:
    """Name and schema of each tool, wherever the API's request has them."""
    if isinstance(value, list):
        for each in cast("list[object]", value):
            yield from _declared(each)
    elif isinstance(value, dict):
        tool = cast("Json", value)
        schema = next((tool[field] for field in _SCHEMAS if isinstance(tool.get(field), dict)), None)
        if isinstance(name := tool.get("name"), str) and schema is not None:
            yield name, schema
        else:
            for inner in tool.values():
                yield from _declared(inner)


def _given(text: str) -> Json | None:
    begin, end = text.find("{"), text.rfind("}")
    try:
        return msgspec.json.decode(text[begin : end + 1], type=Json) if 0 <= begin < end else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _made(text: str, schema: Json) -> Json:
    quoted, numbers = iter(_QUOTED.findall(text)), iter(_NUMBER.findall(text))
    properties: Json = schema.get("properties") or {}
    made: Json = {}
    for name in schema.get("required") or properties:
        about: Json = properties.get(name) or {}
        kind = str(about.get("type", "")).lower()
        if choices := about.get("enum"):
            made[name] = choices[0]
        elif kind in {"integer", "number"}:
            number = float(next(numbers, "1"))
            made[name] = int(number) if kind == "integer" else number
        else:
            made[name] = _SAMPLES[kind] if kind in _SAMPLES else next(quoted, "example")
    return made
