"""The proxies of the environment, HTTP and SOCKS 5; the heads of what comes through them are bounded, too."""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode
from collections.abc import AsyncGenerator
from contextlib import suppress

import httpx
import pytest
import trustme

from tests.waiting import eventually
from tokenbus_services.net.http_client import MAX_HEADERS, Client, HeadRefused, Transport

AUTHORITY = trustme.CA()
AUTH = b64encode(b"user:pass").decode()


class Proxy:
    """Answers for everybody; with many headers where "many" is asked for. A tunnel ends at a server that speaks TLS."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.port = self.tls_port = self.serving = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.serving += 1
        try:
            await self._serve(reader, writer)
        finally:
            writer.close()
            self.serving -= 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (first := await reader.read(1)) == b"\x05":
            await self._socks(reader, writer)
            return
        head = first + await reader.readuntil(b"\r\n\r\n")
        self.asked.append(head.decode())
        headers = b"x: y\r\n" * (MAX_HEADERS + 1) if b"many" in head else b""
        if head.startswith(b"GET http://"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n" + headers + b"\r\nok")
        elif b"tunnel" in head:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            await self._relay(reader, writer)
        else:
            writer.write(b"HTTP/1.1 502 No\r\n" + headers + b"\r\n")
        await writer.drain()

    async def _socks(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (ways,) = await reader.readexactly(1)
        (way,) = await reader.readexactly(ways)
        writer.write(bytes((5, way)))
        if way == 2:
            (_, size) = await reader.readexactly(2)
            name = await reader.readexactly(size)
            password = await reader.readexactly((await reader.readexactly(1))[0])
            self.asked.append(f"{name.decode()}:{password.decode()}")
            writer.write(bytes((1, password != b"pass")))
        (_, _, _, _, size) = await reader.readexactly(5)
        self.asked.append((await reader.readexactly(size)).decode())
        await reader.readexactly(2)
        if self.asked[-1] == "unknown.invalid":
            writer.write(b"\x05\x04\x00\x01" + bytes(6))
        elif self.asked[-1] == "tunnel.invalid":
            writer.write(b"\x05\x00\x00\x03\x01x\x00\x00")
            await self._relay(reader, writer)
        else:
            writer.write(b"\x05\x00\x00\x01" + bytes(6))
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there = await asyncio.open_connection("127.0.0.1", self.tls_port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                while data := await source.read(65536):
                    sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, there), pump(there_reader, writer))


async def _secret(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\nconnection: close\r\n\r\nsecret")
    await writer.drain()
    writer.close()


@pytest.fixture
async def proxy(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Proxy]:
    for name in ("no_proxy", "all_proxy", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    made = Proxy()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    AUTHORITY.issue_cert("tunnel.invalid").configure_cert(context)
    async with (
        await asyncio.start_server(made.serve, "127.0.0.1", 0) as listening,
        await asyncio.start_server(_secret, "127.0.0.1", 0, ssl=context) as secret,
    ):
        made.port = listening.sockets[0].getsockname()[1]
        made.tls_port = secret.sockets[0].getsockname()[1]
        yield made
        await eventually(lambda: not made.serving)


def _client() -> Client:
    context = ssl.create_default_context()
    AUTHORITY.configure_trust(context)
    return Client(Transport(context, environment=True))


async def test_the_head_of_an_answer_through_a_proxy_is_bounded(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://user:pass@127.0.0.1:{proxy.port}")
    monkeypatch.setenv("https_proxy", f"user:pass@127.0.0.1:{proxy.port}")
    async with _client() as client:
        assert (await client.get("http://provider.invalid/few?x=1")).text == "ok"
        for url in ("http://provider.invalid/many", "https://many.invalid/"):
            with pytest.raises(HeadRefused):
                await client.get(url)
        with pytest.raises(httpx.ProxyError, match="502 No"):
            await client.get("https://provider.invalid/")
    assert [asked.partition("\r\n")[0] for asked in proxy.asked] == [
        "GET http://provider.invalid/few?x=1 HTTP/1.1",
        "GET http://provider.invalid/many HTTP/1.1",
        "CONNECT many.invalid:443 HTTP/1.1",
        "CONNECT provider.invalid:443 HTTP/1.1",
    ]
    assert all(f"Proxy-Authorization: Basic {AUTH}\r\n" in asked for asked in proxy.asked)


@pytest.mark.parametrize("scheme", ["http", "socks5", "socks5h"])
async def test_tls_goes_through_a_proxy_to_the_host_itself(
    proxy: Proxy, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("all_proxy", f"{scheme}://127.0.0.1:{proxy.port}")
    async with _client() as client:
        assert (await client.get("https://tunnel.invalid/")).text == "secret"
    assert "tunnel.invalid" in proxy.asked[-1]


async def test_a_socks_proxy_resolves_names_and_may_want_a_password(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("all_proxy", f"socks5://user:pass@127.0.0.1:{proxy.port}")
    async with _client() as client:
        assert (await client.get("http://provider.invalid/")).text == "ok"
        with pytest.raises(httpx.ProxyError, match="SOCKS error 4"):
            await client.get("http://unknown.invalid/")
    assert proxy.asked == ["user:pass", "provider.invalid", "user:pass", "unknown.invalid"]
    monkeypatch.setenv("all_proxy", f"socks5://user:wrong@127.0.0.1:{proxy.port}")
    async with _client() as client:
        with pytest.raises(httpx.ProxyError, match="refuses"):
            await client.get("http://provider.invalid/")


async def test_no_proxy_names_hosts_that_are_reached_directly(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("no_proxy", "other.invalid,127.0.0.1")
    async with _client() as client:
        answer = await client.get(f"http://127.0.0.1:{proxy.port}/", headers={"x": "direct"})
        assert answer.status_code == 502
    assert proxy.asked[-1].startswith("GET / HTTP/1.1")
