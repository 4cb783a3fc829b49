"""Reads the tables of a page."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
_CELL = re.compile(r"(?<!\\)\|")


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def sections(text: str) -> dict[str, str]:
    """The text under each heading of the second level."""
    parts = re.split(r"(?m)^## (.+)$", text)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def rows(text: str) -> list[list[str]]:
    """The cells of a table's rows, its head left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in _CELL.split(line)[1:-1]] for line in lines[2:]]


def quoted(cell: str) -> str:
    """The first piece of code in a cell."""
    found = re.search(r"`([^`]*)`", cell)
    assert found, cell
    return found[1]
