"""What a WebSocket's client sends costs no more than what it sends, and not without end."""

from __future__ import annotations

import asyncio
import base64
import os
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import uvicorn

from tests.services.blobs.conftest import until
from tokenbus_services.net.http_server import HttpBounds, server_config
from tokenbus_services.net.web_socket import OWNER, BoundedSocket, FairShare

UPGRADE = (
    "GET /{owner} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Extensions: permessage-deflate\r\nSec-WebSocket-Key: {key}\r\n"
)
TEXT, BINARY, CONT, PING = 1, 2, 0, 9


class Sockets:
    """An app that keeps what each of its sockets received, and takes the next message when it may."""

    def __init__(self, bounds: HttpBounds) -> None:
        config = server_config(self, bounds, web_sockets=True, grace_s=1)
        config.port = 0
        self.server = uvicorn.Server(config)
        self.received: list[str | bytes] = []
        self.may_take = asyncio.Event()
        self.may_take.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope["state"][OWNER] = scope["path"][1:]
        await receive()
        if scope["path"] == "/refused":
            await send({"type": "websocket.http.response.start", "status": 403, "headers": []})
            await send({"type": "websocket.http.response.body", "body": b"no"})
            return
        await send({"type": "websocket.accept"})
        while True:
            await self.may_take.wait()
            message = await receive()
            if message["type"] == "websocket.disconnect":
                return
            self.received.append(message.get("text") or message.get("bytes") or "")
            await send({"type": "websocket.send", "text": f"{len(self.received[-1])}"})

    async def connect(self, owner: str = "a", more: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.servers[0].sockets[0].getsockname()[1])
        key = base64.b64encode(os.urandom(16)).decode()
        writer.write((UPGRADE.format(owner=owner, key=key) + more + "\r\n").encode())
        return reader, writer

    async def opened(self, owner: str = "a") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self.connect(owner)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 ")
        assert b"deflate" not in head
        return reader, writer


@asynccontextmanager
async def sockets(**bounds: Any) -> AsyncGenerator[Sockets]:
    app = Sockets(HttpBounds(**bounds))
    app.server.config.load()
    app.server.lifespan = app.server.config.lifespan_class(app.server.config)
    await app.server.startup()
    try:
        yield app
    finally:
        app.may_take.set()
        await app.server.shutdown()


def frame(opcode: int, data: bytes, *, fin: bool = True) -> bytes:
    first = (128 if fin else 0) | opcode
    if len(data) < 126:
        return struct.pack("!BB4x", first, 128 | len(data)) + data
    return struct.pack("!BBQ4x", first, 128 | 127, len(data)) + data


async def closed_with(reader: asyncio.StreamReader) -> int:
    data = await reader.read(-1)
    assert data[0] == 0x88, data
    return struct.unpack("!H", data[2:4])[0]


async def test_a_message_of_fragments_of_one_byte_is_one_message() -> None:
    async with sockets() as app:
        _, writer = await app.opened()
        pieces = [frame(TEXT, b"x", fin=False), *(frame(CONT, b"y", fin=False) for _ in range(5000)), frame(CONT, b"z")]
        writer.write(b"".join(pieces) + frame(PING, b"p") + frame(BINARY, b"\xff" * 70_000))
        await until(lambda: len(app.received) == 2)
        assert app.received == ["x" + "y" * 5000 + "z", b"\xff" * 70_000]
        writer.close()


async def test_incomplete_messages_of_one_owner_leave_room_for_the_next() -> None:
    async with sockets(unfinished_bytes=400_000, message_bytes=10**6) as app:
        large = frame(BINARY, b"x" * 250_000)
        first, writer = await app.opened("greedy")
        writer.write(large[:-1])
        assert await closed_with(first) == 1013
        others = [await app.opened("greedy") for _ in range(3)]
        for _, one in others:
            one.write(large[:70_000])
        _, modest = await app.opened("modest")
        modest.write(frame(BINARY, b"x" * 100_000))
        await until(lambda: b"x" * 100_000 in app.received)
        for _, one in (*others, (None, modest), (None, writer)):
            one.close()


async def test_no_frame_is_parsed_while_the_app_has_one_to_take() -> None:
    async with sockets() as app:
        _, writer = await app.opened()
        app.may_take.clear()
        writer.write(b"".join(frame(TEXT, b"%d" % n) for n in range(20_000)))
        protocols = cast("set[Any]", app.server.server_state.connections)
        [queue] = [each.queue for each in protocols if isinstance(each, BoundedSocket)]
        await until(lambda: not queue.empty())
        for _ in range(50):
            await asyncio.sleep(0)
        assert queue.qsize() < 1000
        app.may_take.set()
        await until(lambda: app.received[-1:] == ["19999"])
        writer.close()


async def test_a_message_that_does_not_arrive_ends_the_socket_and_a_silent_socket_stays() -> None:
    async with sockets(head_s=0.2, body_window_s=0.2, body_window_bytes=1000) as app:
        silent, quiet = await app.opened()
        reader, writer = await app.opened()
        writer.write(frame(TEXT, b"x" * 5000)[:-1])
        assert await closed_with(reader) == 1008
        quiet.write(frame(TEXT, b"still here"))
        assert (await silent.read(100)).endswith(b"10"), "the time limits of HTTP ended with the upgrade"
        quiet.close()
        writer.close()


async def test_a_client_that_pings_and_reads_nothing_is_not_kept() -> None:
    async with sockets(answer_s=0.3) as app:
        _, writer = await app.opened()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        flood = frame(PING, b"p" * 125) * 1000
        with pytest.raises(ConnectionError):  # noqa: PT012 (which write fails is open)
            while True:
                writer.write(flood)
                await writer.drain()
                await asyncio.sleep(0)
        await until(lambda: not app.server.server_state.connections)


@pytest.mark.parametrize(
    "more", ["Content-Length: 5\r\n", "Transfer-Encoding: chunked\r\n", "X: " + "x" * 9000 + "\r\n", "X-A: 1\r\n" * 200]
)
async def test_a_handshake_that_the_parser_would_not_answer_is_refused(more: str) -> None:
    async with sockets() as app:
        reader, writer = await app.connect(more=more)
        assert (await reader.read(-1)).startswith(b"HTTP/1.1 400 ")
        writer.close()


async def test_a_socket_that_is_refused_is_no_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with sockets() as app:
        reader, writer = await app.connect("refused")
        answer = await reader.read(-1)
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert answer.endswith(b"no")
        writer.close()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_what_each_owner_holds_remains_free_for_the_next() -> None:
    share = FairShare(100)
    taken = {name: sum(share.take(name) for _ in range(100)) for name in "abc"}
    assert taken == {"a": 50, "b": 25, "c": 12}
    share.give_back("a", 50)
    assert share.take("c", 20)
    alone = FairShare(100)
    assert sum(alone.take(None) for _ in range(200)) == 100
    alone.give_back(None, 100)
    assert alone.total == 0
