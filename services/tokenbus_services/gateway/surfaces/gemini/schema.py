"""Gemini's own schemas, a subset of OpenAPI 3.0, as JSON Schema: https://ai.google.dev/api/caching#Schema. Pure."""

from __future__ import annotations

from typing import Any, cast

from tokenbus_services.gateway.problem import invalid
from tokenbus_services.gateway.surfaces.fields import is_whole

Json = dict[str, Any]

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
