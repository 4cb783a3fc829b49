"""Splits a body into network reads. Pure: offsets in, pieces out."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from itertools import pairwise

from tokenbus_services.mock_provider.script import CutOff, Cuts, ErrorEvent, Fixed, Offsets, Random, Stall, Whole

# An event ends with an empty line; LF, CR and CRLF all end a line, and CRLF is never two of them.
# Source: "Parsing an event stream", WHATWG HTML, server-sent events.
_EMPTY_LINE = re.compile(rb"(?>\r\n|\r|\n)(?>\r\n|\r|\n)")


def event_ends(body: bytes) -> list[int]:
    """Offsets at which an event of the body is complete."""
    return [match.end() for match in _EMPTY_LINE.finditer(body)]


def read_ends(body: bytes, cuts: Cuts) -> list[int]:
    """Offsets at which a read ends, in order; the end of the body may be missing."""
    match cuts:
        case Whole():
            return event_ends(body)[cuts.events - 1 :: cuts.events]
        case Fixed():
            return list(range(cuts.size, len(body), cuts.size))
        case Random():
            return _random_ends(random.Random(cuts.seed), cuts.largest, len(body))
        case Offsets():
            return sorted(cuts.at)


def split_at(body: bytes, ends: Iterable[int]) -> list[bytes]:
    """Split the body at these offsets; no piece is empty. Offsets outside the body are ignored."""
    places = sorted({0, len(body), *(end for end in ends if 0 < end < len(body))})
    return [body[start:end] for start, end in pairwise(places)]


def fault_offset(body: bytes, fault: ErrorEvent | CutOff | Stall) -> int:
    """The offset of a fault, at most the end of the body. Raises ValueError if its text is missing."""
    if fault.after_bytes is not None:
        return min(fault.after_bytes, len(body))
    ends = event_ends(body)
    if fault.after_text is not None:
        found = body.find(fault.after_text.encode())
        if found < 0:
            raise ValueError(f"after_text: the body does not hold {fault.after_text!r}")
        return next((end for end in ends if end > found), len(body))
    if not fault.after_events:
        return 0
    return ends[fault.after_events - 1] if fault.after_events <= len(ends) else len(body)


def _random_ends(dice: random.Random, largest: int, length: int) -> list[int]:
    ends: list[int] = []
    end = dice.randint(1, largest)
    while end < length:
        ends.append(end)
        end += dice.randint(1, largest)
    return ends
