"""Blobs that an open run reads are kept, beyond their own lifetime if necessary."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.services.blobs.conftest import MemoryBlobs, Served
from tokenbus.blobs import blob_id_of
from tokenbus.errors import BlobNotFound
from tokenbus.events.requests import BlobSource, ImagePart, Message, TextPart
from tokenbus_services.blobs.client import HttpBlobs
from tokenbus_services.intake.blob_offload import IntakeMedia
from tokenbus_services.media.blob_cache import RecentBlobs

CONTENT = b"needed by a run"
TTL_S, LEASE_S = 100, 1000
"""The clock of the local store."""


async def test_a_leased_blob_outlives_its_lifetime_and_is_removed_with_its_lease(blob_store: MemoryBlobs) -> None:
    ref = await blob_store.store.put(_once(CONTENT), "text/plain")
    await blob_store.store.lease(ref.blob_id)
    blob_store.now = TTL_S + 10
    assert await blob_store.store.sweep() == 0
    assert (await blob_store.store.head(ref.blob_id)).size == len(CONTENT)
    blob_store.now = LEASE_S + 10
    with pytest.raises(BlobNotFound):
        await blob_store.store.head(ref.blob_id)
    assert await blob_store.store.sweep() == 1
    assert blob_store.everything() == [], "the lease goes too"


async def test_a_blob_without_a_lease_is_removed_after_its_lifetime(blob_store: MemoryBlobs) -> None:
    ref = await blob_store.store.put(_once(CONTENT), "text/plain")
    kept = await blob_store.store.put(_once(b"kept"), "text/plain")
    await blob_store.store.lease(kept.blob_id)
    blob_store.now = TTL_S + 10
    assert await blob_store.store.sweep() == 1
    with pytest.raises(BlobNotFound):
        await blob_store.store.lease(ref.blob_id)


async def test_a_lease_is_renewed_only_when_half_of_it_is_over(blob_store: MemoryBlobs) -> None:
    ref = await blob_store.store.put(_once(CONTENT), "text/plain")
    for _ in range(5):
        await blob_store.store.lease(ref.blob_id)
    assert _leases(blob_store) == 1
    blob_store.now = LEASE_S * 0.6
    await blob_store.store.lease(ref.blob_id)
    assert _leases(blob_store) == 2
    blob_store.now = LEASE_S * 1.2
    assert await blob_store.store.sweep() == 0
    assert _leases(blob_store) == 1, "the older one is over"
    assert (await blob_store.store.head(ref.blob_id)).size == len(CONTENT)


async def test_one_lease_of_many_that_are_asked_for_at_once(blob_store: MemoryBlobs) -> None:
    ref = await blob_store.store.put(_once(CONTENT), "text/plain")
    await asyncio.gather(*(blob_store.store.lease(ref.blob_id) for _ in range(10)))
    assert _leases(blob_store) == 1


async def test_only_a_read_of_a_whole_blob_takes_a_lease(blob_store: MemoryBlobs, service: Served) -> None:
    async with HttpBlobs(service.url) as blobs, httpx.AsyncClient(base_url=service.url, timeout=60) as http:
        ref = await blobs.store(CONTENT, "text/plain")
        await http.head(f"/blobs/{ref.blob_id}")
        await http.get(f"/blobs/{ref.blob_id}", headers={"Range": "bytes=0-1"})
        assert _leases(blob_store) == 0
        await blobs.load(ref.blob_id)
        assert _leases(blob_store) == 1
        blob_store.now = TTL_S + 10
        await blob_store.store.sweep()
        assert await blobs.load(ref.blob_id) == CONTENT


async def test_a_lease_can_be_asked_for(blob_store: MemoryBlobs, service: Served) -> None:
    async with HttpBlobs(service.url) as blobs:
        ref = await blobs.store(CONTENT, "text/plain")
        await blobs.lease(ref.blob_id)
        assert _leases(blob_store) == 1
        with pytest.raises(BlobNotFound):
            await blobs.lease(blob_id_of(b"never stored"))


async def test_the_blobs_of_a_sessions_messages_are_kept_as_long_as_the_session(
    blob_store: MemoryBlobs, service: Served
) -> None:
    blobs = HttpBlobs(service.url)
    image, signature, other = [await blobs.store(name, "image/png") for name in (b"image", b"signature", b"other")]
    source = BlobSource(blob_id=image.blob_id, media_type="image/png")
    said = Message(role="user", content=[ImagePart(source=source)])
    thought = Message(role="assistant", content=[TextPart(text="Hm", opaque_blobs={"s": signature.blob_id})])
    media = IntakeMedia(RecentBlobs(blobs, 0), inline_characters=1000, session_s=3000.0)
    await blobs.lease(image.blob_id)
    for _ in range(2):
        await media.keep([said, thought, Message(role="user", content="Hello")])
    assert _leases(blob_store) == 3, "a longer one beside that of a run"
    blob_store.now = 2990
    await blob_store.store.sweep()
    for ref in (image, signature):
        assert await blobs.load(ref.blob_id)
    with pytest.raises(BlobNotFound):
        await blobs.load(other.blob_id)
    await blobs.lease_for(image.blob_id, 10**6)
    blob_store.now = 2990 + 4010
    await blob_store.store.sweep()
    assert blob_store.everything() == [], "no lease is longer than the longest"
    await blobs.aclose()


def _leases(blob_store: MemoryBlobs) -> int:
    return sum("leases/" in path for path in blob_store.everything())


async def _once(content: bytes):
    yield content
