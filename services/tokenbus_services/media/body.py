"""Provider request bodies with embedded blobs: JSON alternating with base64, or a form with raw blobs.

The body is generated while it is sent. Only one piece of a blob is in memory at a time, never the whole body.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

import msgspec

from tokenbus.errors import (
    BlobCorrupt,
    BlobError,
    BlobNotFound,
    BlobRefused,
    BlobTooLarge,
    BlobUnauthorized,
    BlobUnavailable,
)
from tokenbus.events.error_info import ErrorClass, ErrorInfo
from tokenbus_services.media.blob_cache import Found


class Embedded(msgspec.Struct, frozen=True):
    """A blob embedded in a body."""

    where: str
    """Its location in the conversation."""
    blob_id: str
    found: Found
    raw: bool = False
    """Embed the raw bytes instead of base64."""

    @property
    def size(self) -> int:
        """Bytes that it occupies in the body."""
        return self.found.size if self.raw else base64_size(self.found.size)


class MediaBody:
    """Iterate over it once to send it. `size` is known in advance, in bytes; `aclose` releases open streams."""

    def __init__(self, pieces: Sequence[bytes | Embedded]) -> None:
        self._pieces = pieces
        self._sending: AsyncGenerator[bytes] | None = None
        self.size = sum(len(piece) if isinstance(piece, bytes) else piece.size for piece in pieces)

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Raises MediaFailed if a blob breaks off or has changed; the request is then cut off."""
        self._sending = self._all()
        return self._sending

    async def aclose(self) -> None:
        """Stop sending."""
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
    """Yield the blob in the encoding of the body. Raises BlobError. Base64 encodes three bytes at a time, so the
    remainder waits for the next piece.
    """
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
    if size != blob.found.size:  # the content length was already sent
        raise BlobCorrupt(blob.blob_id, f"received {size} bytes, but the store reported {blob.found.size}")
    if over:
        yield b64encode(over)


def base64_size(size: int) -> int:
    """Number of base64 characters for this many bytes."""
    return (size + 2) // 3 * 4


class MediaFailed(Exception):
    """A media failure. ``error`` names the media at fault and says whether a retry may help."""

    def __init__(self, error: BlobError, where: str) -> None:
        """``where``: the location of the media in the conversation."""
        super().__init__(f"{where}: {error.told or error}")
        self.error = ErrorInfo(
            code=error.code, kind=_kind(error), message=str(self), retryable=error.retryable, where=where
        )


def _kind(error: BlobError) -> ErrorClass:
    match error:
        case BlobNotFound() | BlobRefused() | BlobTooLarge():
            return "invalid_request"
        case BlobUnauthorized():
            return "auth"
        case BlobUnavailable():
            return "server"
        case _:
            return "internal"
