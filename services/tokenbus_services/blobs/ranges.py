"""Range requests for blobs (RFC 9110, 14). A single range only; multiple ranges get the whole blob."""

from __future__ import annotations

import re
from typing import NamedTuple

_RANGE = re.compile(r"bytes=\s*([0-9]{0,18})-([0-9]{0,18})\s*")


class ByteRange(NamedTuple):
    """Bytes ``start`` to ``end``, exclusive."""

    start: int
    end: int


class OutOfRange(Exception):
    """The range contains no byte of the blob."""


def part_of(header: str, size: int) -> ByteRange | None:
    """Parse a Range header for a blob of ``size`` bytes; None for the whole blob and for unsupported headers.

    Raises OutOfRange.
    """
    match = _RANGE.fullmatch(header)
    if match is None or match[1] == match[2] == "":
        return None
    if match[1] == "":  # the last N bytes
        last = int(match[2])
        if last == 0 or size == 0:
            raise OutOfRange
        return ByteRange(max(0, size - last), size)
    start = int(match[1])
    if match[2] and int(match[2]) < start:
        return None
    if start >= size:
        raise OutOfRange
    return ByteRange(start, min(size, int(match[2]) + 1) if match[2] else size)
