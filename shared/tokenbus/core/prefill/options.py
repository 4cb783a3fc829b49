"""Options of a request that determine how the model's text is parsed."""

from __future__ import annotations

from typing import cast

from tokenbus.events.frames import TextReading
from tokenbus.events.quirks import ApiName, Quirks
from tokenbus.events.requests import Generate, Tool
from tokenbus.providers import registry
from tokenbus.providers.request.participants import end_of_turn, reading_stops
from tokenbus.providers.request.transcript import follows_a_name, opens_thinking

THINKING = "thinking"
"""Tag in which the prompt asks for thinking; other tags that the model uses are parsed too."""


def reading_of(request: Generate, api: ApiName, quirks: Quirks) -> TextReading:
    """How to parse the text of a request in prefill mode.

    ``quirks`` are the provider's; its end-of-turn token and the tags in which the model thinks are used.
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
    """JSON types of the tool's parameters, without those that are plain text."""
    properties = cast("dict[str, object]", tool.parameters.get("properties", {}))
    found = {name: _types_of(schema) for name, schema in properties.items()}
    return {name: types for name, types in found.items() if types not in ([], ["string"])}


def _types_of(schema: object) -> list[str]:
    """The types that a schema allows; empty if it does not say."""
    if not isinstance(schema, dict):
        return []
    fields = cast("dict[str, object]", schema)
    match fields.get("type"):
        case str(one):
            return [one]
        case list():
            return [str(name) for name in cast("list[object]", fields["type"])]
        case _:
            pass
    types: list[str] = []
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := fields.get(word), list):
            types += [name for branch in cast("list[object]", branches) for name in _types_of(branch) or ["any"]]
    if not types and "$ref" in fields:
        return ["any"]
    return list(dict.fromkeys(types))
