"""Calls share idle connections; a request is whole, or its connection ends."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator

import httpx
import pytest

from tests.waiting import eventually
from tokenbus_services.net import http_client
from tokenbus_services.net.http_client import Client, Transport


class Server:
    """Says `respond` to each request, or echoes its path."""

    def __init__(self) -> None:
        self.connections = self.lost = 0
        self.respond = b""
        self.received = b""
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.received += head
                path = head.split()[1]
                writer.write(self.respond or b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(path), path))
        except (asyncio.IncompleteReadError, OSError):
            self.lost += 1
            writer.close()


@pytest.fixture
async def server() -> AsyncGenerator[Server]:
    made = Server()
    async with await asyncio.start_server(made.serve, "127.0.0.1", 0) as listening:
        made.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        yield made


@pytest.fixture
async def client() -> AsyncGenerator[Client]:
    async with Client(Transport()) as made:
        yield made


async def test_calls_at_once_have_connections_of_their_own_and_later_calls_share_them(
    server: Server, client: Client
) -> None:
    for _ in range(2):
        answers = [await client.send(client.build_request("GET", f"{server.url}/{n}"), stream=True) for n in range(3)]
        assert [await answer.aread() for answer in answers] == [b"/0", b"/1", b"/2"]
    assert server.connections == 3
    assert server.lost == 0


async def test_a_call_that_is_left_in_the_middle_closes_its_connection(server: Server, client: Client) -> None:
    server.respond = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf"
    async with client.stream("GET", server.url) as answer:
        assert await anext(answer.aiter_raw()) == b"half"
    await eventually(lambda: server.lost == 1)


async def test_an_idle_connection_is_closed_after_a_while(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "KEPT_S", 0.01)
    await client.get(server.url)
    await eventually(lambda: server.lost == 1)
    await client.get(server.url)
    assert server.connections == 2


@pytest.mark.parametrize("how", ["a second answer", "connection: close", "until its end", "nonsense"])
async def test_a_connection_whose_answer_does_not_end_alone_is_not_used_again(
    server: Server, client: Client, how: str
) -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    server.respond = {
        "a second answer": answer * 2,
        "connection: close": answer.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"),
        "until its end": answer.replace(b"HTTP/1.1", b"HTTP/1.0"),
        "nonsense": answer + b"nonsense",
    }[how]
    for _ in range(2):
        assert (await client.get(server.url)).content == b"ok"
    assert server.connections == 2


@pytest.mark.parametrize("status", ["204 No", "304 Not"])
async def test_an_answer_without_a_body_leaves_its_connection(server: Server, client: Client, status: str) -> None:
    server.respond = b"HTTP/1.1 %b\r\netag: x\r\n\r\n" % status.encode()
    for _ in range(2):
        assert (await client.get(server.url)).content == b""
    server.respond = b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n"
    for _ in range(2):
        assert (await client.head(server.url)).headers["content-length"] == "1000"
    assert server.connections == 1


async def test_a_header_cannot_end_a_head(server: Server, client: Client) -> None:
    for headers in ({"x": "a\r\nb: c"}, {"x\r\nb": "c"}, {"x": "a\0"}):
        with pytest.raises(httpx.LocalProtocolError) as caught:
            await client.get(server.url, headers=headers)
        assert "b" not in str(caught.value).removeprefix("Illegal header value")
    with pytest.raises(httpx.LocalProtocolError):
        await client.request("GET / HTTP/1.1\r\nx:", server.url)
    assert server.connections == 0


@pytest.mark.parametrize("size", [3, 5])
async def test_a_body_of_another_size_than_its_header_says_is_an_error(
    server: Server, client: Client, size: int
) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"abcd"

    with pytest.raises(httpx.LocalProtocolError, match="data for declared Content-Length"):
        await client.post(server.url, content=body(), headers={"content-length": str(size)})
    await eventually(lambda: server.connections == server.lost)


async def test_a_body_without_a_size_is_sent_in_chunks(client: Client) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"ab"
        yield b""
        yield b"cde"

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        sent = await reader.readuntil(b"0\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(sent), sent))
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        answer = await client.post(url, content=body())
    assert answer.content == b"2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n"


async def test_a_transport_that_is_closed_closes_its_connections(server: Server) -> None:
    transport = Transport()
    async with Client(transport) as client:
        await client.get(server.url)
        server.respond = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n"
        await client.send(client.build_request("GET", server.url), stream=True)
    await eventually(lambda: server.lost == server.connections)


async def test_other_schemes_are_not_supported(client: Client) -> None:
    with pytest.raises(httpx.UnsupportedProtocol):
        await client.get("ftp://127.0.0.1/")


def test_the_authorities_are_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[ssl.SSLContext] = []

    def load() -> ssl.SSLContext:
        loaded.append(ssl.create_default_context())
        return loaded[-1]

    monkeypatch.setattr(httpx, "create_ssl_context", load)
    monkeypatch.setenv("SSL_CERT_FILE", "/elsewhere")
    assert http_client.trust() is http_client.trust()
    monkeypatch.setenv("SSL_CERT_FILE", "/another")
    assert http_client.trust() is loaded[-1]
    assert len(loaded) == 2
