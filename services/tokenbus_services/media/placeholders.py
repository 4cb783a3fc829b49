"""What stands for blobs while a request is built, and is found again in the body that comes out of it."""

from __future__ import annotations

import re
import secrets
from base64 import b64encode
from collections.abc import Iterator

import msgspec

_DIGITS = 6
"""Of a mark's number. With it a mark is a multiple of three bytes long, so that its base64 needs no padding."""


class Mark(msgspec.Struct, frozen=True):
    """The place of a blob in a body."""

    number: int
    raw: bool
    """The blob belongs there as it is, and not as base64."""


class Marks:
    """Marks of one request, told apart by number. Nobody who wrote a part of the request can know what they look like,
    neither as base64 nor decoded."""

    def __init__(self) -> None:
        self._stem = f"blob-{secrets.token_hex(17)}".encode()  # 39 bytes
        in_base64 = b64encode(self._stem)
        # Digits alone, so their base64 is of letters and digits alone.
        coded = b"%b([0-9A-Za-z]{%d})" % (in_base64, _DIGITS * 4 // 3)
        self._either = re.compile(coded + b"|" + b"%b([0-9]{%d})" % (self._stem, _DIGITS))
        self._numbers: dict[bytes, int] = {}
        """By what follows the stem, in either form."""

    def base64(self, number: int) -> str:
        """The mark of this number, as what a source of base64 holds."""
        digits = b"%0*d" % (_DIGITS, number)
        self._numbers[digits] = self._numbers[b64encode(digits)] = number
        return b64encode(self._stem + digits).decode()

    def split(self, body: bytes) -> Iterator[bytes | Mark]:
        """The body, cut at its marks."""
        done = 0
        for found in self._either.finditer(body):
            yield body[done : found.start()]
            coded, plain = found.groups()
            yield Mark(self._numbers[coded or plain], raw=coded is None)
            done = found.end()
        yield body[done:]
