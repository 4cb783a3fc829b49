"""What was told of a text, so that whoever tells it again can be asked for the rest alone.

Providers tell things more than once: by deltas, at the end of a part, of an item, of the whole response. Only a
fingerprint of what was told is kept, however long it is. Blank space does not count in it, for final texts are often
trimmed. It counts UTF-16 units, because some providers cut a character in two
(see `tokenbus.providers.response.surrogates`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from zlib import crc32

import msgspec

from tokenbus.providers.response.surrogates import from_units, to_units

_WORD = re.compile(r"\S+")


class Told(msgspec.Struct):
    """The text of one part so far."""

    units: int = 0
    """UTF-16 units that are not blank."""
    crc: int = 0
    """Of those units."""
    blank: int = 0
    """Characters of blank space at its end."""

    def __bool__(self) -> bool:
        return bool(self.units or self.blank)

    def add(self, text: str) -> None:
        """This was told as well."""
        solid = _solid(text)
        self.units += len(solid) // 2
        self.crc = crc32(solid, self.crc)
        self.blank = len(text) - len(text.rstrip()) + (0 if solid else self.blank)

    def rest(self, whole: str) -> str | None:
        """What of the whole text was not told; None: it does not begin with what was told."""
        rests = untold([self], [whole])
        return rests[0] if rests is not None else None


def untold(told: Sequence[Told], whole: Sequence[str]) -> list[str] | None:
    """What of each of these texts was not told, if together they begin with what was told; else None.

    How the parts were divided does not matter: only their order does.
    """
    if not any(told):
        return list(whole)
    solids = [_solid(text) for text in whole]
    units = memoryview(b"".join(solids))
    at = 0
    for part in told:
        end = at + 2 * part.units
        if end > len(units) or crc32(units[at:end]) != part.crc:
            return None
        at = end
    rests: list[str] = []
    blank = told[-1].blank
    for text, solid in zip(whole, solids, strict=True):
        if at >= len(solid):
            rests.append("")
        else:
            rests.append(_after(text, at, blank))
            blank = 0
        at = max(0, at - len(solid))
    return rests


def _solid(text: str) -> bytes:
    return to_units("".join(text.split()))


def _after(text: str, size: int, blank: int) -> str:
    """The text after so many bytes of units that are not blank, and after blank space of this length if it is there."""
    end, half = 0, ""
    for word in _WORD.finditer(text) if size else ():
        units = to_units(word[0])
        if len(units) >= size:
            begun, over = from_units(units[:size]), from_units(units[size:])
            end = word.start() + len(begun)
            half = over[:1] if len(begun) + len(over) > len(word[0]) else ""  # a character was told in half
            break
        size -= len(units)
    rest = text[end:]
    return half + rest[min(blank, len(rest) - len(rest.lstrip())) :]
