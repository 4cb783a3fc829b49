"""The heads of answers are bounded, also of those that come through a proxy of the environment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from tokenbus_services.net.connection import MAX_HEADERS, HeadRefused
from tokenbus_services.net.http_client import BoundedClient


@pytest.fixture
async def proxy() -> AsyncIterator[str]:
    """The url of a proxy that answers for everybody; with many headers where "many" is asked for."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        headers = b"x: y\r\n" * (MAX_HEADERS + 1) if b"many" in head else b""
        if head.startswith(b"GET http://"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n" + headers + b"\r\nok")
        else:
            writer.write(b"HTTP/1.1 502 No\r\n" + headers + b"\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://user:pass@127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_the_head_of_an_answer_through_a_proxy_is_bounded(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.setenv("https_proxy", proxy)
    async with BoundedClient() as client:
        assert (await client.get("http://provider.invalid/few")).text == "ok"
        for url in ("http://provider.invalid/many", "https://many.invalid/"):
            with pytest.raises(httpx.RemoteProtocolError) as caught:
                await client.get(url)
            assert isinstance(caught.value.__cause__, HeadRefused)
