"""Settings that have a truer name now. The old one still works, with a warning. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

RENAMED: Final[Mapping[tuple[str, str], str]] = {
    ("limits", "block_bytes"): "block_characters",
    ("limits", "run_events"): "run_input_events",
    ("blobs", "inline_bytes"): "inline_characters",
}
"""Table and old key, and the new key. All three count what the new name says; the old names were wrong."""


def old_names(raw: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The old names that a file has, each with the new one, as `table.key`."""
    return [
        (f"{table}.{old}", f"{table}.{new}")
        for (table, old), new in RENAMED.items()
        if isinstance(raw.get(table), dict) and old in raw[table]
    ]


def with_new_names(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The file's content with new names alone. Raises ValueError if it has both names of one setting."""
    tables = dict(raw)
    for (table, old), new in RENAMED.items():
        if isinstance(tables.get(table), dict) and old in tables[table]:
            content: dict[str, Any] = tables[table]
            if new in content:
                raise ValueError(f"{table}.{old} is the old name of {table}.{new}: leave one of them")
            tables[table] = {(new if key == old else key): value for key, value in content.items()}
    return tables
