"""What of a request decides how the model's text is read."""

from __future__ import annotations

from typing import cast

from tokenbus.events.frames import TextReading
from tokenbus.events.requests import Generate, Tool
from tokenbus.providers.transcript import opens_thinking, reading_stops


def reading_of(request: Generate) -> TextReading | None:
    """How the text is read; None in chat mode, where the provider's own structure gives the blocks."""
    if request.mode != "prefill":
        return None
    return TextReading(
        stops=reading_stops(request),
        types={tool.name: types for tool in request.tools if (types := _types(tool))},
        inside="thinking" if opens_thinking(request) else "",
    )


def _types(tool: Tool) -> dict[str, list[str]]:
    """The JSON types of the tool's parameters, but for those that are text and nothing else."""
    properties = cast("dict[str, object]", tool.parameters.get("properties", {}))
    found = {name: _types_of(schema) for name, schema in properties.items()}
    return {name: types for name, types in found.items() if types not in ([], ["string"])}


def _types_of(schema: object) -> list[str]:
    """The types that a schema allows; none where it does not say."""
    if not isinstance(schema, dict):
        return []
    said = cast("dict[str, object]", schema)
    match said.get("type"):
        case str(one):
            return [one]
        case list():
            return [str(name) for name in cast("list[object]", said["type"])]
        case _:
            pass
    types: list[str] = []
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := said.get(word), list):
            types += [name for branch in cast("list[object]", branches) for name in _types_of(branch) or ["any"]]
    if not types and "$ref" in said:
        return ["any"]
    return list(dict.fromkeys(types))
