"""No client keeps a connection without doing anything with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import uvicorn

from tests.services.blobs.conftest import until
from tokenbus_services.net.http_server import BoundedProtocol, HttpBounds, server_config
from tokenbus_services.net.request_guard import AsgiApp, Receive, Scope, Send

QUICK = HttpBounds(connections=4, head_s=0.2, body_window_s=0.2, body_window_bytes=1000, answer_s=0.2)
HEAD = b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """``/read`` reads the body, ``/large`` answers with more than fits into any buffer, all else answers at once."""
    if scope["path"] == "/read":
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            if not message.get("more_body"):
                break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"transfer-encoding", b"chunked")]})
    for _ in range(2000 if scope["path"] == "/large" else 1):
        await send({"type": "http.response.body", "body": b"x" * 16_384, "more_body": True})
    await send({"type": "http.response.body"})


class ServedApp:
    def __init__(self, server: uvicorn.Server) -> None:
        self.server = server
        self.port: int = server.servers[0].sockets[0].getsockname()[1]

    @property
    def open(self) -> int:
        return len(self.server.server_state.connections)

    async def connect(self, first: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        # A small buffer, so that what is not read stays with the server.
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1024)
        writer.write(first)
        return reader, writer


@asynccontextmanager
async def served(app: AsgiApp, bounds: HttpBounds) -> AsyncGenerator[ServedApp]:
    config = server_config(app, bounds, grace_s=1)
    config.port = 0
    server = uvicorn.Server(config)
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup()
    try:
        yield ServedApp(server)
    finally:
        for one in server.servers:
            one.close()
        for connection in list(server.server_state.connections):
            assert isinstance(connection, BoundedProtocol)
            connection.transport.abort()
        await until(lambda: not server.server_state.connections and not server.server_state.tasks)


@pytest.mark.parametrize(
    ("first", "drip"),
    [
        (b"", b""),
        (b"GET / HTTP/1.1\r\nHo", b""),
        (b"GET / HTTP/1.1\r\nX: ", b"x"),
        (HEAD, b""),
        (HEAD, b"x"),
        (HEAD.replace(b"/read", b"/"), b"x"),  # answered before the body is there
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b""),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET", b" "),
    ],
)
async def test_a_client_that_is_slow_to_ask_is_closed(first: bytes, drip: bytes) -> None:
    async with served(app, QUICK) as served_app:
        reader, writer = await served_app.connect(first)
        gone = asyncio.create_task(_rest(reader))
        while drip and not gone.done():
            writer.write(drip)
            await asyncio.sleep(0.02)
        await gone
        await until(lambda: served_app.open == 0)
        writer.close()


async def test_a_client_that_has_begun_a_request_receives_the_reason() -> None:
    async with served(app, QUICK) as served_app:
        for first in (b"GET / HTTP/1.1\r\nHo", HEAD):
            reader, writer = await served_app.connect(first)
            assert (await _rest(reader)).startswith(b"HTTP/1.1 408 ")
            writer.close()


async def test_a_client_that_does_not_read_its_answer_is_closed() -> None:
    async with served(app, QUICK) as served_app:
        _, writer = await served_app.connect(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: served_app.open == 1)
        await until(lambda: served_app.open == 0)
        writer.close()


async def test_a_client_that_reads_its_answer_slowly_gets_all_of_it() -> None:
    async with served(app, QUICK) as served_app:
        reader, writer = await served_app.connect(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        size = 0
        while part := await reader.read(2**20):
            size += len(part)
            await asyncio.sleep(0.002)
        assert size > 2000 * 16_384
        writer.close()


async def test_a_body_that_keeps_coming_may_take_any_time() -> None:
    async with served(app, QUICK) as served_app:
        reader, writer = await served_app.connect(HEAD)
        for _ in range(50):
            writer.write(b"x" * 2000)
            await asyncio.sleep(0.02)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_the_longest_waiting_connection_makes_room_and_a_working_one_does_not() -> None:
    bounds = HttpBounds(connections=4, head_s=60)
    async with served(app, bounds) as served_app:
        working, worker = await served_app.connect(HEAD)
        await until(lambda: served_app.open == 1)
        waiting = [await served_app.connect(b"GET / HT") for _ in range(3)]
        await until(lambda: served_app.open == 4)
        reader, writer = await served_app.connect(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        assert await _rest(waiting[0][0]) == b""
        worker.write(b"x" * 100_000)
        assert (await working.readline()).startswith(b"HTTP/1.1 200 ")
        for _, one in (*waiting, (None, worker), (None, writer)):
            one.close()


async def test_only_health_probes_are_answered_if_all_are_busy_and_the_newest_is_closed_beyond_them() -> None:
    async with served(app, HttpBounds(connections=2, probes=2)) as served_app:
        busy = [await served_app.connect(HEAD) for _ in range(2)]
        await until(lambda: len(served_app.server.server_state.tasks) == 2)
        reader, writer = await served_app.connect(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        refused = await _rest(reader)
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b'"connections_full"' in refused
        writer.close()
        await until(lambda: served_app.open == 2)
        for _ in range(3):
            probe, prober = await served_app.connect(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await probe.readline()).startswith(b"HTTP/1.1 200 ")
            prober.close()
        idle = [await served_app.connect(b"") for _ in range(2)]
        await until(lambda: served_app.open == 4)
        last, closer = await served_app.connect(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await last.readline()).startswith(b"HTTP/1.1 200 ")
        assert await _rest(idle[0][0]) == b"", "a connection without a request makes room for a probe"
        for _, one in (*busy, *idle, (None, closer)):
            one.close()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
)
async def test_what_is_no_http_is_refused_in_json_and_ends_the_connection(request_: bytes, status: int) -> None:
    async with served(app, HttpBounds()) as served_app:
        slow = request_.replace(b" / ", b" /read ")
        reader, writer = await served_app.connect(slow)
        answer = await _rest(reader)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b'"invalid_http"' in answer
        assert answer.count(b"HTTP/1.1") == 1
        writer.close()


async def test_a_connection_is_kept_whose_body_arrives_after_its_answer() -> None:
    ask = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n"
    async with served(app, HttpBounds()) as served_app:
        reader, writer = await served_app.connect(ask)
        for _ in range(3):
            answer = b""
            while not answer.endswith(b"\r\n0\r\n\r\n"):
                part = await reader.read(2**16)
                assert part
                answer += part
            assert answer.startswith(b"HTTP/1.1 200 ")
            writer.write(b"abc" + ask)
        writer.close()


async def test_a_request_that_is_refused_before_its_body_holds_its_connection_for_a_moment_only() -> None:
    async with served(app, HttpBounds()) as served_app:
        reader, writer = await served_app.connect(HEAD.replace(b"/read", b"/"))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        gone = asyncio.create_task(_rest(reader))
        while not gone.done():
            writer.write(b"x" * 1000)
            await asyncio.sleep(0.02)
        await until(lambda: served_app.open == 0)
        writer.close()


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(-1)
    except ConnectionError:
        return b""
