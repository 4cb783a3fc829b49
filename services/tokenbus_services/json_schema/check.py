"""JSON schemas of tools and answers: is it one, and do a tool's arguments meet it.

Schemas come from clients and arguments from models, so neither may cost more than it is worth: a schema has the bounds
of `unfolding`, nothing is ever fetched for it, and its patterns run without backtracking, or with a bounded amount of
it where they look around. What is left is work in proportion to the schema times the arguments, during which the
validator holds the interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice

import msgspec
from jsonschema_rs import FancyRegexOptions, ReferencingError, ValidationError, Validator, validator_for

from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import OutputSchema, Tool
from tokenbus_services.json_schema.size import MAX_SCHEMA_DEPTH, Json, SchemaError, deeper_than, objects, unfold

MAX_SCHEMA_BYTES = 256 * 2**10
MAX_ARGUMENT_DEPTH = 100
"""The validator may go down as far as this times a schema's depth, on the machine's stack; past that is a crash."""
MAX_PATTERNS = 256
"""In the schemas of one request; compiling one may take a few milliseconds."""

_PATTERNS = FancyRegexOptions(backtrack_limit=100_000, size_limit=2 * 2**20)
_MOST_PROBLEMS = 5
_PROBLEM_CHARS = 300
_MOST_TO_EXPLAIN = 50_000_000
"""Parts of a schema times bytes of the arguments: each error holds a copy of what it is about."""


class Schema:
    """A compiled schema."""

    def __init__(self, validator: Validator, explainer: Validator, *, size: int, patterns: int) -> None:
        self._validator = validator
        self._explainer = explainer
        """The same without its loops: to name errors takes a time that doubles with each turn of a loop, where to
        say yes or no does not."""
        self._size = size
        self.patterns = patterns
        """How many patterns it holds."""

    def problems(self, arguments: dict[str, object]) -> list[str]:
        """How the arguments break the schema: a few short sentences, each with its place; none if they meet it."""
        if deeper_than(MAX_ARGUMENT_DEPTH, arguments):
            return [f"arguments: nested deeper than {MAX_ARGUMENT_DEPTH} levels"]
        if self._validator.is_valid(arguments):
            return []
        problems: list[str] = []
        if len(msgspec.json.encode(arguments)) * self._size <= _MOST_TO_EXPLAIN:
            errors = islice(self._explainer.iter_errors(arguments), _MOST_PROBLEMS)
            problems += (f"{_path('arguments', e.instance_path)}: {_short(e.message)}" for e in errors)
        return problems or ["arguments: they do not meet the tool's schema"]


def check_tools(tools: Sequence[Tool]) -> None:
    """Whether each tool's ``parameters`` is a JSON schema that calls can be checked against.

    Raises RequestInvalid, ``where`` being of the form ``tools[2].parameters``.
    """
    patterns = 0
    for i, tool in enumerate(tools):
        try:
            patterns += compile_schema(tool.parameters).patterns
            if patterns > MAX_PATTERNS:
                raise SchemaError(f"the tools of a request may have {MAX_PATTERNS} patterns")
        except SchemaError as e:
            raise RequestInvalid(f"tools[{i}].parameters", str(e)) from None


def check_output(output: OutputSchema | None) -> None:
    """Whether the ``schema`` of the answer is a JSON schema. Raises RequestInvalid at ``output_schema.schema``."""
    try:
        if output:
            compile_schema(output.schema)
    except SchemaError as e:
        raise RequestInvalid("output_schema.schema", str(e)) from None


def compile_schema(parameters: dict[str, object]) -> Schema:
    """The schema that ``parameters`` hold, of the draft that its ``$schema`` names, else 2020-12. Raises SchemaError.

    Each schema is compiled once and kept, so that to ask again costs little.
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


def _patterns(node: dict[str, Json]) -> int:
    several = node.get("patternProperties")
    return isinstance(node.get("pattern"), str) + (len(several) if isinstance(several, dict) else 0)


def _path(root: str, steps: Sequence[str | int]) -> str:
    """A place in JSON, as one would write it: ``arguments.items[2].name``."""
    return root + "".join(f"[{step}]" if isinstance(step, int) else f".{_short(step)}" for step in steps)


def _short(text: str) -> str:
    return text if len(text) <= _PROBLEM_CHARS else f"{text[:_PROBLEM_CHARS]}…"
