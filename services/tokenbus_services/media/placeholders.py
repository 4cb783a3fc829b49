"""Placeholders for blobs while a request is built, found again in the resulting body."""

from __future__ import annotations

import re
import secrets
from base64 import b64encode
from collections.abc import Iterator

import msgspec

_DIGITS = 6
"""Digits of a placeholder's number. They make its length a multiple of three bytes, so its base64 needs no padding."""


class Mark(msgspec.Struct, frozen=True):
    """The position of a blob in a body."""

    number: int
    raw: bool
    """Insert the raw bytes instead of base64."""


class PlaceholderMarks:
    """The placeholders of one request, identified by number. They are unguessable to the request's authors, both as
    base64 and decoded.
    """

    def __init__(self) -> None:
        self._stem = f"blob-{secrets.token_hex(17)}".encode()  # 39 bytes
        in_base64 = b64encode(self._stem)
        # Digits only, so their base64 consists of letters and digits.
        coded = b"%b([0-9A-Za-z]{%d})" % (in_base64, _DIGITS * 4 // 3)
        self._either = re.compile(coded + b"|" + b"%b([0-9]{%d})" % (self._stem, _DIGITS))
        self._numbers: dict[bytes, int] = {}
        """By the characters after the stem, in either form."""

    def base64(self, number: int) -> str:
        """The placeholder of this number, for use as the data of a base64 source."""
        digits = b"%0*d" % (_DIGITS, number)
        self._numbers[digits] = self._numbers[b64encode(digits)] = number
        return b64encode(self._stem + digits).decode()

    def split(self, body: bytes) -> Iterator[bytes | Mark]:
        """Split the body at its placeholders."""
        done = 0
        for found in self._either.finditer(body):
            yield body[done : found.start()]
            coded, plain = found.groups()
            yield Mark(self._numbers[coded or plain], raw=coded is None)
            done = found.end()
        yield body[done:]
