"""Moves images from a provider's answer to the blob store as they are read, so that they never go over the bus.

An image is one long base64 string. After the key of such a string, the string is spooled (on disk if it is long) and
replaced by a placeholder that names the blob (`tokenbus.core.image_header`). If it cannot be stored, it is passed
on unchanged: the normalizer tries again, and at worst the image stays in its event.
"""

from __future__ import annotations

import asyncio
import binascii
import re
from base64 import b64decode
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from hashlib import sha256
from tempfile import SpooledTemporaryFile
from typing import Self
from uuid import uuid4

import msgspec
import structlog

from tokenbus.blobs import DEFAULT_MEDIA_TYPE, blob_id_from_digest
from tokenbus.bus import process_clock
from tokenbus.core.image_header import format_of, name_of, pixels
from tokenbus.errors import BlobError
from tokenbus_services.blobs.client import StoreRetry
from tokenbus_services.media.blob_cache import RecentBlobs

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

SMALLEST_CHARS = 32 * 2**10
"""Shorter base64 is passed on unchanged."""
STORE_TIMEOUT_S = 30.0
"""Longest time that an answer waits for one of its images."""
_KEY_BYTES = 320
"""Preceding bytes searched for a key: more than any key with whitespace."""


class ImageStore:
    """Stores the images of all answers of a fetcher."""

    def __init__(self, blobs: RecentBlobs, *, largest_bytes: int) -> None:
        """``largest_bytes``: maximum size of a blob."""
        self.largest_chars = largest_bytes // 3 * 4 + 4
        self._retry = StoreRetry(blobs.store)

    async def put(self, spool: Base64Spool, media_type: str) -> bool:
        """Store the decoded content of the spool; return whether it worked. Takes at most `PATIENCE_S`."""
        until = process_clock.now() + STORE_TIMEOUT_S
        try:
            await self._retry.put(lambda: _pieces(spool), media_type, until=until)
        except BlobError as e:
            log.warning("image_not_offloaded", problem=str(e))
            return False
        return True


class ImageOffloader:
    """The images of one answer. `feed` it everything that is read, then `close`."""

    def __init__(
        self,
        keys: re.Pattern[bytes],
        images: ImageStore,
        waiting: Callable[[], AbstractContextManager[None]],
        secret: str = "",
    ) -> None:
        """``keys`` matches from an image's key to the start of its base64. ``waiting`` is entered while an image is
        stored and nothing is read from the provider. ``secret``: that of an earlier part of the answer.
        """
        self.secret = secret or uuid4().hex
        self._keys = keys
        self._store = images
        self._waiting = waiting
        self._before = b""
        self._held: Base64Spool | None = None
        self._stored: set[str] = set()
        """Some answers contain an image twice: when it is ready and at their end."""

    def passes(self, data: bytes) -> bool:
        """Whether all of the data can be passed on unchanged; if not, `feed` it."""
        if self._held or self._keys.search(text := self._before + data):
            return False
        self._before = text[-_KEY_BYTES:]
        return True

    async def feed(self, data: bytes) -> AsyncGenerator[bytes]:
        """Yield the data to pass on now, in non-empty pieces."""
        while data:
            if self._held is None:
                here = self._begins(data)
                if here:
                    yield data[:here]
                data = data[here:]
                continue
            end = data.find(b'"')
            inside = data if end < 0 else data[:end]
            self._held.write(inside)
            data = data[len(inside) :]
            if end >= 0 or self._held.size > self._store.largest_chars:
                with self._held as held:
                    self._held = None
                    if end >= 0 and (name := await self._offloaded(held)):
                        yield name
                    else:
                        for piece in held.as_it_came():
                            yield piece

    def close(self) -> None:
        """Discard an image that was cut off."""
        if self._held:
            self._held.close()
            self._held = None

    def _begins(self, data: bytes) -> int:
        """Return how many bytes pass unchanged: up to an image's base64, which is spooled from there on."""
        text = self._before + data
        for key in self._keys.finditer(text):
            if key.end() > len(self._before):
                here = key.end() - len(self._before)
                self._before, self._held = b"", Base64Spool()
                return here
        self._before = text[-_KEY_BYTES:]
        return len(data)

    async def _offloaded(self, held: Base64Spool) -> bytes | None:
        """Return the placeholder; None if the data is passed on unchanged."""
        if held.size < SMALLEST_CHARS:
            return None
        with self._waiting():
            try:
                content = await asyncio.to_thread(held.content)
            except binascii.Error:
                return None
            if content.blob_id not in self._stored:
                if not await self._store.put(held, format_of(content.head) or DEFAULT_MEDIA_TYPE):
                    return None
                self._stored.add(content.blob_id)
        return self._name(content)

    def _name(self, content: DecodedContent) -> bytes:
        width, height = pixels(content.head) or (0, 0)
        return name_of(self.secret, content.blob_id, content.size, width, height)


async def _pieces(spool: Base64Spool) -> AsyncGenerator[bytes]:
    pieces: Generator[bytes] = spool.decoded()
    for piece in pieces:
        yield piece


IN_MEMORY_BYTES = 256 * 2**10
_PIECE = 256 * 2**10
_HEAD_BYTES = 512 * 2**10
"""Bytes of the content kept to detect its format: a JPEG's dimensions may come late in its header."""
_ESCAPE = re.compile(rb"\\(?:/|u00(2[fFbB]|3[dD]))")
_LONGEST_ESCAPE = 6


class DecodedContent(msgspec.Struct, frozen=True):
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
