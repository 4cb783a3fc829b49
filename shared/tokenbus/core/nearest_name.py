"""Suggest the known name that a misspelt name probably means."""

from __future__ import annotations

from collections.abc import Iterable

_SHORT = 5
"""Letters."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to ``name``, one with two neighbouring letters swapped first; None if none is close."""
    from difflib import get_close_matches  # only needed after an error: costs start-up time

    lower = {candidate.lower(): candidate for candidate in known}
    typed = name.lower()[:100]
    found = [typed[:at] + typed[at + 1] + typed[at] + typed[at + 2 :] for at in range(len(typed) - 1)]
    found = [swapped for swapped in found if swapped in lower]
    found = found or [like for like in get_close_matches(typed, lower, n=1) if _is_typo(typed, like)]
    return lower[found[0]] if found else None


def _is_typo(typed: str, meant: str) -> bool:
    """Whether a name this short was misspelt: it begins alike, or lacks a letter, or has one more. `nope` and `open`
    share three letters of four, and nobody who types one means the other.
    """
    if len(typed) > _SHORT or typed[:1] == meant[:1]:
        return True
    shorter, longer = sorted((typed, meant), key=len)
    return any(longer[:at] + longer[at + 1 :] == shorter for at in range(len(longer)))


def unknown_name(name: object, known: Iterable[str]) -> str:
    """Error text for an unknown name, with the closest known name or all known names."""
    names = list(known)
    close = nearest(name, names) if isinstance(name, str) else None
    if close:
        return f"unknown {name!r}: did you mean {close!r}?"
    return f"unknown {name!r}: must be one of {', '.join(map(repr, names))}"
