"""What a public topic carries, as its AsyncAPI page shows it; FastStream asks pydantic, which knows no msgspec."""

from __future__ import annotations

from typing import Annotated, Any, cast

import msgspec
from pydantic import WithJsonSchema

from tokenbus.bus.keys import PublicTopic
from tokenbus.events.public import BlockEvent, Chunk, RunEvent, ToolProgress

_EVENTS: dict[PublicTopic, Any] = {
    "visible": Chunk,
    "chunks": Chunk,
    "blocks": BlockEvent | ToolProgress,
    "runs": RunEvent,
}
_DEFS = "#/$defs/"


def payload(topic: PublicTopic) -> Any:
    """A type for FastStream that has the JSON schema of the topic's events."""
    schema = msgspec.json.schema(_EVENTS[topic], schema_hook=_any_json)
    return Annotated[dict[str, Any], WithJsonSchema(cast("dict[str, Any]", _inlined(schema, schema.pop("$defs", {}))))]


def _any_json(kind: type) -> dict[str, Any]:
    return {"description": "Any JSON."}


def _inlined(node: object, definitions: dict[str, Any]) -> object:
    """The schema with each reference replaced by what it means: pydantic takes no definitions but its own. No event
    holds itself, so this ends."""
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in cast("list[object]", node)]
    if not isinstance(node, dict):
        return node
    known = cast("dict[str, object]", node)
    match known.get("$ref"):
        case str(reference):
            return _inlined(definitions[reference.removeprefix(_DEFS)], definitions)
        case _:
            # A mapping from tags to references says again what each struct's `type` does.
            return {name: _inlined(value, definitions) for name, value in known.items() if name != "discriminator"}
