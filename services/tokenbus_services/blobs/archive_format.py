"""How an archived log is stored: compressed pieces, sealed with its tenant's key if there is one. Pure.

An object begins with its head: the format, a salt, and which key sealed it. Pieces follow, each with its length and
whether it is the last one. A sealed piece is AES-256-GCM with a key of this object alone, which HKDF derives from the
tenant's key, the salt and the object's name; its nonce is its number, and the mark of the last one is authenticated. So
no piece can be changed, moved, left out or taken from another object.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING

from tokenbus.errors import BlobCorrupt, BlobNotFound

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PIECE_BYTES = 64 * 2**10
"""Of the log in one piece, before it is compressed."""
_MOST = 2 * PIECE_BYTES
"""A piece that says to be longer is not ours."""
_HEAD = struct.Struct("!4s16s8s")
_PIECE = struct.Struct("!?I")
_FORMAT = b"TBL1"
_IN_CLEAR = bytes(8)
HEAD_BYTES = _HEAD.size + _PIECE.size + _MOST
"""The first piece is in these bytes."""


def key_id(key: bytes) -> bytes:
    """Which key it is; says nothing about the key."""
    return sha256(b"tokenbus archive key" + key).digest()[:8]


class Writer:
    """Writes one object: `head`, then each piece."""

    def __init__(self, name: str, key: bytes | None) -> None:
        salt = os.urandom(16)
        self.head = _HEAD.pack(_FORMAT, salt, key_id(key) if key else _IN_CLEAR)
        self._cipher = _cipher(key, salt, name) if key else None
        self._count = 0

    def piece(self, data: bytes, *, last: bool) -> bytes:
        """The next piece, of at most `PIECE_BYTES`."""
        stored = zlib.compress(data, 1)
        if self._cipher:
            stored = self._cipher.encrypt(_nonce(self._count), stored, _mark(last))
        self._count += 1
        return _PIECE.pack(last, len(stored)) + stored


class Reader:
    """Reads one object, in parts of any size. Holds one piece of it at most."""

    def __init__(self, name: str, keys: Callable[[], Mapping[bytes, bytes]]) -> None:
        """``keys``: those of the tenant by `key_id`, asked for only if the object is sealed."""
        self._name = name
        self._keys = keys
        self._pending = bytearray()
        self._cipher: AESGCM | None = None
        self._begun = False
        self._count = 0
        self.ended = False
        """Whether the last piece was read."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The pieces that are complete now. Raises BlobNotFound if the key is gone; BlobCorrupt."""
        self._pending += data
        if not self._begun:
            if len(self._pending) < _HEAD.size:
                return
            self._begin()
        while not self.ended and len(self._pending) >= _PIECE.size:
            last, size = _PIECE.unpack_from(self._pending)
            if size > _MOST:
                raise BlobCorrupt(self._name)
            if len(self._pending) < _PIECE.size + size:
                return
            stored = bytes(self._pending[_PIECE.size : _PIECE.size + size])
            del self._pending[: _PIECE.size + size]
            self.ended = last
            yield self._opened(stored, last=last)

    def _begin(self) -> None:
        kind, salt, sealed_with = _HEAD.unpack_from(self._pending)
        del self._pending[: _HEAD.size]
        if kind != _FORMAT:
            raise BlobCorrupt(self._name)
        if sealed_with != _IN_CLEAR:
            key = self._keys().get(sealed_with)
            if key is None:
                raise BlobNotFound(self._name)
            self._cipher = _cipher(key, salt, self._name)
        self._begun = True

    def _opened(self, stored: bytes, *, last: bool) -> bytes:
        if self._cipher:
            from cryptography.exceptions import InvalidTag

            try:
                stored = self._cipher.decrypt(_nonce(self._count), stored, _mark(last))
            except InvalidTag:
                raise BlobCorrupt(self._name) from None
        self._count += 1
        try:
            plain = zlib.decompressobj().decompress(stored, PIECE_BYTES + 1)
        except zlib.error:
            raise BlobCorrupt(self._name) from None
        if len(plain) > PIECE_BYTES:
            raise BlobCorrupt(self._name)
        return plain


def _cipher(key: bytes, salt: bytes, name: str) -> AESGCM:
    # Only deployments with keys need the library.
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return AESGCM(HKDF(SHA256(), 32, salt, b"tokenbus archive " + name.encode()).derive(key))


def _nonce(count: int) -> bytes:
    return count.to_bytes(12)


def _mark(last: bool) -> bytes:
    return b"last" if last else b"more"
