"""Tracks which text was already emitted, so that a repetition yields only the new part.

Providers repeat content: in deltas, at the end of a part, of an item and of the response. Only a fingerprint of the
emitted text is kept, for any length. Whitespace is ignored, because final texts are often trimmed. Lengths are in
UTF-16 units, because some providers split a character in two (see `tokenbus.providers.response.surrogates`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from zlib import crc32

import msgspec

from tokenbus.providers.response.surrogates import from_units, to_units

_WORD = re.compile(r"\S+")
_SLICE = 64 * 1024
_ASCII_BLANKS = bytes(code for code in range(128) if chr(code).isspace())


class EmittedText(msgspec.Struct):
    """Fingerprint of the text of one part emitted so far."""

    units: int = 0
    """UTF-16 units that are not whitespace."""
    crc: int = 0
    """Checksum of those units."""
    blank: int = 0
    """Whitespace characters at the end."""

    def __bool__(self) -> bool:
        return bool(self.units or self.blank)

    def add(self, text: str) -> None:
        """Record more emitted text."""
        for at in range(0, len(text), _SLICE):  # of a whole answer; copies that fit a cache take half the time
            part = text[at : at + _SLICE]
            solid = _solid(part)
            self.units += len(solid) // 2
            self.crc = crc32(solid, self.crc)
            self.blank = len(part) - len(part.rstrip()) + (0 if solid else self.blank)

    def rest(self, whole: str) -> str | None:
        """Return the part of ``whole`` not yet emitted; None if ``whole`` does not begin with the emitted text."""
        rests = not_emitted([self], [whole])
        return rests[0] if rests is not None else None


def not_emitted(emitted: Sequence[EmittedText], whole: Sequence[str]) -> list[str] | None:
    """Return the part of each text not yet emitted; None if the texts together do not begin with the emitted text.

    Only the order of the parts matters, not how they are divided.
    """
    if not any(emitted):
        return list(whole)
    solids = [_solid(text) for text in whole]
    units = memoryview(b"".join(solids))
    at = 0
    for part in emitted:
        end = at + 2 * part.units
        if end > len(units) or crc32(units[at:end]) != part.crc:
            return None
        at = end
    rests: list[str] = []
    blank = emitted[-1].blank
    for text, solid in zip(whole, solids, strict=True):
        if at >= len(solid):
            rests.append("")
        else:
            rests.append(_after(text, at, blank))
            blank = 0
        at = max(0, at - len(solid))
    return rests


def _solid(text: str) -> bytes:
    """The units of the text without whitespace."""
    if text.isascii():  # a tenth of the time, and most text is
        return text.encode().translate(None, _ASCII_BLANKS).decode().encode("utf-16-le")
    return to_units("".join(text.split()))


def _after(text: str, size: int, blank: int) -> str:
    """The text after ``size`` bytes of non-whitespace units, and after up to ``blank`` whitespace characters."""
    end, half = 0, ""
    for word in _WORD.finditer(text) if size else ():
        units = to_units(word[0])
        if len(units) >= size:
            begun, over = from_units(units[:size]), from_units(units[size:])
            end = word.start() + len(begun)
            half = over[:1] if len(begun) + len(over) > len(word[0]) else ""  # a character was split
            break
        size -= len(units)
    rest = text[end:]
    return half + rest[min(blank, len(rest) - len(rest.lstrip())) :]
