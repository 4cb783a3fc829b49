"""Whether a person watches stdout, and how text from elsewhere is made fit for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenbus_services.terminal_text import safe

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["console", "safe"]


def console() -> Console | None:
    """rich's console where stdout is a terminal that can move its cursor; None otherwise."""
    from rich.console import Console

    made = Console(highlight=False, emoji=False, markup=False)
    return made if made.is_terminal and not made.is_dumb_terminal else None
