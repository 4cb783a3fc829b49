"""The known name that a misspelt one was probably meant to be."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to ``name``; None if none is close."""
    from difflib import get_close_matches  # only where something went wrong: it costs start-up time

    lower = {candidate.lower(): candidate for candidate in known}
    found = get_close_matches(name.lower()[:100], lower, n=1)
    return lower[found[0]] if found else None


def unknown_name(name: object, known: Iterable[str]) -> str:
    """Says that a name is not known, which one was probably meant, and which there are."""
    names = list(known)
    close = nearest(name, names) if isinstance(name, str) else None
    if close:
        return f"unknown {name!r}: did you mean {close!r}?"
    return f"unknown {name!r}: must be one of {', '.join(map(repr, names))}"
