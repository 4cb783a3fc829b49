"""Reads token counts from a provider's usage object."""

from __future__ import annotations

from typing import Any, cast

from tokenbus.errors import Malformed

_MAX_DEPTH = 16
_LEAST, _MOST = -(2**63), 2**63 - 1
MAX_TOKENS = 10**12
"""A larger count is none: sums of what any number of turns report stay below 64 bits."""


def latest(before: dict[str, object] | None, new: dict[str, object]) -> dict[str, object]:
    """Merge usage, keeping the last non-null value of each field: counts are repeated, never summed (providers.md, "For
    all four", 6).

    Raises Malformed for values that msgpack cannot encode: numbers over 64 bits, or excessive nesting.
    """
    if not _is_storable(new, _MAX_DEPTH):
        raise Malformed("usage", "a number exceeds 64 bits, or the object is nested too deeply")
    return {**(before or {}), **{name: value for name, value in new.items() if value is not None}}


def count(usage: dict[str, object], *path: str) -> int | None:
    """Return the number at a path of fields; None if it is missing or not a plausible count."""
    value: Any = usage
    for name in path:
        if not isinstance(value, dict):
            return None
        value = cast("dict[str, Any]", value).get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TOKENS:
        return None
    return int(value) if value == int(value) else None


def _is_storable(value: dict[str, object] | list[object], depth: int) -> bool:
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, int):
            if not _LEAST <= item <= _MOST:
                return False
        elif isinstance(item, dict | list) and not (
            depth > 1 and _is_storable(cast("dict[str, object] | list[object]", item), depth - 1)
        ):
            return False
    return True
