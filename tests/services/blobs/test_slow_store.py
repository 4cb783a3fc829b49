"""A blob service that hangs or drips is waited for in all, and not for each of its bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tokenbus.blobs import blob_id_of
from tokenbus.errors import BlobUnavailable
from tokenbus_services.blobs import client
from tokenbus_services.blobs.client import HttpBlobs

BLOB = blob_id_of(b"x" * 1000)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 1000\r\n\r\n"


@asynccontextmanager
async def slow_store(pieces: list[bytes]) -> AsyncGenerator[HttpBlobs]:
    """A service that answers a request with these pieces, a moment between them, and never ends."""
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        serving.add(task)
        try:
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01)
            await reader.read()
        except ConnectionError:
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with listener, HttpBlobs(url) as blobs:
        yield blobs
    await asyncio.gather(*serving)


async def read_all(blobs: HttpBlobs) -> None:
    async for _ in blobs.chunks(BLOB):
        pass


CALLS: dict[str, Callable[[HttpBlobs], Awaitable[object]]] = {
    "load": lambda blobs: blobs.load(BLOB),
    "chunks": read_all,
    "head": lambda blobs: blobs.head(BLOB),
    "lease": lambda blobs: blobs.lease(BLOB),
    "store": lambda blobs: blobs.store(b"content", "text/plain"),
}


@pytest.mark.parametrize("drip", [b"", HEAD[:20], HEAD + b"x" * 1000], ids=["hangs", "in the head", "in the body"])
@pytest.mark.parametrize("call", CALLS)
async def test_a_store_that_hangs_or_drips_is_unavailable_after_the_total_bound(
    call: str, drip: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "WAIT_S", 0.3)
    if call == "head":
        drip = drip[:20]  # its answer has no body
    async with slow_store([drip[n : n + 1] for n in range(len(drip))]) as blobs:
        with pytest.raises(BlobUnavailable):
            await CALLS[call](blobs)


async def test_time_in_which_the_reader_of_a_blob_does_other_things_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "WAIT_S", 2.0)
    content = b"x" * 1000
    async with slow_store([HEAD, content[:500], content[500:]]) as blobs:
        read = b""
        async for chunk in blobs.chunks(BLOB):
            read += chunk
            await asyncio.sleep(1.2)
    assert read == content
