"""JSON values into storage and back by way of a blob store."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import AsyncIterable

import pytest

from tokenbus import restore_from_storage, sanitize_for_storage
from tokenbus.blobs import BlobRef, blob_id_of
from tokenbus.errors import BlobCorrupt, BlobNotFound

CONTENT = bytes(range(256)) * 100
VALUE = {"messages": [{"image": {"media_type": "image/png", "data": b64encode(CONTENT).decode()}}, {"raw": "short"}]}


class Blobs:
    """A `BlobLoader` in memory."""

    def __init__(self, names: str = "") -> None:
        self.kept: dict[str, tuple[bytes, str]] = {}
        self._names = names

    async def store(self, content: bytes | AsyncIterable[bytes], media_type: str) -> BlobRef:
        assert isinstance(content, bytes)
        blob_id = self._names or blob_id_of(content)
        self.kept[blob_id] = content, media_type
        return BlobRef(blob_id=blob_id, media_type=media_type, size=len(content))

    async def load(self, blob_id: str) -> bytes:
        if blob_id not in self.kept:
            raise BlobNotFound(blob_id)
        return self.kept[blob_id][0]

    async def aclose(self) -> None:
        pass


async def test_large_parts_lie_in_the_store_and_come_back() -> None:
    blobs = Blobs()
    kept = await sanitize_for_storage(VALUE, blobs, paths=["/messages/*/raw"])
    assert sorted(blobs.kept.values()) == [(CONTENT, "image/png"), (b"short", "text/plain")]
    assert await restore_from_storage(json.loads(json.dumps(kept)), blobs) == VALUE


async def test_a_missing_blob_is_named() -> None:
    kept = await sanitize_for_storage(VALUE, Blobs())
    with pytest.raises(BlobNotFound, match=blob_id_of(CONTENT)):
        await restore_from_storage(kept, Blobs())


async def test_a_store_that_gives_names_of_its_own_is_refused() -> None:
    with pytest.raises(BlobCorrupt, match="returned the id"):
        await sanitize_for_storage(VALUE, Blobs(names=blob_id_of(b"another")))
