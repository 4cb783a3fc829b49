"""How a secret may begin: whole heads of it, or one that the end of a JSON string's value breaks off."""

from __future__ import annotations

import re
from collections.abc import Iterable

HELD_CHARS = 4
"""So many characters of a secret may go out: they are none yet, and to hold fewer would slow down any text."""
VALUE_ENDS = rb'"(?!\s*:)'


def heads_of(needles: Iterable[bytes]) -> re.Pattern[bytes]:
    """Matches the end of a string's value where one of these may begin there, and what begins as one does anywhere."""
    heads = {needle[:HELD_CHARS] for needle in needles}
    return re.compile(_begun(heads) if heads else rb"(?!)")  # literals come first, which makes its search fast


def _begun(heads: set[bytes]) -> bytes:
    """The pattern of one of these, whole, or broken off by a value's end."""
    branches: list[bytes] = []
    for first in sorted({head[:1] for head in heads}):
        rests = {head[1:] for head in heads if head[:1] == first} - {b""}
        more = b"(?:" + _begun(rests) + b"|" + VALUE_ENDS + b")" if rests else b""
        branches.append(re.escape(first) + more)
    return b"|".join(branches)
