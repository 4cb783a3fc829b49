"""A blob store in memory that says what was asked of it, and can be unavailable."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable

from tokenbus.blobs import BlobRef, blob_id_of
from tokenbus.errors import BlobCorrupt, BlobError, BlobNotFound

PIECE = 1000


class MemoryBlobs:
    """A `tokenbus.blobs.BlobStreams`."""

    def __init__(self) -> None:
        self.contents: dict[str, tuple[bytes, str]] = {}
        self.read: list[str] = []
        """Blobs whose content was asked for."""
        self.leased: list[str] = []
        self.checked: list[str] = []
        self.stored: list[str] = []
        self.failure: BlobError | None = None
        """Raised by all that it is asked."""
        self.open_readers = 0

    def put(self, content: bytes, media_type: str) -> str:
        blob_id = blob_id_of(content)
        self.contents[blob_id] = (content, media_type)
        return blob_id

    async def store(self, content: bytes | AsyncIterable[bytes], media_type: str) -> BlobRef:
        assert isinstance(content, bytes)
        self._reach()
        blob_id = self.put(content, media_type)
        self.stored.append(blob_id)
        return BlobRef(blob_id=blob_id, media_type=media_type, size=len(content))

    async def load(self, blob_id: str) -> bytes:
        return b"".join([piece async for piece in self.chunks(blob_id)])

    async def head(self, blob_id: str) -> BlobRef:
        content, media_type = self._found(blob_id)
        return BlobRef(blob_id=blob_id, media_type=media_type, size=len(content))

    async def chunks(self, blob_id: str) -> AsyncGenerator[bytes]:
        content, _ = self._found(blob_id)
        self.read.append(blob_id)
        self.open_readers += 1
        try:
            for start in range(0, len(content), PIECE):
                yield content[start : start + PIECE]
        finally:
            self.open_readers -= 1

    async def lease(self, blob_id: str) -> None:
        self._found(blob_id)
        self.leased.append(blob_id)

    async def check(self, blob_id: str) -> None:
        content, _ = self._found(blob_id)
        self.checked.append(blob_id)
        if blob_id_of(content) != blob_id:
            raise BlobCorrupt(blob_id)

    async def aclose(self) -> None:
        pass

    def _reach(self) -> None:
        if self.failure:
            raise self.failure

    def _found(self, blob_id: str) -> tuple[bytes, str]:
        self._reach()
        if blob_id not in self.contents:
            raise BlobNotFound(blob_id)
        return self.contents[blob_id]
