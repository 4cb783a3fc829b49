"""Reads and changes OpenAI-style chunks in any form: mappings, or objects of the OpenAI SDK or LiteLLM.

A chunk is never changed in place; changes return a new chunk of the same form.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast, get_args

from tokenbus.errors import Malformed

CHUNK = "an OpenAI-style chunk"


def field(value: Any, name: str) -> Any:
    """Return a field of a mapping or an object; None if it is missing."""
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value).get(name)
    return getattr(value, name, None)


def calls_of(delta: Any) -> list[Any]:
    """Return the tool-call fragments in a delta."""
    return list(cast("list[Any] | None", field(delta, "tool_calls")) or [])


def string(value: Any, name: str, where: str) -> str:
    """Return a string field; empty if missing. Raises Malformed for other types, so arguments are never built from
    objects.
    """
    found = field(value, name)
    if found is None:
        return ""
    if not isinstance(found, str):
        raise Malformed(CHUNK, f"{where}: {name} is not a string")
    return found


def is_chunk(value: object) -> bool:
    """Whether this looks like a chunk: a mapping, or an SDK model."""
    return isinstance(value, Mapping) or hasattr(value, "model_dump")


def as_dict(chunk: Any) -> dict[str, Any]:
    """Return a copy of the chunk as plain data, to change and pass to `like`. Raises Malformed if it is not a chunk."""
    if isinstance(chunk, Mapping):
        return copy.deepcopy(dict(cast("Mapping[str, Any]", chunk)))
    if not is_chunk(chunk):
        raise Malformed(CHUNK, f"{type(chunk).__name__} is neither a mapping nor a model")
    return chunk.model_dump()


def like(template: Any, data: dict[str, Any]) -> Any:
    """Return a chunk in the template's form with the choices and usage of ``data``."""
    if isinstance(template, Mapping):
        return data
    chunk = template.model_copy()
    # Use the choice's own class: LiteLLM has several, and a newly made chunk may use another one.
    kind = cast("Any", type(template.choices[0]) if template.choices else _choice_class(template))
    chunk.choices = [kind(**choice) for choice in data["choices"]]
    if field(template, "usage") is not None and "usage" not in data:
        chunk.usage = None
    return chunk


def _choice_class(template: Any) -> Any:
    """The class of the choices of a chunk that has none, such as Azure's first chunk."""
    model = cast("Any", type(template))
    [kind] = get_args(model.model_fields["choices"].annotation)
    return kind
