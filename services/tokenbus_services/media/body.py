"""The body of a provider request with blobs in it: JSON, then a blob in base64, then JSON again, and so on; or a form,
which has them as they are.

It is sent as it is made: of a blob no more than a piece is in memory, and nowhere the whole of the body.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

import msgspec

from tokenbus.errors import BlobCorrupt, BlobError
from tokenbus_services.media.blob_cache import Found
from tokenbus_services.media.errors import MediaFailed


class Embedded(msgspec.Struct, frozen=True):
    """A blob within a body."""

    where: str
    """Its place in the conversation."""
    blob_id: str
    found: Found
    raw: bool = False
    """As it is, and not in base64."""

    @property
    def size(self) -> int:
        """What it takes of the body, in bytes."""
        return self.found.size if self.raw else base64_size(self.found.size)


class MediaBody:
    """Iterate it once to send it. `size` is known beforehand, in bytes; `aclose` gives back what is still open."""

    def __init__(self, pieces: Sequence[bytes | Embedded]) -> None:
        self._pieces = pieces
        self._sending: AsyncGenerator[bytes] | None = None
        self.size = sum(len(piece) if isinstance(piece, bytes) else piece.size for piece in pieces)

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Raises MediaFailed where a blob breaks off or is not what it was: the request is then cut short."""
        self._sending = self._all()
        return self._sending

    async def aclose(self) -> None:
        """Leave off sending."""
        if self._sending is not None:
            await self._sending.aclose()

    async def _all(self) -> AsyncGenerator[bytes]:
        for piece in self._pieces:
            if isinstance(piece, bytes):
                yield piece
                continue
            try:
                async with aclosing(_encoded(piece)) as encoded:
                    async for data in encoded:
                        yield data
            except BlobError as e:
                raise MediaFailed(e, piece.where) from e


async def _encoded(blob: Embedded) -> AsyncGenerator[bytes]:
    """The blob as the body has it. Raises BlobError. Three bytes make four characters of base64: what is over waits for
    the next piece."""
    size = 0
    over = b""
    async with aclosing(blob.found.pieces()) as pieces:
        async for piece in pieces:
            size += len(piece)
            if blob.raw:
                yield piece
                continue
            data = over + piece
            over = data[len(data) - len(data) % 3 :]
            if whole := data[: len(data) - len(over)]:
                yield b64encode(whole)
    if size != blob.found.size:  # the length of the body is told already
        raise BlobCorrupt(blob.blob_id, f"{size} bytes came where the store said {blob.found.size}")
    if over:
        yield b64encode(over)


def base64_size(size: int) -> int:
    """Characters of base64 for so many bytes."""
    return (size + 2) // 3 * 4
