"""Model name comparison: the one rule used for limits, routes, quirks and paths.

A provider accepts many spellings of a model: with a `models/` prefix, in another case, with surrounding spaces. Every
decision by model name compares keys (`model_key`), so that no spelling bypasses it. Aliases that only the provider
knows (`gemini-flash-latest`) are settings: `[providers.NAME.model_aliases]`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

_COLLECTION = re.compile(r"(?:projects/[^/]+/locations/[^/]+/)?(?:publishers/[^/]+/)?models/+")
_NO_TEXT = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of invisible characters: controls, direction marks, zero-width characters, line ends."""


def model_key(name: str) -> str:
    """Normalize a name for comparison: strip spaces, case and the collection prefix."""
    key = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold()).strip()
    while found := _COLLECTION.match(key):
        key = key[found.end() :].strip()
    return key


def names_model(name: str, model: str) -> bool:
    """Whether a table entry matches this model: exactly, or as a prefix if it ends in `*` (`gpt-5*`)."""
    key = model_key(model)
    return key.startswith(model_key(name[:-1])) if name.endswith("*") else key == model_key(name)


def begins_with(model: str, beginnings: Iterable[str]) -> bool:
    """Whether the model's name begins with one of these prefixes."""
    return model_key(model).startswith(tuple(model_key(beginning) for beginning in beginnings))


def text_problem(name: str) -> str | None:
    """What is wrong with a name (blank, or invisible characters); None if nothing."""
    if not name.strip():
        return "it is blank"
    if any(unicodedata.category(char) in _NO_TEXT for char in name):
        return "it has characters that cannot be seen"
    return None


def segment_problem(name: str) -> str | None:
    """What is wrong with a name as part of a URL path; None if nothing.

    Some servers decode a path before they route it, so even a quoted name could lead elsewhere.
    """
    if "%" in name or "\\" in name or any(part.strip() in ("", ".", "..") for part in name.split("/")):
        return "it cannot be part of a path"
    return text_problem(name)
