"""Patterns for the beginning of a secret, complete or cut off by the end of a JSON string value."""

from __future__ import annotations

import re
from collections.abc import Iterable

HELD_CHARS = 4
"""This many characters of a secret may be emitted: they reveal nothing, and a lower limit would delay all text."""
VALUE_ENDS = rb'"(?!\s*:)'


def heads_of(needles: Iterable[bytes]) -> re.Pattern[bytes]:
    """Matches the end of a string value that may begin one of these, or the beginning of one anywhere."""
    heads = {needle[:HELD_CHARS] for needle in needles}
    return re.compile(_begun(heads) if heads else rb"(?!)")  # literals come first, which makes the search fast


def _begun(heads: set[bytes]) -> bytes:
    """The pattern of one of these, complete or cut off by the end of a value."""
    branches: list[bytes] = []
    for first in sorted({head[:1] for head in heads}):
        rests = {head[1:] for head in heads if head[:1] == first} - {b""}
        more = b"(?:" + _begun(rests) + b"|" + VALUE_ENDS + b")" if rests else b""
        branches.append(re.escape(first) + more)
    return b"|".join(branches)
