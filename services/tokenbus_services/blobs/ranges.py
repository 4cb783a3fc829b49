"""The part of a blob that a request asks for (RFC 9110, 14). One range; several are answered with the whole."""

from __future__ import annotations

import re
from typing import NamedTuple

_RANGE = re.compile(r"bytes=\s*([0-9]{0,18})-([0-9]{0,18})\s*")


class Part(NamedTuple):
    """Bytes ``start`` to ``end``, the last not included."""

    start: int
    end: int


class OutOfRange(Exception):
    """No byte of the blob is in the range."""


def part_of(header: str, size: int) -> Part | None:
    """What this Range header asks of so many bytes; None for the whole, and for a header that says nothing known.

    Raises OutOfRange.
    """
    match = _RANGE.fullmatch(header)
    if match is None or match[1] == match[2] == "":
        return None
    if match[1] == "":  # the last so many
        last = int(match[2])
        if last == 0 or size == 0:
            raise OutOfRange
        return Part(max(0, size - last), size)
    start = int(match[1])
    if match[2] and int(match[2]) < start:
        return None
    if start >= size:
        raise OutOfRange
    return Part(start, min(size, int(match[2]) + 1) if match[2] else size)
