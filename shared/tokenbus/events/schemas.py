"""JSON Schemas of what travels on the public streams: requests in, events out.

`tokenbus/schemas/*.json`, in the wheel, hold what this module gives, for programs that read no Python. `make schemas`
writes them, and a test compares.
"""

from __future__ import annotations

from typing import Any, Literal, Union, cast, get_args

import msgspec

from tokenbus.events import decisions, public, requests, sessions

SchemaName = Literal["requests", "events"]
REF = "#/$defs/"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
UNIONS: dict[SchemaName, dict[str, Any]] = {
    "requests": {"Request": requests.Request},
    "events": {
        "PublicEvent": public.PublicEvent,
        "TerminalEvent": public.TerminalEvent,
        "ChunkTopicEvent": public.Chunk,
        "BlockTopicEvent": public.BlockTopicEvent,
        "RunTopicEvent": public.RunTopicEvent,
        "DecisionTopicEvent": decisions.Decided,
        "SessionEvent": sessions.AnySessionEvent,
        "SessionTopicEvent": sessions.SessionTopicEvent,
    },
}
"""What each schema defines in addition to the single objects. The first is what a value must be to be valid."""
TITLES: dict[SchemaName, str] = {
    "requests": "Requests of tokenbus: what may be put on the inbound stream",
    "events": "Public events of tokenbus: what its topics and logs hold",
}


def schema(name: SchemaName) -> dict[str, Any]:
    """One JSON Schema, with a definition for each object and for each union of them."""
    unions = {union: members(types) for union, types in UNIONS[name].items()}
    structs = dict.fromkeys(one for types in unions.values() for one in types)
    _, objects = _components(list(structs))
    definitions: dict[str, Any] = dict(sorted(objects.items()))
    for union, types in unions.items():
        definitions[union] = _components([Union[tuple(types)]])[0][0]  # noqa: UP007
    valid = REF + next(iter(unions))
    return {"$schema": DIALECT, "title": TITLES[name], "$ref": valid, "$defs": definitions}


def standalone(types: Any) -> dict[str, Any]:
    """The schema of some types with every reference replaced by what it means. No request and no event holds itself,
    so this ends."""
    (found,), objects = _components([Union[tuple(members(types))]])  # noqa: UP007
    return cast("dict[str, Any]", _inlined(found, objects))


def members(types: Any) -> list[Any]:
    """The classes of a union that travel: those that stand for a newer version's are never written."""
    found = [one for member in get_args(types) for one in members(member)] or [types]
    return [one for one in found if one not in (public.UnknownEvent, sessions.UnknownSessionEvent)]


def _components(types: list[Any]) -> tuple[Any, dict[str, Any]]:
    """The schemas of these types, and of what they refer to. `object` is any JSON."""
    hook = {object: {"description": "Any JSON."}}
    found, objects = msgspec.json.schema_components(types, schema_hook=hook.__getitem__, ref_template=REF + "{name}")
    return found, objects


def _inlined(node: object, definitions: dict[str, Any]) -> object:
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in cast("list[object]", node)]
    if not isinstance(node, dict):
        return node
    known = cast("dict[str, object]", node)
    match known.get("$ref"):
        case str(reference):
            return _inlined(definitions[reference.removeprefix(REF)], definitions)
        case _:
            # A mapping from tags to references says again what each struct's `type` does.
            return {name: _inlined(value, definitions) for name, value in known.items() if name != "discriminator"}


def text(name: SchemaName) -> str:
    """What the file of a schema holds."""
    pretty = msgspec.json.format(msgspec.json.encode(schema(name)), indent=2)
    return pretty.decode() + "\n"
