"""Plain values: what JSON and msgpack both carry unchanged. Every part of a request must be plain."""

from __future__ import annotations

import math
from typing import TypeGuard

from tokenbus.errors import RequestInvalid

MAX_DEPTH = 100
"""Maximum nesting levels; far below the limit of any decoder involved."""
MAX_VALUES = 200_000
"""Maximum values on all levels: each is only a few bytes on the wire, but costs time and memory to walk."""


def too_deep(where: str = "$") -> RequestInvalid:
    """The error for a value nested deeper than `MAX_DEPTH`."""
    return RequestInvalid(where, f"nested deeper than {MAX_DEPTH} levels")


def check_plain(value: object) -> None:
    """Raise RequestInvalid, with the path, for a part of ``value`` that is not plain.

    Plain values are objects with text keys, lists, Unicode text, booleans, null, integers of 64 bits and finite
    numbers, nested at most `MAX_DEPTH` deep, at most `MAX_VALUES` in all. Not recursive, because hostile values are
    deeply nested.
    """
    todo: list[tuple[object, str, int]] = [(value, "", 0)]
    values = 1
    while todo:
        item, where, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise too_deep(where)
        if _is_dict(item) or _is_list(item):
            values += len(item)
            if values > MAX_VALUES:
                raise RequestInvalid(where or "$", f"more than {MAX_VALUES} values in all")
        if _is_dict(item):
            for key, inner in item.items():
                if not isinstance(key, str):
                    raise RequestInvalid(where or "$", f"a key is {type(key).__name__}, not text")
                if problem := _text_problem(key):
                    raise RequestInvalid(where or "$", f"a key is {problem}")
                todo.append((inner, f"{where}.{key}" if where else key, depth + 1))
        elif _is_list(item):
            todo.extend((inner, f"{where}[{i}]", depth + 1) for i, inner in enumerate(item))
        elif problem := _scalar_problem(item):
            raise RequestInvalid(where or "$", problem)


def _scalar_problem(item: object) -> str | None:
    match item:
        case None | bool():
            return None
        case str():
            return _text_problem(item)
        case int():
            return None if -(2**63) <= item < 2**64 else "an integer of more than 64 bits"
        case float():
            return None if math.isfinite(item) else "a number that is not finite"
        case _:
            return f"a value of type {type(item).__name__}, which JSON does not have"


def _text_problem(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return "text with half of a surrogate pair"
    return None


def _is_dict(item: object) -> TypeGuard[dict[object, object]]:
    return isinstance(item, dict)


def _is_list(item: object) -> TypeGuard[list[object] | tuple[object, ...]]:
    return isinstance(item, list | tuple)
