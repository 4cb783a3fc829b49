"""Blobs that were sent lately stay in memory, within a bound."""

from __future__ import annotations

import pytest

from tests.services.fetcher.blob_store import MemoryBlobs
from tokenbus.blobs import BlobLoader, BlobRef, blob_id_of
from tokenbus.errors import BlobNotFound, BlobUnavailable
from tokenbus_services.media.blob_cache import RecentBlobs

KB = b"x" * 1024


async def read(blobs: RecentBlobs, blob_id: str) -> bytes:
    found = await blobs.find(blob_id)
    whole = b"".join([piece async for piece in found.pieces()])
    assert len(whole) == found.size
    return whole


async def test_a_blob_is_read_from_the_store_once_and_keeps_its_metadata() -> None:
    blob_store = MemoryBlobs()
    blobs = RecentBlobs(blob_store, 100 * 1024)
    blob_id = blob_store.put(KB, "image/png")
    assert [await read(blobs, blob_id) for _ in range(3)] == [KB] * 3
    assert blob_store.read == [blob_id]
    assert (await blobs.find(blob_id)).media_type == "image/png"


async def test_the_least_recently_used_is_evicted_first_and_the_bound_holds() -> None:
    blob_store = MemoryBlobs()
    blobs = RecentBlobs(blob_store, 4 * 1024)
    ids = [blob_store.put(bytes([n]) * 1024, "image/png") for n in range(6)]
    for blob_id in (*ids[:4], ids[0], ids[4]):
        await read(blobs, blob_id)
        assert blobs.held_bytes <= 4 * 1024
    blob_store.read.clear()
    for blob_id in (ids[0], ids[2], ids[3], ids[4]):
        await read(blobs, blob_id)
    assert blob_store.read == []
    await read(blobs, ids[1])
    assert blob_store.read == [ids[1]]


async def test_what_is_being_read_counts_too_however_many_read_at_once() -> None:
    blob_store = MemoryBlobs()
    blobs = RecentBlobs(blob_store, 4 * 1024)
    await read(blobs, blob_store.put(b"before" * 170, "image/png"))
    readers = [(await blobs.find(blob_store.put(bytes([n]) * 1024, "image/png"))).pieces() for n in range(8)]
    for reader in readers:
        await anext(reader)
        assert blobs.held_bytes <= 4 * 1024
    for reader in readers:
        assert len([piece async for piece in reader]) == 1
    assert blobs.held_bytes == 4 * 1024


async def test_a_large_blob_is_never_kept() -> None:
    blob_store = MemoryBlobs()
    blobs = RecentBlobs(blob_store, 4 * 1024)
    blob_id = blob_store.put(KB + b"y", "image/png")
    await read(blobs, blob_id)
    await read(blobs, blob_id)
    assert (blobs.held_bytes, len(blob_store.read)) == (0, 2)


async def test_a_reading_that_was_broken_off_leaves_nothing() -> None:
    blob_store = MemoryBlobs()
    blobs = RecentBlobs(blob_store, 100 * 1024)
    found = await blobs.find(blob_store.put(KB * 3, "image/png"))
    pieces = found.pieces()
    await anext(pieces)
    await pieces.aclose()
    assert (blobs.held_bytes, blob_store.open_readers) == (0, 0)


async def test_a_blob_deleted_from_the_store_is_removed_from_memory() -> None:
    blob_store = MemoryBlobs()
    blobs = RecentBlobs(blob_store, 100 * 1024)
    blob_id = blob_store.put(KB, "image/png")
    await read(blobs, blob_id)
    blob_store.contents.clear()
    with pytest.raises(BlobNotFound):
        await blobs.find(blob_id)


class Plain:
    """A user's own loader with the minimum that it needs."""

    def __init__(self) -> None:
        self.loads = 0
        self.failure: Exception | None = None

    async def store(self, content: object, media_type: str) -> BlobRef:
        raise AssertionError("nobody asks for this here")

    async def load(self, blob_id: str) -> bytes:
        self.loads += 1
        if self.failure:
            raise self.failure
        if blob_id != blob_id_of(KB * 100):
            raise BlobNotFound(blob_id)
        return KB * 100

    async def aclose(self) -> None:
        self.loads = -1


async def test_a_loader_without_streams_is_enough() -> None:
    plain: BlobLoader = (own := Plain())
    blobs = RecentBlobs(plain, 2**20)
    for _ in range(2):
        assert await read(blobs, blob_id_of(KB * 100)) == KB * 100
    assert own.loads == 1
    assert (await blobs.find(blob_id_of(KB * 100))).media_type is None
    await blobs.lease(blob_id_of(KB * 100))
    with pytest.raises(BlobNotFound):
        await blobs.find(blob_id_of(b""))
    await blobs.aclose()
    assert own.loads == -1


@pytest.mark.parametrize("failure", [OSError("no route"), TimeoutError(), KeyError("bucket")])
async def test_an_unknown_error_of_a_loader_counts_as_an_unavailable_store(failure: Exception) -> None:
    own = Plain()
    own.failure = failure
    with pytest.raises(BlobUnavailable, match=type(failure).__name__):
        await RecentBlobs(own, 0).find(blob_id_of(KB))
