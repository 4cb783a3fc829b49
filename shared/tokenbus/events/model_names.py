"""What a model is called: the one rule by which names of models are compared, in limits, routes, quirks and paths.

A provider knows one model under many spellings: with `models/` before it, in another case, with blanks around it. What
decides by a model's name compares keys (`model_key`), so that no spelling passes it by. Names that only the provider
knows for the same model (`gemini-flash-latest`) are data: `[providers.NAME.model_aliases]`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

_COLLECTION = re.compile(r"(?:projects/[^/]+/locations/[^/]+/)?(?:publishers/[^/]+/)?models/+")
_NO_TEXT = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of what nobody sees: controls, marks of direction, zero-width characters, line ends."""


def model_key(name: str) -> str:
    """The name as names are compared: without blanks around it, its case, and the collection before it."""
    key = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold()).strip()
    while found := _COLLECTION.match(key):
        key = key[found.end() :].strip()
    return key


def names_model(name: str, model: str) -> bool:
    """Whether the name in a table is this model's: the whole of it, or a beginning with `*` after it (`gpt-5*`)."""
    key = model_key(model)
    return key.startswith(model_key(name[:-1])) if name.endswith("*") else key == model_key(name)


def begins_with(model: str, beginnings: Iterable[str]) -> bool:
    """Whether the model's name begins as one of these."""
    return model_key(model).startswith(tuple(model_key(beginning) for beginning in beginnings))


def text_problem(name: str) -> str | None:
    """What is wrong with a name as one: it is blank, or has characters that cannot be seen."""
    if not name.strip():
        return "it is blank"
    if any(unicodedata.category(char) in _NO_TEXT for char in name):
        return "it has characters that cannot be seen"
    return None


def segment_problem(name: str) -> str | None:
    """What is wrong with a name as a part of a URL's path: some servers decode a path before they read it, and would be
    led elsewhere by it, quoted or not."""
    if "%" in name or "\\" in name or any(part.strip() in ("", ".", "..") for part in name.split("/")):
        return "it cannot be part of a path"
    return text_problem(name)
