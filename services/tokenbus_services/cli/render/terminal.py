"""Detects whether stdout is a terminal, and escapes untrusted text for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenbus_services.terminal_text import safe

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["console", "safe"]


def console() -> Console | None:
    """Return rich's console if stdout is a terminal with cursor control; None otherwise."""
    from rich.console import Console

    made = Console(highlight=False, emoji=False, markup=False)
    return made if made.is_terminal and not made.is_dumb_terminal else None
