"""The client with pooled connections: the guarantees after any outcome of the previous command."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import ResponseError

from tests.servers import binary
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server import clients as direct
from tokenbus.bus.server.server import Server
from tokenbus_services.process.embedded_server import EmbeddedServer


@pytest.mark.parametrize("packed_by", ["hiredis", "redis-py", "pieces"])
async def test_words_numbers_and_bytes_arrive_as_they_are(
    server: Server, keys: Keys, packed_by: str, monkeypatch: pytest.MonkeyPatch
):
    if packed_by == "redis-py":
        monkeypatch.setattr(direct, "_hiredis", None)
    elif packed_by == "pieces":
        monkeypatch.setattr(direct, "LARGE_BYTES", 1)  # each argument counts as large
    stream = keys.topic(0, "raw")
    await server.client.xgroup_create(stream, "g", mkstream=True)  # a command of two words
    await server.client.xadd(stream, {"é": b"\x00\xff", "n": 12, "f": 1.5})
    [(_, [(entry_id, fields)])] = await server.client.xreadgroup("g", "me", {stream: ">"})
    assert fields == {"é".encode(): b"\x00\xff", b"n": b"12", b"f": b"1.5"}
    assert await server.client.xack(stream, "g", entry_id) == 1


async def test_large_arguments_between_small_ones_arrive_whole(server: Server, keys: Keys):
    large = bytes(range(256)) * (3 * 2**20 // 256)
    fields = {"a": b"1", "large": large, "b": "é", "also large": large[::-1], "empty": b""}
    await server.client.hset(keys.meta, mapping=fields)
    await server.client.pexpire(keys.meta, 60_000)
    assert await server.client.hmget(keys.meta, list(fields)) == [b"1", large, "é".encode(), large[::-1], b""]


async def test_commands_one_after_another_share_a_connection_and_those_side_by_side_do_not(server: Server):
    ids = {await server.client.client_id() for _ in range(10)}
    assert len(ids) == 1
    both = await asyncio.gather(server.client.client_id(), server.client.client_id())
    assert len({*ids, *both}) == 2


async def test_after_an_error_reply_the_connection_serves_on(server: Server, keys: Keys):
    before = await server.client.client_id()
    await server.client.set(keys.meta, "text", px=60_000)
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await server.client.hget(keys.meta, "f")
    assert await server.client.get(keys.meta) == b"text"
    assert await server.client.client_id() == before


async def test_no_other_command_receives_the_reply_to_a_cancelled_one(server: Server, keys: Keys):
    stream = keys.topic(0, "raw")
    for n in range(20):
        reading = asyncio.create_task(server.client.xread({stream: "0-0"}, block=2000))
        for _ in range(1 + n % 5):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert await server.client.echo(f"{n}") == b"%d" % n


async def test_a_connection_that_the_server_closed_is_not_used_again(server: Server):
    async with Server(server.url) as other:
        victim = await other.client.client_id()
        await server.client.client_kill_filter(_id=str(victim))
        await eventually(lambda: _answers_as_another(other, victim))


async def _answers_as_another(server: Server, before: int) -> bool:
    """Nothing raises, although the connection at hand is gone: the end of it has come by now, or does with this try."""
    try:
        return await server.client.client_id() != before
    except ConnectionLost:
        return False


async def test_a_server_that_came_back_is_used_again_without_an_error(tmp_path: Path):
    with EmbeddedServer(tmp_path, binary=binary()) as own:
        async with Server(own.url) as server:
            await asyncio.gather(*(server.client.ping() for _ in range(5)))
            await asyncio.to_thread(own.stop)
            await asyncio.to_thread(own.start)
            assert await asyncio.gather(*(server.client.ping() for _ in range(5))) == [True] * 5


async def test_closing_the_client_closes_its_idle_connections(server: Server):
    before = len(await server.client.client_list())
    async with Server(server.url) as other:
        await asyncio.gather(*(other.client.ping() for _ in range(5)))
    await eventually(lambda: _has(server, before))


async def _has(server: Server, count: int) -> bool:
    return len(await server.client.client_list()) <= count
