"""The forms in which OpenAI-style chunks come: mappings, objects of the OpenAI SDK or LiteLLM; read and changed alike.

A chunk is never changed in place: a changed one is a new one of the same form.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast, get_args

from tokenbus.errors import Malformed

CHUNK = "an OpenAI-style chunk"


def field(value: Any, name: str) -> Any:
    """A field of a mapping or an object; None where it has none."""
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value).get(name)
    return getattr(value, name, None)


def calls_of(delta: Any) -> list[Any]:
    """The fragments of tool calls in a delta."""
    return list(cast("list[Any] | None", field(delta, "tool_calls")) or [])


def string(value: Any, name: str, where: str) -> str:
    """A field that is a string or missing. Raises Malformed for anything else: arguments are never made of objects."""
    found = field(value, name)
    if found is None:
        return ""
    if not isinstance(found, str):
        raise Malformed(CHUNK, f"{where}: {name} is no string")
    return found


def is_chunk(value: object) -> bool:
    """Whether this has the form of a chunk: a mapping, or a model of an SDK."""
    return isinstance(value, Mapping) or hasattr(value, "model_dump")


def as_dict(chunk: Any) -> dict[str, Any]:
    """A copy of the chunk as plain data, to change and hand to `like`. Raises Malformed for what is no chunk."""
    if isinstance(chunk, Mapping):
        return copy.deepcopy(dict(cast("Mapping[str, Any]", chunk)))
    if not is_chunk(chunk):
        raise Malformed(CHUNK, f"{type(chunk).__name__} is neither a mapping nor a model")
    return chunk.model_dump()


def like(template: Any, data: dict[str, Any]) -> Any:
    """A chunk of the template's form with the choices and the usage of ``data``."""
    if isinstance(template, Mapping):
        return data
    chunk = template.model_copy()
    # By the choice's own class: LiteLLM has several for a chunk, and a chunk made anew may take another.
    kind = cast("Any", type(template.choices[0]) if template.choices else _choice_class(template))
    chunk.choices = [kind(**choice) for choice in data["choices"]]
    if field(template, "usage") is not None and "usage" not in data:
        chunk.usage = None
    return chunk


def _choice_class(template: Any) -> Any:
    """What the choices of such a model are; it has none itself, as Azure's first chunk."""
    model = cast("Any", type(template))
    [kind] = get_args(model.model_fields["choices"].annotation)
    return kind
