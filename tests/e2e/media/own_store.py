"""A user's own store: one file per blob, with the minimum that a `BlobLoader` needs."""

from __future__ import annotations

import os
from collections.abc import AsyncIterable
from pathlib import Path

from tokenbus.blobs import BlobRef, blob_id_of, parse_blob_id
from tokenbus.errors import BlobNotFound


class OwnStore:
    """A `tokenbus.blobs.BlobLoader`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def store(self, content: bytes | AsyncIterable[bytes], media_type: str) -> BlobRef:
        whole = content if isinstance(content, bytes) else b"".join([piece async for piece in content])
        blob_id = blob_id_of(whole)
        self._path(blob_id).write_bytes(whole)
        return BlobRef(blob_id=blob_id, media_type=media_type, size=len(whole))

    async def load(self, blob_id: str) -> bytes:
        try:
            return self._path(blob_id).read_bytes()
        except FileNotFoundError:
            raise BlobNotFound(blob_id) from None

    async def aclose(self) -> None:
        pass

    def _path(self, blob_id: str) -> Path:
        return self._directory / parse_blob_id(blob_id)


def create() -> OwnStore:
    """What `blobs.loader` names."""
    return OwnStore(Path(os.environ["OWN_STORE"]))
