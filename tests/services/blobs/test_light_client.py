"""`bus.blobs`: the light client at the real blob service, with the standard library alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.services.blobs.conftest import MAX_BYTES, MemoryBlobs, Serve, Served
from tokenbus import restore_from_storage, sanitize_for_storage
from tokenbus.blobs import BlobStreams, blob_id_of
from tokenbus.bus.keys import Keys
from tokenbus.client.blobs import Blobs
from tokenbus.errors import (
    BlobCorrupt,
    BlobNotFound,
    BlobRefused,
    BlobTooLarge,
    BlobUnauthorized,
    BlobUnavailable,
    SettingsError,
)
from tokenbus.sync import Client as SyncClient
from tokenbus_services.blobs.http import BlobRoutes, Receive, Scope, Send

LARGE = bytes(range(256)) * 8_000


@pytest.fixture
def blobs(service: Served) -> Blobs:
    return Blobs(service.url)


async def pieces(content: bytes, size: int = 100_000) -> AsyncIterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


async def test_what_is_put_is_got_whole_or_in_pieces(blobs: Blobs) -> None:
    whole, streamed = await blobs.put(LARGE, "image/png"), await blobs.put(pieces(LARGE), "IMAGE/PNG")
    assert whole == streamed
    assert (whole.blob_id, whole.media_type, whole.size) == (blob_id_of(LARGE), "image/png", len(LARGE))
    assert await blobs.get(whole.blob_id) == LARGE
    parts = [part async for part in blobs.chunks(whole.blob_id)]
    assert len(parts) > 1
    assert b"".join(parts) == LARGE
    assert await blobs.head(whole.blob_id) == whole
    empty = await blobs.put(b"")
    assert await blobs.get(empty.blob_id) == b""
    await blobs.lease(whole.blob_id)
    await blobs.check(whole.blob_id)


async def test_it_is_the_loader_that_storage_wants(blobs: Blobs) -> None:
    assert isinstance(blobs, BlobStreams)
    value = {"messages": [{"role": "user", "content": "x" * 100_000}]}
    kept = await sanitize_for_storage(value, blobs, paths=("/messages",))
    assert len(str(kept)) < 1_000
    assert await restore_from_storage(kept, blobs) == value


async def test_many_at_once_do_not_meet(blobs: Blobs) -> None:
    contents = [bytes([n]) * 50_000 for n in range(20)]
    refs = await asyncio.gather(*(blobs.put(content) for content in contents))
    assert await asyncio.gather(*(blobs.get(ref.blob_id) for ref in refs)) == contents


async def test_what_cannot_be_is_a_named_error(blobs: Blobs, blob_store: MemoryBlobs) -> None:
    nobody = blob_id_of(b"nobody")
    for call in (blobs.get, blobs.head, blobs.lease, blobs.check):
        with pytest.raises(BlobNotFound):
            await call(nobody)
        with pytest.raises(BlobRefused):
            await call("sha256:../../etc/passwd")
    with pytest.raises(BlobRefused):
        await blobs.put(b"x", "no type")
    with pytest.raises(BlobTooLarge) as caught:
        await blobs.put(pieces(bytes(2 * MAX_BYTES)))
    assert caught.value.limit == MAX_BYTES
    before = blob_store.everything()

    async def breaks_off() -> AsyncIterator[bytes]:
        yield b"half"
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        await blobs.put(breaks_off())
    assert blob_store.everything() == before


async def test_an_absent_server_raises_its_own_error_and_does_not_hang() -> None:
    gone = Blobs("http://127.0.0.1:1")
    for call in (gone.put(b"x"), gone.get(blob_id_of(b"x")), gone.head(blob_id_of(b"x"))):
        with pytest.raises(BlobUnavailable) as caught:
            await call
        assert caught.value.retryable


async def test_the_token_is_sent_from_the_argument_the_environment_or_a_file(
    blob_store: MemoryBlobs, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await serve(BlobRoutes(blob_store.store, token="a-long-token"))
    ref = await Blobs(service.url, token="a-long-token").put(b"content")
    with pytest.raises(BlobUnauthorized):
        await Blobs(service.url).get(ref.blob_id)
    with pytest.raises(BlobUnauthorized):
        await Blobs(service.url).head(ref.blob_id)
    monkeypatch.setenv("TOKENBUS_BLOBS_URL", service.url)
    monkeypatch.setenv("TOKENBUS_BLOB_TOKEN", "a-long-token")
    assert await Blobs().get(ref.blob_id) == b"content"
    monkeypatch.setenv("TOKENBUS_BLOB_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(SettingsError, match="is set too"):
        Blobs()
    monkeypatch.delenv("TOKENBUS_BLOB_TOKEN")
    (tmp_path / "token").write_text("a-long-token\n")
    assert await Blobs().get(ref.blob_id) == b"content"


@pytest.mark.parametrize("url", ["ftp://host", "host:80", "http://", "http://host:no", "http://host?x=1"])
def test_an_invalid_address_is_reported(url: str) -> None:
    with pytest.raises(SettingsError):
        Blobs(url)


async def test_content_that_does_not_match_its_id_is_corrupt_for_every_service(serve: Serve) -> None:
    blob_id = blob_id_of(b"right")

    async def wrong(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": b"wrong"})

    with pytest.raises(BlobCorrupt):
        await Blobs((await serve(wrong)).url).get(blob_id)


async def test_an_answer_that_is_cut_is_never_taken_for_whole(serve: Serve) -> None:
    async def short(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"500")]})
        await send({"type": "http.response.body", "body": b"wrong"})

    with pytest.raises(BlobUnavailable):
        await Blobs((await serve(short)).url).get(blob_id_of(b"wrong"))


async def test_a_reader_that_leaves_early_leaves_nothing_behind(blobs: Blobs) -> None:
    ref = await blobs.put(LARGE)
    stream = blobs.chunks(ref.blob_id)
    await anext(stream)
    await stream.aclose()
    assert await blobs.get(ref.blob_id) == LARGE


async def test_scripts_have_the_same(service: Served, server_url: str, keys: Keys) -> None:
    found: list[object] = []

    def parts() -> Iterator[bytes]:
        yield LARGE[:1000]
        yield LARGE[1000:]

    def script() -> None:
        with SyncClient(server_url, prefix=keys.prefix, blobs=service.url) as bus:
            ref = bus.blobs.put(parts(), "image/png")
            found.extend(
                [ref.blob_id, bus.blobs.get(ref.blob_id) == LARGE, b"".join(bus.blobs.chunks(ref.blob_id)) == LARGE]
            )

    thread = threading.Thread(target=script)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert found == [blob_id_of(LARGE), True, True]
