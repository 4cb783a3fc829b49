"""JSON Schemas of tools and answers: validates the schema, and validates tool arguments against it.

Schemas come from clients and arguments from models, so both are bounded: schema size is limited by `size`, nothing is
ever fetched, and patterns run without backtracking, or with a bounded amount of it if they use lookaround. The
remaining work is proportional to schema size times argument size; the validator holds the GIL during it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice

import msgspec
from jsonschema_rs import FancyRegexOptions, ReferencingError, ValidationError, Validator, validator_for

from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import OutputSchema, Tool
from tokenbus_services.json_schema.size import MAX_SCHEMA_DEPTH, Json, SchemaError, deeper_than, objects, unfold

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
    """A compiled schema."""

    def __init__(self, validator: Validator, explainer: Validator, *, size: int, patterns: int) -> None:
        self._validator = validator
        self._explainer = explainer
        """The schema without its loops. Listing errors takes time exponential in the loop depth; a yes/no check does
        not.
        """
        self._size = size
        self.patterns = patterns
        """Number of patterns in the schema."""

    def problems(self, arguments: dict[str, object]) -> list[str]:
        """Return a few short sentences, each with a location, that say how the arguments violate the schema; empty if
        valid.
        """
        if deeper_than(MAX_ARGUMENT_DEPTH, arguments):
            return [f"arguments: nested deeper than {MAX_ARGUMENT_DEPTH} levels"]
        problems: list[str] = []
        try:
            with _panics_as_errors():
                if self._validator.is_valid(arguments):
                    return []
                if len(msgspec.json.encode(arguments)) * self._size <= _MOST_TO_EXPLAIN:
                    errors = islice(self._explainer.iter_errors(arguments), _MOST_PROBLEMS)
                    problems += (f"{_path('arguments', e.instance_path)}: {_short(e.message)}" for e in errors)
        except SchemaError as e:
            return [f"arguments: they cannot be checked: {e}"]
        return problems or ["arguments: they do not match the tool's schema"]


def check_tools(tools: Sequence[Tool]) -> None:
    """Check that each tool's ``parameters`` is a usable JSON Schema.

    Raises RequestInvalid with ``where`` of the form ``tools[2].parameters``.
    """
    patterns = 0
    for i, tool in enumerate(tools):
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
