"""The client as a `BlobStreams`: what a blob is, and its content in pieces; and what of it a run may rely on."""

from __future__ import annotations

import socket
from base64 import b64encode
from collections.abc import AsyncIterator

import pytest

from tests.services.blobs.conftest import MemoryBlobs, Serve, Served
from tokenbus.blobs import BlobRef, BlobStreams, blob_id_of
from tokenbus.errors import BlobCorrupt, BlobNotFound, BlobRefused, BlobUnauthorized, BlobUnavailable
from tokenbus.events.requests import Base64Source, BlobSource, Generate, ImagePart, Message
from tokenbus_services.blobs.client import HttpBlobs
from tokenbus_services.blobs.http import BlobRoutes, Receive, Scope, Send
from tokenbus_services.intake.blob_offload import IntakeMedia
from tokenbus_services.media.blob_cache import RecentBlobs

CONTENT = bytes(range(256)) * 8000
TTL_S, LEASE_S = 100, 1000
"""The clock of the local store."""


@pytest.fixture
async def blobs(service: Served) -> AsyncIterator[HttpBlobs]:
    async with HttpBlobs(service.url) as client:
        yield client


async def read(blobs: BlobStreams, blob_id: str, into: list[bytes] | None = None) -> list[bytes]:
    pieces = [] if into is None else into
    async for piece in blobs.chunks(blob_id):
        pieces.append(piece)
    return pieces


async def test_a_blob_says_what_it_is_and_comes_in_pieces(blobs: HttpBlobs) -> None:
    ref = await blobs.store(CONTENT, "image/png")
    assert isinstance(blobs, BlobStreams)
    assert await blobs.head(ref.blob_id) == BlobRef(blob_id=ref.blob_id, media_type="image/png", size=len(CONTENT))
    pieces = await read(blobs, ref.blob_id)
    assert b"".join(pieces) == CONTENT
    assert len(pieces) > 1


async def test_an_empty_blob_has_no_pieces(blobs: HttpBlobs) -> None:
    ref = await blobs.store(b"", "text/plain")
    assert await read(blobs, ref.blob_id) == []


async def test_what_is_not_there_is_an_error_of_each_question(blobs: HttpBlobs) -> None:
    for blob_id, error in ((blob_id_of(b"nobody"), BlobNotFound), ("../../x", BlobRefused)):
        with pytest.raises(error):
            await blobs.head(blob_id)
        with pytest.raises(error):
            await read(blobs, blob_id)


async def test_the_last_piece_of_what_is_not_the_blob_never_comes(serve: Serve) -> None:
    async def wrong(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": CONTENT[:-1]})

    served = await serve(wrong)
    got: list[bytes] = []
    async with HttpBlobs(served.url) as blobs:
        with pytest.raises(BlobCorrupt):
            await read(blobs, blob_id_of(CONTENT), got)
    assert len(b"".join(got)) < len(CONTENT) - 1


async def test_each_call_to_a_service_that_needs_a_token_or_is_down_raises_its_error(
    serve: Serve, local_store: MemoryBlobs
) -> None:
    served = await serve(BlobRoutes(local_store.store, token="secret"))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        down = f"http://127.0.0.1:{unused.getsockname()[1]}"
        for url, error in ((served.url, BlobUnauthorized), (down, BlobUnavailable)):
            async with HttpBlobs(url) as blobs:
                with pytest.raises(error):
                    await blobs.head(blob_id_of(CONTENT))
                with pytest.raises(error):
                    await read(blobs, blob_id_of(CONTENT))


async def test_a_request_keeps_its_blobs_alive_while_its_run_waits(blobs: HttpBlobs, blob_store: MemoryBlobs) -> None:
    named = await blobs.store(b"uploaded before", "image/png")
    request = Generate(
        provider="p",
        model="m",
        messages=[
            Message(
                role="user",
                content=[
                    ImagePart(source=BlobSource(blob_id=named.blob_id, media_type="image/png")),
                    ImagePart(source=Base64Source(media_type="image/png", data=b64encode(CONTENT).decode())),
                ],
            )
        ],
    )
    recent = RecentBlobs(blobs, 0)
    await IntakeMedia(recent, inline_characters=1000).offload(request)
    unnamed = await blobs.store(b"nobody's", "image/png")
    blob_store.now = TTL_S + 10
    assert await blob_store.store.sweep() == 1
    assert (await recent.find(named.blob_id)).size == len(b"uploaded before")
    assert (await recent.find(blob_id_of(CONTENT))).size == len(CONTENT)
    with pytest.raises(BlobNotFound):
        await recent.find(unnamed.blob_id)
