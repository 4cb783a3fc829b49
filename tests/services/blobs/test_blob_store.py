"""The store itself: what goes in comes out, and nothing else is ever there."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import obstore
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from tokenbus.blobs import blob_id_of
from tokenbus.errors import (
    BlobCorrupt,
    BlobNotFound,
    BlobRefused,
    BlobStoreFull,
    BlobTooLarge,
    BlobUnavailable,
    SettingsError,
)
from tokenbus_services.blobs import store as store_module
from tokenbus_services.blobs.backend import opened
from tokenbus_services.blobs.store import BlobStore, create
from tokenbus_services.settings import BlobSettings

from .conftest import MAX_BYTES, MemoryBlobs

TEXT = "text/plain"


async def body(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def content_of(store: BlobStore, blob_id: str) -> bytes:
    return b"".join([chunk async for chunk in (await store.open(blob_id)).chunks()])


@pytest.mark.parametrize("size", [0, 1, 2**20 - 1, 2**20, 2**20 + 1, 6 * 2**20])
async def test_a_blob_comes_back_as_it_was_put(blob_store: MemoryBlobs, size: int) -> None:
    content = os.urandom(size)
    ref = await blob_store.store.put(body(content[: size // 3], content[size // 3 :]), "Image/PNG")
    assert ref.blob_id == f"sha256:{sha256(content).hexdigest()}"
    assert (ref.media_type, ref.size) == ("image/png", size)
    assert await blob_store.store.head(ref.blob_id) == ref
    assert await content_of(blob_store.store, ref.blob_id) == content


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunks=st.lists(st.binary(max_size=64)))
def test_the_address_does_not_depend_on_how_the_body_was_cut(chunks: list[bytes]) -> None:
    async def put() -> str:
        store = BlobStore(MemoryStore(), max_bytes=MAX_BYTES, ttl_s=100.0, lease_s=1000.0)
        return (await store.put(body(*chunks), TEXT)).blob_id

    assert asyncio.run(put()) == blob_id_of(b"".join(chunks))


async def test_the_same_content_is_stored_once(blob_store: MemoryBlobs) -> None:
    first = await blob_store.store.put(body(b"twice"), TEXT)
    second = await blob_store.store.put(body(b"tw", b"ice"), TEXT)
    assert first == second
    assert len(blob_store.everything()) == 1


async def test_the_same_content_put_many_times_at_once_is_whole_and_stored_once(blob_store: MemoryBlobs) -> None:
    content = os.urandom(3 * 2**20)
    refs = await asyncio.gather(*(blob_store.store.put(body(content), TEXT) for _ in range(12)))
    assert len(set(refs)) == 1
    assert len(blob_store.everything()) == 1
    assert await content_of(blob_store.store, refs[0].blob_id) == content


async def test_the_media_type_given_last_answers(blob_store: MemoryBlobs) -> None:
    ref = await blob_store.store.put(body(b"{}"), TEXT)
    before = (await blob_store.store.head(ref.blob_id)).media_type
    await blob_store.store.put(body(b"{}"), "application/json; charset=utf-8")
    assert (before, (await blob_store.store.head(ref.blob_id)).media_type) == (TEXT, "application/json;charset=utf-8")


async def test_content_that_is_not_what_its_address_says_is_not_stored(blob_store: MemoryBlobs) -> None:
    with pytest.raises(BlobRefused, match="not sha256:"):
        await blob_store.store.put(body(b"other"), TEXT, expected=blob_id_of(b"this"))
    assert blob_store.everything() == []
    ref = await blob_store.store.put(body(b"this"), TEXT, expected=blob_id_of(b"this"))
    assert ref.blob_id == blob_id_of(b"this")


async def test_a_body_over_the_limit_is_given_up_at_once_and_leaves_nothing(blob_store: MemoryBlobs) -> None:
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 1
            yield b"x" * 2**20

    with pytest.raises(BlobTooLarge) as refused:
        await blob_store.store.put(endless(), TEXT)
    assert refused.value.limit == MAX_BYTES
    assert read == MAX_BYTES // 2**20 + 1
    assert blob_store.everything() == []


@pytest.mark.parametrize("sent", [10, 5 * 2**20])
async def test_a_body_that_breaks_off_leaves_nothing(blob_store: MemoryBlobs, sent: int) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"x" * sent
        raise ConnectionResetError("cut")

    with pytest.raises(ConnectionResetError):
        await blob_store.store.put(broken(), TEXT)
    assert blob_store.everything() == []


async def test_a_cancelled_upload_leaves_nothing(blob_store: MemoryBlobs) -> None:
    waiting = asyncio.Event()

    async def stalled() -> AsyncIterator[bytes]:
        yield b"x" * 3 * 2**20
        waiting.set()
        await asyncio.Event().wait()

    upload = asyncio.create_task(blob_store.store.put(stalled(), TEXT))
    await waiting.wait()
    upload.cancel()
    with pytest.raises(asyncio.CancelledError):
        await upload
    assert blob_store.everything() == []


async def test_a_full_disk_under_the_store_is_named(blob_store: MemoryBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object, **__: object) -> None:
        # What obstore 0.12 raises for a full local disk, word for word.
        raise GenericError(
            "Generic LocalFileSystem error: Unable to copy data to file: No space left on device (os error 28)\n\n"
            'Debug source:\nGeneric { source: Os { code: 28, kind: StorageFull, message: "No space left on device" } }'
        )

    monkeypatch.setattr(obstore, "put_async", full)
    with pytest.raises(BlobStoreFull, match=r"No space left on device \(os error 28\)$"):
        await blob_store.store.put(body(b"x"), TEXT)


async def test_a_full_temporary_disk_is_named(blob_store: MemoryBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullFile:
        def write(self, _: bytes) -> int:
            raise OSError(28, "No space left on device")

        def __enter__(self) -> FullFile:
            return self

        def __exit__(self, *_: object) -> None:
            return None

    class Spool:
        def __class_getitem__(cls, _: object) -> type[FullFile]:
            return lambda max_size: FullFile()  # type: ignore[return-value]

    monkeypatch.setattr(store_module, "SpooledTemporaryFile", Spool)
    with pytest.raises(BlobStoreFull, match="No space left"):
        await blob_store.store.put(body(b"x"), TEXT)
    assert blob_store.everything() == []


async def test_any_other_failure_of_the_store_is_retryable(
    blob_store: MemoryBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreachable(*_: object, **__: object) -> None:
        raise GenericError("Generic S3 error: error sending request\n\nDebug source:\n…")

    monkeypatch.setattr(obstore, "put_async", unreachable)
    with pytest.raises(BlobUnavailable, match=r"error sending request$") as failed:
        await blob_store.store.put(body(b"x"), TEXT)
    assert failed.value.retryable
    assert not isinstance(failed.value, BlobStoreFull)


@pytest.mark.parametrize(
    "blob_id",
    [
        "",
        "sha256:",
        "sha256:" + "A" * 64,
        "sha256:" + "a" * 63,
        "sha256:" + "a" * 65,
        "sha256:" + "a" * 64 + "\n",
        "md5:" + "a" * 64,
        "sha256:../../../../../etc/passwd",
        "../" * 20 + "etc/passwd",
    ],
)
async def test_what_is_no_id_never_becomes_a_path(blob_store: MemoryBlobs, blob_id: str) -> None:
    for call in (blob_store.store.open, blob_store.store.head, blob_store.store.lease):
        with pytest.raises(BlobRefused, match="blob id"):
            await call(blob_id)


async def test_an_unknown_blob_is_not_found(blob_store: MemoryBlobs) -> None:
    with pytest.raises(BlobNotFound):
        await blob_store.store.open(blob_id_of(b"nobody"))


async def test_an_expired_blob_is_not_given_out_even_before_the_sweep(blob_store: MemoryBlobs) -> None:
    ref = await blob_store.store.put(body(b"x"), TEXT)
    blob_store.now = 99.0
    assert await content_of(blob_store.store, ref.blob_id) == b"x"
    blob_store.now = 101.0
    with pytest.raises(BlobNotFound):
        await blob_store.store.open(ref.blob_id)


async def test_a_sweep_removes_expired_blobs_and_nothing_else(blob_store: MemoryBlobs) -> None:
    await obstore.put_async(blob_store.objects, "sha256/notes.txt", b"another's")
    await blob_store.store.put(body(b"old"), TEXT)
    assert await blob_store.store.sweep() == 0
    assert await blob_store.store.sweep(time.time() + 101) == 1
    assert blob_store.everything() == ["sha256/notes.txt"]


async def test_a_swept_local_store_leaves_no_empty_directories(local_store: MemoryBlobs) -> None:
    await local_store.store.put(body(b"old"), TEXT)
    assert await local_store.store.sweep(time.time() + 101) == 1
    assert local_store.root is not None
    assert list(local_store.root.iterdir()) == []


async def test_a_blob_put_again_after_the_sweep_listed_it_stays(
    blob_store: MemoryBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = await blob_store.store.put(body(b"renewed"), TEXT)
    real = store_module.listed

    async def stale(objects: MemoryStore, prefix: str) -> AsyncIterator[list[dict[str, object]]]:
        long_ago = datetime.fromtimestamp(0, UTC)
        async for batch in real(objects, prefix):
            yield [{**entry, "last_modified": long_ago} for entry in batch]

    with monkeypatch.context() as patched:
        patched.setattr(store_module, "listed", stale)
        assert await blob_store.store.sweep() == 0
    assert await content_of(blob_store.store, ref.blob_id) == b"renewed"


async def test_a_sweep_removes_the_staged_file_of_a_killed_writer_but_not_one_being_written(
    local_store: MemoryBlobs,
) -> None:
    assert local_store.root is not None
    ref = await local_store.store.put(body(b"x"), TEXT)
    (stored,) = local_store.everything()
    stale, fresh = (local_store.root / f"{stored}#{n}" for n in (1, 2))
    for path in (stale, fresh):
        path.write_bytes(b"half")
    os.utime(stale, (0, time.time() - 7200))
    await local_store.store.sweep()
    assert local_store.everything() == sorted([stored, f"{stored}#2"])
    assert await content_of(local_store.store, ref.blob_id) == b"x"


async def test_bytes_that_rotted_on_the_disk_are_never_given_out_whole(local_store: MemoryBlobs) -> None:
    assert local_store.root is not None
    content = os.urandom(2**20)
    ref = await local_store.store.put(body(content), TEXT)
    (stored,) = local_store.everything()
    (local_store.root / stored).write_bytes(b"!" + content[1:])
    got = b""

    async def read() -> None:
        nonlocal got
        async for chunk in (await local_store.store.open(ref.blob_id)).chunks():
            got += chunk

    with pytest.raises(BlobCorrupt, match="checksum"):
        await read()
    assert 0 < len(got) < len(content)
    await local_store.store.put(body(content), TEXT)
    assert await content_of(local_store.store, ref.blob_id) == content


async def test_settings_choose_the_backend(tmp_path: Path) -> None:
    here, there = tmp_path / "a" / "b", tmp_path / "c"
    for url, root in ((None, here), (f"file://{there}", there), ("memory://", None)):
        store = create(BlobSettings(url=url), opened(url, here))
        await store.check()
        await store.put(body(b"x"), TEXT)
        assert root is None or any(path.is_file() for path in root.rglob("*"))


@pytest.mark.parametrize("url", ["nonsense", "ftp://host/x", "file:///proc/none/blobs", "s3:"])
def test_an_unusable_url_is_a_settings_error(url: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"blobs\.url"):
        opened(url, tmp_path)
