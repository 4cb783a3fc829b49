"""Sending a request with blobs to the provider: the attempt learns every outcome, and no reader stays open."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.services.fetcher.blob_store import MemoryBlobs
from tests.waiting import eventually
from tokenbus.errors import BlobError, BlobUnavailable
from tokenbus.events.frames import Data, Ended, Opened
from tokenbus.events.requests import BlobSource, Generate, ImagePart, Message
from tokenbus_services.endpoints.endpoint import Endpoint
from tokenbus_services.fetcher.calls.provider_call import fetch
from tokenbus_services.fetcher.request_media import TurnMedia
from tokenbus_services.media.blob_cache import RecentBlobs
from tokenbus_services.settings import ProviderSettings

LARGE = bytes(range(256)) * 1000


class Written:
    """In place of the attempt's writer."""

    must_wait = False

    def __init__(self) -> None:
        self.items: list[Any] = []

    def write_item(self, item: Any, *, urgent: bool = False) -> None:
        self.items.append(item)

    async def write(self, item: Any, *, urgent: bool = False) -> None:
        self.write_item(item)

    async def end(self, item: Ended) -> None:
        self.items.append(item)


class Provider:
    """A socket that reads a request of JSON to its end, and answers."""

    def __init__(self) -> None:
        self.received = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not self.received.endswith(b"}") and (read := await reader.read(2**16)):
            self.received += read
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\ndata: {}\n\n")
        writer.close()


@asynccontextmanager
async def calling(blob_store: MemoryBlobs) -> AsyncIterator[tuple[Provider, Written, asyncio.Task[None]]]:
    """The call of a request with one large blob, under way."""
    provider, writer = Provider(), Written()
    listener = await asyncio.start_server(provider.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    settings = ProviderSettings(api="gemini", base_url=f"http://127.0.0.1:{port}", api_key_env="")
    endpoint = Endpoint("p", settings, {})
    image = ImagePart(source=BlobSource(blob_id=blob_store.put(LARGE, "image/png"), media_type="image/png"))
    request = Generate(provider="p", model="m", messages=[Message(role="user", content=[image])])
    built, body = await TurnMedia(RecentBlobs(blob_store, 0)).build(endpoint, request, [])
    stand_in: Any = writer
    task = asyncio.create_task(fetch(endpoint, request, built.call, body, writer=stand_in, deadline=None))
    try:
        yield provider, writer, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await endpoint.close()
        listener.close()


class Stopping(MemoryBlobs):
    """Gives the beginning of a blob; then it breaks off, or nothing more comes."""

    def __init__(self, failure: BlobError | None = None) -> None:
        super().__init__()
        self._breaks_off = failure

    async def chunks(self, blob_id: str) -> AsyncGenerator[bytes]:
        self.open_readers += 1
        try:
            yield LARGE[:1000]
            if self._breaks_off:
                raise self._breaks_off
            await asyncio.Event().wait()
        finally:
            self.open_readers -= 1


async def test_the_length_is_sent_and_the_whole_body_arrives() -> None:
    blob_store = MemoryBlobs()
    async with calling(blob_store) as (provider, writer, task):
        await task
    head, _, body = provider.received.partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(body) in head.lower() + b"\r\n"
    assert b"transfer-encoding" not in head.lower()
    assert b64encode(LARGE) in body
    assert [type(item) for item in writer.items] == [Opened, Data, Ended]
    assert writer.items[-1].error is None


async def test_a_store_that_breaks_off_in_the_middle_ends_the_attempt_with_its_error() -> None:
    blob_store = Stopping(BlobUnavailable("blobs", "broke off"))
    async with calling(blob_store) as (provider, writer, task):
        await task
    [ended] = writer.items
    assert (ended.error.code, ended.error.retryable) == ("blob_unavailable", True)
    assert ended.error.where == "messages[0].content[0]"
    assert not provider.received.endswith(b"}")
    assert blob_store.open_readers == 0


async def test_a_call_that_is_stopped_in_the_middle_closes_its_reader() -> None:
    blob_store = Stopping()
    async with calling(blob_store) as (provider, _, task):
        await eventually(lambda: b64encode(LARGE[:999]) in provider.received)
        assert blob_store.open_readers == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert blob_store.open_readers == 0
