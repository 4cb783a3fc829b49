"""The forms in which OpenAI-style chunks come: mappings, objects of the OpenAI SDK or LiteLLM; read and changed alike.

A chunk is never changed in place: a changed one is a new one of the same form.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

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


def as_dict(chunk: Any) -> dict[str, Any]:
    """A copy of the chunk as plain data, to change and hand to `like`. Raises Malformed for what is no chunk."""
    if isinstance(chunk, Mapping):
        return copy.deepcopy(dict(cast("Mapping[str, Any]", chunk)))
    if not hasattr(chunk, "model_dump"):
        raise Malformed(CHUNK, f"{type(chunk).__name__} is neither a mapping nor a model")
    return chunk.model_dump()


def like(template: Any, data: dict[str, Any]) -> Any:
    """A chunk of the template's form with the choices and the usage of ``data``; the template has a choice, too."""
    if isinstance(template, Mapping):
        return data
    chunk = template.model_copy()
    # By the choice's own class: LiteLLM has several for a chunk, and a chunk made anew may take another.
    kind = cast("type[Any]", type(template.choices[0]))
    chunk.choices = [kind(**choice) for choice in data["choices"]]
    if field(template, "usage") is not None and "usage" not in data:
        chunk.usage = None
    return chunk
