"""Any behaviour of a peer gives the same errors and the same bytes as httpx's own transport."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
import trustme
import uvloop

from tests.waiting import eventually
from tokenbus_services.net.connection import READ_AHEAD_BYTES
from tokenbus_services.net.http_client import Transport

Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n"
AUTHORITY = trustme.CA()


def _trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    AUTHORITY.configure_trust(context)
    return context


def _ours(context: ssl.SSLContext) -> httpx.AsyncBaseTransport:
    return Transport(context)


def _httpx(context: ssl.SSLContext) -> httpx.AsyncBaseTransport:
    return httpx.AsyncHTTPTransport(verify=context)


@asynccontextmanager
async def _listening(peer: Peer, **options: object) -> AsyncIterator[int]:
    """A server; the connections of a test end with it."""
    open_ones: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ones.add(writer)
        try:
            await peer(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, **options)  # pyright: ignore[reportArgumentType]
    async with server:
        yield server.sockets[0].getsockname()[1]
        for writer in open_ones:
            writer.close()


def _says(*pieces: bytes, then: str = "close") -> Peer:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)  # so that the pieces come in reads of their own, mostly
        if then == "reset":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        elif then == "hold":
            await reader.read()

    return peer


async def _outcome(
    make: Callable[[ssl.SSLContext], httpx.AsyncBaseTransport], url: str, *, timeout: httpx.Timeout | None = None
) -> tuple[bytes, object]:
    """The body that came, and its end: the status, or the type of the error."""
    got = b""
    timeout = timeout or httpx.Timeout(20.0)
    async with httpx.AsyncClient(transport=make(_trusting()), timeout=timeout, trust_env=False) as client:
        try:
            async with client.stream("GET", url) as response:
                async for piece in response.aiter_raw():
                    got += piece
            return got, response.status_code
        except httpx.HTTPError as e:
            return got, type(e)


BODIES: dict[str, tuple[tuple[bytes, ...], str]] = {
    "chunks in one packet": ((CHUNKED + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",), "close"),
    "chunks cut anywhere": ((CHUNKED[:30], CHUNKED[30:] + b"3", b"\r\na", b"bc\r", b"\n0\r", b"\n\r\n"), "close"),
    "an extension of a chunk": ((CHUNKED + b"3;a=b\r\nabc\r\n0\r\n\r\n",), "close"),
    "an extension later on": ((CHUNKED + b"2\r\nxy\r\n3;a=b\r\nabc\r\n0\r\n\r\n",), "close"),
    "trailers": ((CHUNKED + b"3\r\nabc\r\n0\r\nx: y\r\n\r\n",), "close"),
    "no content": ((CHUNKED + b"0\r\n\r\n",), "close"),
    "a size that is none": ((CHUNKED, b"3\r\nabc\r\nxyz\r\nabc\r\n"), "close"),
    "a size without end": ((CHUNKED, b"3\r\nabc\r\n" + b"1" * 40), "close"),
    "a malformed footer": ((CHUNKED, b"3\r\nabcd\r\n0\r\n\r\n"), "close"),
    "an end in a chunk": ((CHUNKED, b"5\r\nabc"), "close"),
    "an end in a footer": ((CHUNKED, b"3\r\nabc\r"), "close"),
    "an end between chunks": ((CHUNKED, b"3\r\nabc\r\n"), "close"),
    "an end in a size": ((CHUNKED, b"3\r\nabc\r\n1"), "close"),
    "an end in the last chunk": ((CHUNKED, b"3\r\nabc\r\n0\r\n"), "close"),
    "a reset in a chunk": ((CHUNKED, b"5\r\nabc"), "reset"),
    "more than the body": ((CHUNKED, b"3\r\nabc\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n"), "close"),
    "interim answers": ((b"HTTP/1.1 103 Early Hints\r\n\r\n" + CHUNKED + b"1\r\na\r\n0\r\n\r\n",), "close"),
    "a length": ((SIZED + b"0123456789",), "close"),
    "less than the length": ((SIZED + b"01234",), "close"),
    "a reset before the length": ((SIZED + b"01234",), "reset"),
    "until it closes": ((b"HTTP/1.1 200 OK\r\n\r\nabc", b"def"), "close"),
    "two codings": ((b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",), "close"),
    "chunked in capitals": ((CHUNKED.replace(b"chunked", b"Chunked") + b"1\r\na\r\n0\r\n\r\n",), "close"),
    "no body by its status": ((CHUNKED.replace(b"200 OK", b"204 No"),), "close"),
    "no answer": ((), "close"),
    "a reset before the answer": ((), "reset"),
    "an end in the head": ((CHUNKED[:20],), "close"),
    "no HTTP": ((b"220 mail.example ESMTP\r\n\r\n",), "close"),
    "bare line ends": ((CHUNKED.replace(b"\r\n", b"\n") + b"3\nabc\n0\n\n",), "close"),
}


@pytest.mark.parametrize("name", BODIES)
async def test_an_answer_ends_as_it_does_over_httpx(name: str) -> None:
    pieces, then = BODIES[name]
    async with _listening(_says(*pieces, then=then)) as port:
        ours, theirs = [await _outcome(make, f"http://127.0.0.1:{port}/") for make in (_ours, _httpx)]
    if then == "reset":  # how much came before it is chance
        assert ours[1] == theirs[1]
    else:
        assert ours == theirs


async def test_chunks_that_come_together_are_one_piece() -> None:
    async with (
        _listening(_says(CHUNKED + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")) as port,
        httpx.AsyncClient(transport=_ours(_trusting()), trust_env=False) as client,
        client.stream("GET", f"http://127.0.0.1:{port}/") as response,
    ):
        assert [piece async for piece in response.aiter_raw()] == [b"abcde"]


@pytest.mark.parametrize("pieces", [(), (CHUNKED[:20],), (CHUNKED, b"3\r\nabc\r\n"), (SIZED, b"01")])
async def test_a_silent_peer_is_a_read_timeout(pieces: tuple[bytes, ...]) -> None:
    timeout = httpx.Timeout(20.0, read=0.05)
    async with _listening(_says(*pieces, then="hold")) as port:
        _, ours = await _outcome(_ours, f"http://127.0.0.1:{port}/", timeout=timeout)
    assert ours is httpx.ReadTimeout


async def test_a_refused_connection_reveals_no_address() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        async with httpx.AsyncClient(transport=_ours(_trusting()), trust_env=False) as client:
            with pytest.raises(httpx.ConnectError) as caught:
                await client.get(url)
    assert "refused" in str(caught.value)
    assert "127.0.0.1" not in str(caught.value)


async def test_a_peer_that_takes_no_connection_is_a_connect_timeout() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        filling = [socket.socket() for _ in range(4)]
        for sock in filling:
            sock.setblocking(False)
            sock.connect_ex(address)
        timeout = httpx.Timeout(20.0, connect=0.05)
        _, ours = await _outcome(_ours, f"http://127.0.0.1:{address[1]}/", timeout=timeout)
        for sock in filling:
            sock.close()
    assert ours is httpx.ConnectTimeout


async def test_a_connection_is_used_again_unless_its_peer_closed_it() -> None:
    connections = 0

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        for _ in range(2):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(CHUNKED + b"1\r\na\r\n0\r\n\r\n")
        await writer.drain()

    async with (
        _listening(peer) as port,
        httpx.AsyncClient(transport=(transport := Transport(_trusting())), trust_env=False) as client,
    ):
        for n in range(4):
            response = await client.get(f"http://127.0.0.1:{port}/")
            assert response.text == "a"
            if n % 2:  # the connection ends some time after the answer
                await eventually(lambda: not any(connection.is_silent for connection in transport.connections))
    assert connections == 2


async def test_an_early_refusal_of_a_large_body_is_read() -> None:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 No\r\ncontent-length: 2\r\n\r\nno")
        writer.write_eof()
        await reader.read()

    async def body() -> AsyncGenerator[bytes]:
        for _ in range(64):
            yield b"x" * 65536

    async with (
        _listening(peer) as port,
        httpx.AsyncClient(transport=_ours(_trusting()), trust_env=False) as client,
    ):
        response = await client.post(f"http://127.0.0.1:{port}/", content=body())
    assert (response.status_code, response.text) == (413, "no")


@pytest.mark.parametrize("then", ["hold", "close"])
async def test_a_peer_that_takes_no_body_fails_the_writing(then: str) -> None:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if then == "hold":
            await asyncio.Event().wait()

    async def body() -> AsyncGenerator[bytes]:
        for _ in range(64):
            yield b"x" * 2**20

    async with _listening(peer, limit=1024) as port:
        outcomes: list[type[Exception]] = []
        for make in (_ours, _httpx):
            timeout = httpx.Timeout(20.0, write=0.1)
            async with httpx.AsyncClient(transport=make(_trusting()), timeout=timeout, trust_env=False) as client:
                with pytest.raises(httpx.TransportError) as caught:
                    await client.post(f"http://127.0.0.1:{port}/", content=body())
                outcomes.append(caught.type)
    if then == "hold":
        assert outcomes == [httpx.WriteTimeout] * 2
    else:  # the reset comes with the next write, or with the reading of the answer
        assert {*outcomes} <= {httpx.ReadError, httpx.RemoteProtocolError}


async def test_an_unread_body_waits_in_the_socket_buffers() -> None:
    writers: list[asyncio.StreamWriter] = []
    size = 64 * 2**20

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writers.append(writer)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (size, bytes(size)))
        await writer.drain()
        await reader.read()

    async with (
        _listening(peer) as port,
        httpx.AsyncClient(transport=(transport := Transport(_trusting())), trust_env=False) as client,
        client.stream("GET", f"http://127.0.0.1:{port}/") as response,
    ):
        (connection,) = transport.connections
        await eventually(lambda: connection.waiting_bytes > 0)
        for _ in range(100):
            await asyncio.sleep(0)  # let the loop read everything that it would still read
        assert connection.waiting_bytes <= READ_AHEAD_BYTES + 2**18
        assert writers[0].transport.get_write_buffer_size() > size // 2  # pyright: ignore[reportAttributeAccessIssue]
        assert sum([len(piece) async for piece in response.aiter_raw()]) == size


TLS = ["trusted", "misnamed", "unknown", "none", "closed"]


@pytest.mark.parametrize("tls", TLS)
async def test_tls_is_checked_and_its_failures_are_connect_errors(tls: str) -> None:
    context = None
    if tls in ("trusted", "misnamed", "unknown"):
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority = trustme.CA() if tls == "unknown" else AUTHORITY
        name = "elsewhere.example" if tls == "misnamed" else "127.0.0.1"
        authority.issue_cert(name).configure_cert(context)

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        if tls == "none":
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    peer = _says(CHUNKED + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n") if context else plain
    async with _listening(peer, ssl=context) as port:
        ours, theirs = [await _outcome(make, f"https://127.0.0.1:{port}/") for make in (_ours, _httpx)]
    assert ours == theirs
    assert ours == ((b"abcde", 200) if tls == "trusted" else (b"", httpx.ConnectError))


@pytest.mark.parametrize("then", ["close", "reset", "hold"])
async def test_a_body_over_tls_that_breaks_off_is_an_error(then: str) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    AUTHORITY.issue_cert("127.0.0.1").configure_cert(context)
    async with _listening(_says(CHUNKED, b"3\r\nabc\r\n", then=then), ssl=context) as port:
        got, error = await _outcome(_ours, f"https://127.0.0.1:{port}/", timeout=httpx.Timeout(20.0, read=0.2))
    wanted = {"close": httpx.RemoteProtocolError, "hold": httpx.ReadTimeout}
    assert got == b"abc"
    if then == "reset":
        assert error in (httpx.ReadError, httpx.RemoteProtocolError)
    else:
        assert error is wanted[then]


def test_the_same_holds_over_uvloop() -> None:
    """Which the workers use; the tests above run over asyncio's own loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for name in BODIES:
            runner.run(test_an_answer_ends_as_it_does_over_httpx(name))
        for tls in TLS:
            runner.run(test_tls_is_checked_and_its_failures_are_connect_errors(tls))
        for then in ("hold", "close"):
            runner.run(test_a_peer_that_takes_no_body_fails_the_writing(then))
        for then in ("close", "reset", "hold"):
            runner.run(test_a_body_over_tls_that_breaks_off_is_an_error(then))
        runner.run(test_a_refused_connection_reveals_no_address())
        runner.run(test_a_peer_that_takes_no_connection_is_a_connect_timeout())
        runner.run(test_a_connection_is_used_again_unless_its_peer_closed_it())
        runner.run(test_an_early_refusal_of_a_large_body_is_read())
        runner.run(test_an_unread_body_waits_in_the_socket_buffers())
