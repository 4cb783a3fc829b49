"""The fault proxy applies exactly the fault that the test requested."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import suppress

import pytest

from tests.chaos.deployment import resp
from tests.chaos.deployment.proxy import Link, Proxy
from tests.waiting import eventually

CHANCE = random.Random(0)


@pytest.fixture
async def proxy() -> AsyncGenerator[Proxy]:
    """A proxy before a server that echoes its input, and closes after a full stop."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = b""
        while not data.endswith(b".") and (data := await reader.read(1000)):
            writer.write(data)
        writer.close()

    async with (
        await asyncio.start_server(echo, "127.0.0.1", 0) as server,
        Proxy(server.sockets[0].getsockname()[1]) as proxy,
    ):
        yield proxy


class Caller:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: Link) -> None:
        self.reader = reader
        self.writer = writer
        self.link = link

    async def gets(self) -> bytes:
        """All bytes until the connection ends in any way."""
        got = b""
        with suppress(ConnectionResetError):
            while data := await self.reader.read(1000):
                got += data
        self.writer.close()
        return got


async def call(proxy: Proxy) -> Caller:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"hello")
    assert await reader.readexactly(5) == b"hello"
    [link] = proxy.some(CHANCE, 1.0)
    return Caller(reader, writer, link)


async def test_a_slow_server_gets_each_command_later_and_no_reply_is_lost(proxy: Proxy):
    caller = await call(proxy)
    clock = asyncio.get_running_loop().time
    proxy.round_trip_s = 0.2
    for command in (b"first", b"again"):
        began = clock()
        caller.writer.write(command)
        assert await caller.reader.readexactly(5) == command
        assert clock() - began >= proxy.round_trip_s
    caller.writer.close()


async def test_a_reply_can_be_cut_in_the_middle_of_its_bytes(proxy: Proxy):
    caller = await call(proxy)
    caller.link.cut("down", 0.5)
    caller.writer.write(b"12345678")
    assert await caller.gets() in (b"1234", b"")  # a reset may overtake what was sent before it


async def test_the_request_of_a_lost_reply_has_arrived(proxy: Proxy):
    caller = await call(proxy)
    caller.link.cut("down", 0.0)
    caller.writer.write(b"lost")
    assert await caller.gets() == b""
    await eventually(lambda: proxy.connections == 0)


async def test_held_bytes_arrive_whole_after_the_release(proxy: Proxy):
    caller = await call(proxy)
    caller.link.hold("up")
    caller.writer.write(b"later")
    held = asyncio.create_task(caller.reader.readexactly(5))
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"others go on")
    assert await reader.readexactly(12)
    writer.close()
    assert not held.done()
    caller.link.release("up")
    assert await held == b"later"
    caller.writer.close()


async def test_a_connection_that_is_reset_ends_on_both_sides(proxy: Proxy):
    caller = await call(proxy)
    proxy.reset_all()
    assert await caller.gets() == b""
    await eventually(lambda: proxy.connections == 0)


COMMAND = b"*2\r\n$4\r\nECHO\r\n$3\r\na\r\n\r\n"
"""A call whose reply, from this server, is the command itself."""


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize(
    "pieces", [(COMMAND,), (COMMAND[:9], COMMAND[9:]), (COMMAND * 2,), (COMMAND + COMMAND[:5], COMMAND[5:])]
)
async def test_a_refused_command_gets_an_error_for_each_reply_and_the_next_goes_through(
    proxy: Proxy, pieces: tuple[bytes, ...], done: bool
):
    caller = await call(proxy)
    caller.link.refuse("ERR upstream failure", done=done)
    for piece in pieces:
        caller.writer.write(piece)
        await asyncio.sleep(0)
    error = b"-ERR upstream failure\r\n" * (len(b"".join(pieces)) // len(COMMAND))
    assert await caller.reader.readexactly(len(error)) == error
    caller.writer.write(COMMAND)
    assert await caller.reader.readexactly(len(COMMAND)) == COMMAND
    caller.writer.close()


@pytest.mark.parametrize(
    ("data", "values"),
    [
        (b"+OK\r\n:12\r\n-ERR x\r\n", 3),
        (b"$-1\r\n*-1\r\n*0\r\n", 3),
        (b"*2\r\n*1\r\n$2\r\n\r\n\r\n$1\r\nx\r\n", 1),
        (b"$3\r\nabc\r", None),
        (b"*2\r\n:1\r\n", None),
        (b"+O", None),
        (b"", 0),
    ],
)
def test_protocol_values_are_counted_with_any_content(data: bytes, values: int | None):
    assert resp.count(data) == values


async def test_a_refusing_proxy_accepts_no_connection(proxy: Proxy):
    proxy.refusing = True
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    with suppress(ConnectionResetError):
        assert await reader.read(1) == b""
    writer.close()
    assert proxy.connections == 0


async def test_an_ordinary_connection_loses_nothing_at_its_end(proxy: Proxy):
    caller = await call(proxy)
    caller.writer.write(b"x" * 499_999 + b".")
    assert len(await caller.gets()) == 500_000
