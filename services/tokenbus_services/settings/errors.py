"""Where in a settings file a value is wrong, with the name of its table, and which values would be right. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import msgspec
from msgspec import inspect

_ANY_NAME = "[...]"
"""How msgspec writes the key of a table whose keys are names."""
_SEGMENT = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


def explained(error: msgspec.ValidationError, raw: Mapping[str, Any], kind: type) -> tuple[str, str]:
    """The path of the value that is wrong, with every table named, and what is wrong with it."""
    problem, _, where = str(error).partition(" - at `")
    where = where.rstrip("`") or "$"
    narrowed = dict(raw)
    while _ANY_NAME in where:
        before, _, after = where.partition(_ANY_NAME)
        for key in cast("dict[str, Any]", _at(narrowed, before)):
            trial = _only(narrowed, before, key)
            if _fails_alike(trial, kind, problem):
                narrowed, where = trial, f"{before}.{key}{after}"
                break
        else:
            return where, problem
    if problem.startswith(("Invalid enum value", "Invalid value")):
        known = [str(value) for value in _values(inspect.type_info(kind), _segments(where))]
        if known:
            problem = f"{problem}; it may be {', '.join(known)}"
    return where, problem


def _segments(path: str) -> list[str]:
    return [name or index for name, index in _SEGMENT.findall(path)]


def _at(value: Any, path: str) -> Any:
    for segment in _segments(path):
        value = cast("list[Any]", value)[int(segment)] if isinstance(value, list) else value[segment]
    return value


def _only(raw: dict[str, Any], path: str, key: str) -> dict[str, Any]:
    """A copy in which the table at the path has this key alone."""
    return cast("dict[str, Any]", _replaced(raw, _segments(path), lambda table: {key: table[key]}))


def _replaced(value: Any, segments: list[str], change: Callable[[Any], Any]) -> Any:
    if not segments:
        return change(value)
    first, *rest = segments
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return [_replaced(item, rest, change) if str(i) == first else item for i, item in enumerate(items)]
    return {**value, first: _replaced(value[first], rest, change)}


def _fails_alike(raw: Mapping[str, Any], kind: type, problem: str) -> bool:
    try:
        msgspec.convert(raw, kind)
    except msgspec.ValidationError as e:
        return str(e).startswith(problem)
    return False


def _values(kind: inspect.Type, segments: list[str]) -> Iterator[object]:
    """The values that a choice at this path has."""
    match kind:
        case inspect.UnionType():
            for one in kind.types:
                yield from _values(one, segments)
        case inspect.LiteralType() if not segments:
            yield from kind.values
        case inspect.StructType() if segments == [kind.tag_field]:
            yield kind.tag
        case inspect.StructType() if segments:
            for field in kind.fields:
                if field.encode_name == segments[0]:
                    yield from _values(field.type, segments[1:])
        case inspect.DictType() if segments:
            yield from _values(kind.value_type, segments[1:])
        case inspect.VarTupleType() | inspect.ListType() if segments:
            yield from _values(kind.item_type, segments[1:])
        case _:
            pass
