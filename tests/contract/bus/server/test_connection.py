"""What the connections of ours do that redis-py's own do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import uvloop
from redis.exceptions import ConnectionError as ConnectionLost

from tests.servers import cluster, sentinel_group
from tokenbus.bus.keys import Keys
from tokenbus.bus.server import server as servers
from tokenbus.bus.server.connection_fixes import prompt
from tokenbus.bus.server.server import Server

MIB = 2**20


async def ends(server: Server, steps: int) -> bool:
    """Whether a blocking read ends if it is cancelled after this many steps of the event loop."""
    await server.client.exists("nothing")  # now there is a connection to the node
    task = asyncio.create_task(server.client.xread({"nothing": "0-0"}, block=4000))
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=3.5)  # well before the block is over
    return bool(done)


@pytest.mark.parametrize("steps", range(1, 30))
async def test_a_command_ends_if_its_task_is_cancelled_at_any_moment(server: Server, steps: int):
    assert await ends(server, steps)


async def test_so_it_does_in_a_cluster():
    with cluster() as url:
        async with Server(url) as server:
            assert [steps for steps in range(1, 30) if not await ends(server, steps)] == []


async def test_the_connections_to_a_master_behind_sentinels_are_ours_too(tmp_path: Path):
    with sentinel_group(tmp_path) as group:
        async with Server(group.url) as server:
            assert await ends(server, 3)
            kind = server.client.connection_pool.connection_class
            assert kind is prompt(kind.__mro__[1])


def test_a_write_after_the_other_side_has_reset_is_a_lost_connection_under_uvloop_too(server_url: str):
    async def write() -> None:
        async with Server(server_url) as server:
            await server.client.ping()
            connection = await server.client.connection_pool.get_connection()
            await connection.connect()
            connection._writer.transport.abort()
            await asyncio.sleep(0)
            with pytest.raises(ConnectionLost):
                await connection.send_packed_command(b"PING\r\n")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(write())


async def test_a_large_reply_on_a_slow_network_takes_longer_than_a_command_may(
    server: Server, keys: Keys, server_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(servers, "REPLY_TIMEOUT_S", 1.5)
    await server.client.set(keys.dead, bytes(6 * MIB))
    async with slow_network(server_url) as url, Server(url) as slow:
        assert len(await slow.client.get(keys.dead)) == 6 * MIB
    await server.client.delete(keys.dead)


@asynccontextmanager
async def slow_network(server_url: str) -> AsyncGenerator[str]:
    """A proxy before the server that lets a MiB of replies through in 0.4 s."""
    url = urlsplit(server_url)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pause_s: float) -> None:
        with suppress(OSError, asyncio.CancelledError):
            while data := await reader.read(MIB // 16):
                await asyncio.sleep(pause_s * len(data) / MIB)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_server = await asyncio.open_connection(url.hostname, url.port)
        await asyncio.gather(pump(reader, to_server, 0.0), pump(there, writer, 0.4))

    proxy = await asyncio.start_server(link, "127.0.0.1", 0)
    async with proxy:
        yield f"redis://127.0.0.1:{proxy.sockets[0].getsockname()[1]}{url.path}"
