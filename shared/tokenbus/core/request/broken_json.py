"""Diagnose the invalid JSON of a rejected request, and find its run id.

Some writers put NaN or a lone surrogate into what they call JSON. msgspec then rejects the whole text and names a byte.
`read_broken` accepts both, so that the check of plain values can name the path. `top_texts` finds the id in any text,
so that the run can end where its publisher looks for it.
"""

from __future__ import annotations

import json
import re

MAX_TOKENS = 100_000
"""Limit of the search for an id: some hundredths of a second."""

_TOKEN = re.compile(r'"((?:[^"\\]++|\\.)*+)"|([{}\[\]:,])|(")|[^"{}\[\]:,\s]++', re.DOTALL)


def read_broken(data: bytes) -> object:
    """Decode JSON in which numbers may be NaN or infinite and text may contain lone surrogates.

    Raises ValueError for any other invalid JSON, and RecursionError.
    """
    return json.loads(data.decode())


def top_texts(data: bytes, *names: str) -> dict[str, str]:
    """Text fields with these names at the top level of a JSON object, unparsed; never raises.

    They are found despite errors elsewhere, if brackets and quotes before them are balanced.
    """
    found: dict[str, str] = {}
    depth = 0
    key: str | None = None
    """The field whose value comes next; None: a key follows, or nothing of interest."""
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
