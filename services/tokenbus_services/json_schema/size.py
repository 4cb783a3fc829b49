"""Measures the effective size of a JSON Schema: the number of parts after every reference is followed.

A schema of one kilobyte can keep a validator busy forever: references to references double the work at each step, and
so does nested ``unevaluatedProperties``. Recursive references do not, because the validator remembers its answers. So
everything except such loops is counted as often as a validator visits it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias, cast
from urllib.parse import unquote

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

MAX_SCHEMA_DEPTH = 64
"""Applies to the schema as written and with every reference followed."""
MAX_PARTS = 10_000
"""Objects and lists, counted once per visit."""

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_DEFINITIONS = ("$defs", "definitions")
_ANCHORS = ("$anchor", "$dynamicAnchor")
_LOOK_TWICE = ("unevaluatedProperties", "unevaluatedItems")
"""Keywords that evaluate their siblings again."""


class SchemaError(ValueError):
    """The value is not a JSON Schema, or exceeds a limit of this module."""


class Loop(NamedTuple):
    """A reference that leads back to one of its containers."""

    node: dict[str, Json]
    keyword: str


def unfold(schema: dict[str, Json]) -> tuple[int, list[Loop]]:
    """Return the number of parts a validator visits, and the loops, which are not followed.

    Raises SchemaError if the schema is too large or too deep, or a reference does not resolve within it.
    """
    if any(node is not schema and isinstance(node.get("$id"), str) for node in objects(schema)):
        raise SchemaError("`$id` below the top is not supported")
    unfolding = _Unfolding(schema)
    size = unfolding.measure(schema, above=0).size
    if size > MAX_PARTS:
        raise SchemaError(f"over {MAX_PARTS} parts when each reference is followed")
    return size, unfolding.loops


def deeper_than(limit: int, value: dict[str, object]) -> bool:
    """Whether objects and lists are nested deeper than ``limit`` levels, including the outermost one."""
    level = [cast("Json", value)]
    for _ in range(limit):
        level = [child for node in level for child in _children(node)]
        if not level:
            return False
    return True


def objects(schema: Json) -> Iterator[dict[str, Json]]:
    """Yield every object in a schema, including the schema itself."""
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
        """Keyed by the part's ``id()``."""

    def measure(self, node: Json, above: int) -> _Measure:
        """Measure a part with ``above`` parts above it. Raises SchemaError."""
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
        """The direct children of a part, by nesting or by reference."""
        # Top-level definitions count only when referenced.
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
        """Resolve a reference: ``#``, a JSON pointer ``#/…`` or an anchor ``#name``."""
        if not reference.startswith("#"):
            raise SchemaError(f"reference {reference[:80]!r} points outside the schema")
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
            raise SchemaError(f"reference {reference[:80]!r} does not resolve") from None
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
    """The objects and lists directly inside a node."""
    match node:
        case dict():
            inside = list(node.values())
        case list():
            inside = node
        case _:
            inside = []
    return (child for child in inside if isinstance(child, dict | list))
