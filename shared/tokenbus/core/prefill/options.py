"""What of a request decides how the model's text is read."""

from __future__ import annotations

from typing import cast

from tokenbus.events.frames import TextReading
from tokenbus.events.quirks import ApiName, Quirks
from tokenbus.events.requests import Generate, Tool
from tokenbus.providers import registry
from tokenbus.providers.request.participants import end_of_turn, reading_stops
from tokenbus.providers.request.transcript import follows_a_name, opens_thinking

THINKING = "thinking"
"""The tag in which the prompt asks for thinking; whatever else a model writes it in is read as well."""


def reading_of(request: Generate, api: ApiName, quirks: Quirks) -> TextReading:
    """How the text of a request in prefill mode is read.

    ``quirks`` are the provider's; of them its end-of-turn token counts, and the tags in which the model thinks.
    """
    return TextReading(
        stops=reading_stops(request),
        types={tool.name: types for tool in request.tools if (types := _types(tool))},
        inside=THINKING if opens_thinking(request) else "",
        thinking=tuple(dict.fromkeys((THINKING, *quirks.of(request.model).inline_thinking))),
        end_of_turn=end_of_turn(request, quirks, registry.get(api).end_of_turn),
        follows_a_name=follows_a_name(request),
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
