"""How large a JSON schema is to a validator: what it unfolds to when each reference is followed.

A schema of a kilobyte can keep a validator busy for ever: references to references double the work with each step,
and so does ``unevaluatedProperties`` inside itself. References that lead back do not: the validator remembers what it
has answered. So all that is not such a loop is counted here, as often as a validator looks at it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias, cast
from urllib.parse import unquote

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

MAX_SCHEMA_DEPTH = 64
"""As it stands, and with each reference followed."""
MAX_PARTS = 10_000
"""Objects and lists, counted as often as they are looked at."""

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_DEFINITIONS = ("$defs", "definitions")
_ANCHORS = ("$anchor", "$dynamicAnchor")
_LOOK_TWICE = ("unevaluatedProperties", "unevaluatedItems")
"""They ask what is beside them again, for what it has evaluated."""


class SchemaError(ValueError):
    """What was given is no JSON schema, or one over a bound here."""


class Loop(NamedTuple):
    """A reference that leads back into what it stands in."""

    node: dict[str, Json]
    keyword: str


def unfold(schema: dict[str, Json]) -> tuple[int, list[Loop]]:
    """How many parts a validator has to look at, and the loops, which are not followed.

    Raises SchemaError where the whole is too large or too deep, or a reference leads nowhere in the schema.
    """
    if any(node is not schema and isinstance(node.get("$id"), str) for node in objects(schema)):
        raise SchemaError("`$id` below the top is not supported")
    unfolding = _Unfolding(schema)
    size = unfolding.measure(schema, above=0).size
    if size > MAX_PARTS:
        raise SchemaError(f"over {MAX_PARTS} parts to look at when each reference is followed")
    return size, unfolding.loops


def deeper_than(limit: int, value: dict[str, object]) -> bool:
    """Whether objects and lists are nested over so many levels, the outermost one included."""
    level = [cast("Json", value)]
    for _ in range(limit):
        level = [child for node in level for child in _children(node)]
        if not level:
            return False
    return True


def objects(schema: Json) -> Iterator[dict[str, Json]]:
    """Every object in a schema, itself too."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
        waiting.extend(_children(node))


class _Measure(NamedTuple):
    size: int
    height: int


_IN_PROGRESS = _Measure(0, 0)


class _Unfolding:
    """Measures each part of a schema once."""

    def __init__(self, schema: dict[str, Json]) -> None:
        self.loops: list[Loop] = []
        self._schema = schema
        self._anchors = {
            name: node for node in objects(schema) for key in _ANCHORS if isinstance(name := node.get(key), str)
        }
        self._measures: dict[int, _Measure] = {}
        """By the ``id()`` of the part."""

    def measure(self, node: Json, above: int) -> _Measure:
        """A part that lies below so many others. Raises SchemaError."""
        known = self._measures.get(id(node))
        if above + (known.height if known else 1) > MAX_SCHEMA_DEPTH:
            raise SchemaError(f"deeper than {MAX_SCHEMA_DEPTH} levels when each reference is followed")
        if known is None:
            self._measures[id(node)] = _IN_PROGRESS
            below = [self.measure(part, above + 1) for part in self._parts(node)]
            looks = 2 if isinstance(node, dict) and not node.keys().isdisjoint(_LOOK_TWICE) else 1
            size = 1 + looks * sum(part.size for part in below)
            known = self._measures[id(node)] = _Measure(size, 1 + max((part.height for part in below), default=0))
        return known

    def _parts(self, node: Json) -> Iterator[Json]:
        """What lies right below a part, by nesting or by reference."""
        # What lies ready at the top to be referred to is no part yet.
        unused = {id(self._schema.get(key)) for key in _DEFINITIONS} if node is self._schema else set[int]()
        yield from (child for child in _children(node) if id(child) not in unused)
        if isinstance(node, dict):
            for keyword in _REFERENCES:
                if isinstance(reference := node.get(keyword), str):
                    target = self._target(reference)
                    if self._measures.get(id(target)) is _IN_PROGRESS:
                        self.loops.append(Loop(node, keyword))
                    else:
                        yield target

    def _target(self, reference: str) -> Json:
        """What a reference names: ``#``, a JSON pointer ``#/…`` or an anchor ``#name``."""
        if not reference.startswith("#"):
            raise SchemaError(f"reference {reference[:80]!r} leads out of the schema")
        name = unquote(reference[1:])
        if name in self._anchors:
            return self._anchors[name]
        node: Json = self._schema
        top, *tokens = name.split("/")
        try:
            if top:
                raise KeyError(top)
            for token in tokens:
                node = _step(node, token.replace("~1", "/").replace("~0", "~"))
        except (LookupError, ValueError):
            raise SchemaError(f"reference {reference[:80]!r} leads nowhere") from None
        return node


def _step(node: Json, token: str) -> Json:
    """One step of a JSON pointer (RFC 6901, 4). Raises LookupError or ValueError."""
    match node:
        case dict():
            return node[token]
        case list():
            return node[int(token)]
        case _:
            raise KeyError(token)


def _children(node: Json) -> Iterator[Json]:
    """The objects and lists right inside one."""
    match node:
        case dict():
            inside = list(node.values())
        case list():
            inside = node
        case _:
            inside = []
    return (child for child in inside if isinstance(child, dict | list))
