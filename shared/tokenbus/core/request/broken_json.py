"""JSON that is none, of a request that is refused: what can still be said of it, and whose run it is.

Some writers put NaN or half of a surrogate pair into what they call JSON. msgspec then refuses the whole text and
names a byte. `read_broken` accepts both, so that the check of plain values can name the place. `top_texts` finds the id
in any text, so that the run can end where its publisher looks for it.
"""

from __future__ import annotations

import json
import re

MAX_TOKENS = 100_000
"""So far the search for an id goes: some hundredths of a second."""

_TOKEN = re.compile(r'"((?:[^"\\]++|\\.)*+)"|([{}\[\]:,])|(")|[^"{}\[\]:,\s]++', re.DOTALL)


def read_broken(data: bytes) -> object:
    """The value of JSON in which numbers may be NaN or infinite and text may hold half of a surrogate pair.

    Raises ValueError for all else that is no JSON, and RecursionError.
    """
    return json.loads(data.decode())


def top_texts(data: bytes, *names: str) -> dict[str, str]:
    """The fields with these names at the top of a JSON object that are text, as they stand there; never raises.

    Whatever is wrong elsewhere, they are found where the text before them has balanced brackets and quotes.
    """
    found: dict[str, str] = {}
    depth = 0
    key: str | None = None
    """The field whose value comes next; None: a key comes, or what is of no interest."""
    last: str | None = None
    for number, token in enumerate(_TOKEN.finditer(data.decode(errors="replace"))):
        text, mark, unclosed = token.groups()
        if unclosed or number >= MAX_TOKENS:
            break
        if mark in ("{", "["):
            depth += 1
        elif mark in ("}", "]"):
            depth -= 1
        elif depth != 1:
            continue
        elif mark == ":":
            key = last
        elif mark == ",":
            key = None
        elif text is not None:
            if key in names:
                found[key] = text
            last = text
    return found
