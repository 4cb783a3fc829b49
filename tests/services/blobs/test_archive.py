"""The archive on each backend: once, whole, sealed, swept, and gone for good."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from obstore.store import MemoryStore

from tests.services.blobs.conftest import MemoryBlobs
from tokenbus.blobs import blob_id_of
from tokenbus.errors import BlobCorrupt, BlobNotFound, BlobRefused, BlobUnavailable, SettingsError
from tokenbus.events.run_info import RunInfo
from tokenbus_services.blobs.archive import Archive, Wanted
from tokenbus_services.blobs.archive_format import PIECE_BYTES, Reader, Writer, key_id
from tokenbus_services.blobs.archive_keys import TenantKeys

DAY_MS = 86_400_000
NOW_MS = 20_000 * DAY_MS + 1000
KEY = b"k" * 32


def info(run: str, ended_ms: int = NOW_MS, tenant: str | None = None, events: int = 3) -> RunInfo:
    return RunInfo(
        run=run, state="completed", accepted_ms=ended_ms - 5, ended_ms=ended_ms, tenant=tenant, events=events
    )


async def lines(about: RunInfo, *more: bytes) -> AsyncIterator[bytes]:
    yield msgspec.json.encode(about) + b"\n"
    for piece in more:
        yield piece


async def read(archive: Archive, run: str) -> bytes:
    _, pieces = await archive.open(run)
    return b"".join([piece async for piece in pieces])


def archive_in(backend: MemoryBlobs, keys: Path | None = None) -> Archive:
    return Archive(
        backend.objects,
        backend.store,
        TenantKeys(keys),
        keep_s=10 * 86_400,
        keep_tenants_s={"brief": 86_400},
        clock=lambda: NOW_MS / 1000 + backend.now,
    )


def test_pieces_that_were_changed_moved_cut_or_taken_from_another_object_are_refused() -> None:
    writer = Writer("name", KEY)
    first, second = writer.piece(b"one", last=False), writer.piece(b"two", last=True)
    whole = writer.head + first + second
    keys = {key_id(KEY): KEY}
    reader = Reader("name", lambda: keys)
    assert [piece for n in range(len(whole)) for piece in reader.feed(whole[n : n + 1])] == [b"one", b"two"]
    assert reader.ended
    for broken in (
        writer.head + second + first,
        writer.head + first[:-1] + bytes([first[-1] ^ 1]) + second,
        writer.head + second,
        writer.head + b"\1" + first[1:],
    ):
        with pytest.raises(BlobCorrupt):
            list(Reader("name", lambda: keys).feed(broken))
    with pytest.raises(BlobCorrupt):
        list(Reader("another", lambda: keys).feed(whole))
    with pytest.raises(BlobNotFound):
        list(Reader("name", dict).feed(whole))
    cut = Reader("name", lambda: keys)
    assert list(cut.feed(writer.head + first)) == [b"one"]
    assert not cut.ended


@pytest.mark.asyncio
async def test_a_log_is_stored_once_and_read_whole(blob_store: MemoryBlobs) -> None:
    archive = archive_in(blob_store)
    body = b"".join(b'{"seq":%d,"text":"%d"}\n' % (n, n * n) for n in range(20_000))
    assert len(body) > 4 * PIECE_BYTES
    parts = [body[at : at + 100_001] for at in range(0, len(body), 100_001)]
    for _ in range(2):  # the second one as after a recorder that was killed before its note
        assert await archive.put(lines(info("run"), *parts)) == info("run")
    assert await read(archive, "run") == body
    assert await archive.list(Wanted()) == ([info("run")], None)
    assert len([path for path in blob_store.everything() if "archive/" in path]) == 2
    with pytest.raises(BlobNotFound):
        await archive.open("another")
    with pytest.raises(BlobRefused):
        await archive.open("../logs")


@pytest.mark.asyncio
async def test_what_is_no_log_stores_nothing(blob_store: MemoryBlobs) -> None:
    archive = archive_in(blob_store)

    async def cut() -> AsyncIterator[bytes]:
        yield msgspec.json.encode(info("run")) + b"\n"
        raise ConnectionError

    async def junk(first: bytes) -> AsyncIterator[bytes]:
        yield first

    with pytest.raises(ConnectionError):
        await archive.put(cut())
    open_run = msgspec.structs.replace(info("run"), ended_ms=None)
    for first in (b"", b"junk\n", b"x" * 200_000, msgspec.json.encode(open_run), msgspec.json.encode(info("a/../b"))):
        with pytest.raises(BlobRefused):
            await archive.put(junk(first))
    assert not [path for path in blob_store.everything() if "archive/" in path]


@pytest.mark.asyncio
async def test_lists_are_in_the_order_of_time_by_tenant_and_in_pages(blob_store: MemoryBlobs) -> None:
    archive = archive_in(blob_store)
    made = [info(f"r{n}", NOW_MS - (n // 2) * DAY_MS // 2, "acme" if n % 2 else None) for n in range(9)]
    for each in made:
        await archive.put(lines(each))
    day_before = NOW_MS - DAY_MS
    newest = sorted(made, key=lambda each: (each.at_ms, each.run), reverse=True)
    for wanted, expected in (
        (Wanted(), newest),
        (Wanted(newest_first=False), newest[::-1]),
        (Wanted(tenant="acme"), [each for each in newest if each.tenant]),
        (Wanted(since_ms=day_before, until_ms=NOW_MS - 1), [e for e in newest if day_before <= e.at_ms < NOW_MS]),
    ):
        found: list[RunInfo] = []
        after = wanted.after
        while True:
            page, after = await archive.list(msgspec.structs.replace(wanted, after=after), limit=2)
            found += page
            if after is None:
                break
        assert found == expected


@pytest.mark.asyncio
async def test_an_erased_run_stays_erased_and_blobs_of_others_are_not_named(blob_store: MemoryBlobs) -> None:
    archive = archive_in(blob_store)
    shared, own = blob_id_of(b"shared"), blob_id_of(b"own")
    padding = b"x" * (PIECE_BYTES - 40)  # the id lies across two pieces
    await archive.put(lines(info("ours"), padding, f'"{own}" "{shared}"'.encode()))
    await archive.put(lines(info("theirs"), shared.encode()))
    assert await archive.names(own)
    assert await archive.delete("ours") == (1, {own})
    assert await archive.delete("ours") == (0, set())
    assert not await archive.names(own)
    assert await archive.names(shared)
    with pytest.raises(BlobRefused):  # of a recorder that had it in hand
        await archive.put(lines(info("ours")))
    assert await archive.list(Wanted()) == ([info("theirs")], None)


@pytest.mark.asyncio
async def test_the_sweep_removes_what_was_kept_for_its_time(blob_store: MemoryBlobs) -> None:
    archive = archive_in(blob_store)
    blob = blob_id_of(b"blob")
    await archive.put(lines(info("short", tenant="brief"), blob.encode()))
    await archive.put(lines(info("long")))
    assert await archive.sweep() == 0
    blob_store.now = 86_400
    assert await archive.sweep() == 1
    assert not await archive.names(blob)
    assert await archive.list(Wanted()) == ([info("long")], None)
    blob_store.now = 10 * 86_400
    assert await archive.sweep() == 1
    assert not [path for path in blob_store.everything() if "archive/" in path]


@pytest.mark.asyncio
async def test_a_key_that_cannot_be_used_stores_nothing_in_clear(tmp_path: Path) -> None:
    archive = archive_in(MemoryBlobs(MemoryStore(), None), tmp_path)
    key = tmp_path / "acme.key"
    key.write_bytes(b"short")
    with pytest.raises(BlobUnavailable):
        await archive.put(lines(info("run", tenant="acme"), b"secret"))
    with pytest.raises(SettingsError):
        TenantKeys(tmp_path)
    with pytest.raises(SettingsError):
        TenantKeys(tmp_path / "missing")
    key.write_bytes(KEY)
    await archive.put(lines(info("run", tenant="acme"), b"secret"))
    await archive.put(lines(info("clear", tenant="other"), b"open"))
    assert await read(archive, "run") == b"secret"
    key.unlink()
    with pytest.raises(BlobNotFound):
        await archive.open("run")
    assert await archive.list(Wanted()) == ([info("clear", tenant="other")], None)
    assert await archive.delete_all(Wanted(tenant="acme")) == 1
    assert await archive.delete_all(Wanted(tenant="acme")) == 0
