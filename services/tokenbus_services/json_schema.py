"""JSON Schemas of tools and answers: validates the schema, and validates tool arguments against it.

Schemas come from clients and arguments from models, so both are bounded: schema size is limited by `size`, nothing is
ever fetched, and patterns run without backtracking, or with a bounded amount of it if they use lookaround. The
remaining work is proportional to schema size times argument size; the validator holds the GIL during it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from typing import NamedTuple, TypeAlias, cast
from urllib.parse import unquote

import msgspec
from jsonschema_rs import FancyRegexOptions, ReferencingError, ValidationError, Validator, validator_for

from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import OutputSchema, Tool

MAX_SCHEMA_BYTES = 256 * 2**10
MAX_ARGUMENT_DEPTH = 100
"""The validator may recurse this deep times the schema's depth on the native stack; beyond that it crashes."""
MAX_PATTERNS = 256
"""Maximum patterns in the schemas of one request; compiling one may take a few milliseconds."""

_PATTERNS = FancyRegexOptions(backtrack_limit=100_000, size_limit=2 * 2**20)
_MOST_PROBLEMS = 5
_PROBLEM_CHARS = 300
_MOST_TO_EXPLAIN = 50_000_000
"""Limit of schema parts times argument bytes for detailed errors: each error holds a copy of its data."""


class Schema:
    def __init__(self, validator: Validator, explainer: Validator, *, size: int, patterns: int) -> None:
        self._validator = validator
        self._explainer = explainer
        """The schema without its loops. Listing errors takes time exponential in the loop depth; a yes/no check does
        not.
        """
        self._size = size
        self.patterns = patterns
        """Number of patterns in the schema."""

    def problems(self, arguments: dict[str, object], what: str = "arguments") -> list[str]:
        """Return a few short sentences, each with a location, that say how the arguments violate the schema; empty if
        valid. ``what``: what they are called there.
        """
        if deeper_than(MAX_ARGUMENT_DEPTH, arguments):
            return [f"{what}: nested deeper than {MAX_ARGUMENT_DEPTH} levels"]
        problems: list[str] = []
        try:
            with _panics_as_errors():
                if self._validator.is_valid(arguments):
                    return []
                if len(msgspec.json.encode(arguments)) * self._size <= _MOST_TO_EXPLAIN:
                    errors = islice(self._explainer.iter_errors(arguments), _MOST_PROBLEMS)
                    problems += (f"{_path(what, e.instance_path)}: {_short(e.message)}" for e in errors)
        except SchemaError as e:
            return [f"{what}: they cannot be checked: {e}"]
        return problems or [f"{what}: they do not match the tool's schema"]


def check_tools(tools: Sequence[Tool]) -> None:
    """Check that each tool's ``parameters`` is a usable JSON Schema.

    Raises RequestInvalid with ``where`` of the form ``tools[2].parameters``.
    """
    patterns = 0
    for i, tool in enumerate(tools):
        if tool.format and tool.parameters:
            raise RequestInvalid(f"tools[{i}].format", "a tool has `parameters` or a `format`, not both")
        try:
            patterns += compile_schema(tool.parameters).patterns
            if patterns > MAX_PATTERNS:
                raise SchemaError(f"the tools of a request may have at most {MAX_PATTERNS} patterns")
        except SchemaError as e:
            raise RequestInvalid(f"tools[{i}].parameters", str(e)) from None


def check_output(output: OutputSchema | None) -> None:
    """Check that the answer's ``schema`` is a JSON Schema. Raises RequestInvalid at ``output_schema.schema``."""
    try:
        if output:
            compile_schema(output.schema)
    except SchemaError as e:
        raise RequestInvalid("output_schema.schema", str(e)) from None


def compile_schema(parameters: dict[str, object]) -> Schema:
    """Compile a schema, using the draft named by its ``$schema``, else 2020-12. Raises SchemaError.

    Compiled schemas are cached.
    """
    if deeper_than(MAX_SCHEMA_DEPTH, parameters):
        raise SchemaError(f"nested deeper than {MAX_SCHEMA_DEPTH} levels")
    try:
        encoded = msgspec.json.encode(parameters)
    except (TypeError, ValueError) as e:
        raise SchemaError(f"not JSON: {e}") from None
    if len(encoded) > MAX_SCHEMA_BYTES:
        raise SchemaError(f"{len(encoded)} bytes, the limit is {MAX_SCHEMA_BYTES}")
    return _compile(encoded)


@lru_cache(maxsize=512)
def _compile(encoded: bytes) -> Schema:
    schema: dict[str, Json] = msgspec.json.decode(encoded)
    patterns = sum(_patterns(node) for node in objects(schema))
    if patterns > MAX_PATTERNS:
        raise SchemaError(f"{patterns} patterns, the limit is {MAX_PATTERNS}")
    size, loops = unfold(schema)
    try:
        with _panics_as_errors():
            validator = explainer = validator_for(schema, offline=True, pattern_options=_PATTERNS)
            for node, reference in loops:
                del node[reference]
            if loops:
                explainer = validator_for(schema, offline=True, pattern_options=_PATTERNS)
        return Schema(validator, explainer, size=size, patterns=patterns)
    except ValidationError as e:
        raise SchemaError(f"not a JSON schema: {_path('$', e.instance_path)}: {_short(e.message)}") from None
    except (ReferencingError, ValueError) as e:
        raise SchemaError(f"not a JSON schema: {_short(str(e))}") from None


@contextmanager
def _panics_as_errors() -> Generator[None]:
    """Convert a panic of the validator, which is written in Rust, to a SchemaError.

    Its `PanicException` is no `Exception`, so it would end the worker, and each that gets the request after it.
    """
    try:
        yield
    except BaseException as e:
        if type(e).__name__ != "PanicException":
            raise
        raise SchemaError(f"the validator failed: {_short(str(e))}") from e


def _patterns(node: dict[str, Json]) -> int:
    several = node.get("patternProperties")
    return isinstance(node.get("pattern"), str) + (len(several) if isinstance(several, dict) else 0)


def _path(root: str, steps: Sequence[str | int]) -> str:
    """A JSON location in readable form: ``arguments.items[2].name``."""
    return root + "".join(f"[{step}]" if isinstance(step, int) else f".{_short(step)}" for step in steps)


def _short(text: str) -> str:
    return text if len(text) <= _PROBLEM_CHARS else f"{text[:_PROBLEM_CHARS]}…"


# Measures the effective size of a JSON Schema: the number of parts after every reference is followed.
#
# A schema of one kilobyte can keep a validator busy forever: references to references double the work at each step, and
# so does nested ``unevaluatedProperties``. Recursive references do not, because the validator remembers its answers. So
# everything except such loops is counted as often as a validator visits it.

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
