"""Spools base64 from an answer, on disk if it is large, and reads it back decoded."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Generator
from hashlib import sha256
from tempfile import SpooledTemporaryFile
from typing import Self

import msgspec

from tokenbus.blobs import blob_id_from_digest

IN_MEMORY_BYTES = 256 * 2**10
_PIECE = 256 * 2**10
_HEAD_BYTES = 512 * 2**10
"""Bytes of the content kept to detect its format: a JPEG's dimensions may come late in its header."""
_ESCAPE = re.compile(rb"\\(?:/|u00(2[fFbB]|3[dD]))")
_LONGEST_ESCAPE = 6


class DecodedContent(msgspec.Struct, frozen=True):
    """The decoded content."""

    blob_id: str
    size: int
    head: bytes
    """Its first bytes."""


class Base64Spool:
    """The raw content of one JSON string. The caller closes it."""

    def __init__(self) -> None:
        self._file = SpooledTemporaryFile(max_size=IN_MEMORY_BYTES)  # noqa: SIM115 - closed by this object's owner
        self.size = 0
        """Bytes written so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Discard the content."""
        self._file.close()

    def write(self, data: bytes) -> None:
        """Append data."""
        self._file.write(data)
        self.size += len(data)

    def as_it_came(self) -> Generator[bytes]:
        """Yield the raw data in pieces."""
        self._file.seek(0)
        while piece := self._file.read(_PIECE):
            yield piece

    def decoded(self) -> Generator[bytes]:
        """Yield the decoded data in pieces. Raises binascii.Error if it is not base64 or is truncated."""
        text, padded = b"", False
        for piece in self._unescaped():
            text += piece
            whole = len(text) - len(text) % 4
            if whole:
                if padded:
                    raise binascii.Error("there is data after the padding")
                padded = text[whole - 1 : whole] == b"="
                yield b64decode(text[:whole], validate=True)
                text = text[whole:]
        if text:
            raise binascii.Error("it ends in the middle")

    def content(self) -> DecodedContent:
        """Digest the whole content; slow for a large one. Raises binascii.Error."""
        digest, size, head = sha256(), 0, b""
        for piece in self.decoded():
            digest.update(piece)
            size += len(piece)
            if len(head) < _HEAD_BYTES:
                head += piece
        return DecodedContent(blob_id_from_digest(digest.hexdigest()), size, head[:_HEAD_BYTES])

    def _unescaped(self) -> Generator[bytes]:
        """Yield the data with JSON escapes of base64 characters undone."""
        held = b""
        for piece in self.as_it_came():
            text = held + piece
            held = b""
            if b"\\" in text:
                cut = text.rfind(b"\\", max(0, len(text) - _LONGEST_ESCAPE + 1))
                if cut >= 0:
                    text, held = text[:cut], text[cut:]
                text = _ESCAPE.sub(_plain, text)
            yield text
        yield _ESCAPE.sub(_plain, held)


def _plain(escape: re.Match[bytes]) -> bytes:
    return bytes([int(escape[1], 16)]) if escape[1] else b"/"
