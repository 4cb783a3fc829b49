"""Readers of one stream share a connection, each from its own place on: none misses what another had already."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from redis.exceptions import ResponseError

from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.client.tailing import ROOM, Hub, StreamFeed


async def write(server: Server, stream: str, first: int, count: int) -> None:
    pipe = server.client.pipeline(transaction=True)
    for n in range(first, first + count):
        pipe.xadd(stream, {"n": n}, id=f"1-{n}")
    pipe.pexpire(stream, 60_000)
    await pipe.execute()


async def read(feed: StreamFeed, count: int) -> list[int]:
    """The numbers of the next entries, as many as that."""
    seen: list[int] = []
    while len(seen) < count:
        entries = await feed.take(30)
        assert entries, f"only {seen} came"
        seen += [int(fields[b"n"]) for _, fields in entries]
    return seen


@asynccontextmanager
async def feed_of(hub: Hub, stream: str, position: str) -> AsyncGenerator[StreamFeed]:
    feed = hub.open_feed(stream, position)
    try:
        yield feed
    finally:
        hub.close_feed(feed)


async def test_a_reader_that_joins_behind_a_waiting_one_misses_nothing(server: Server, keys: Keys):
    hub, stream = Hub(server), keys.log("r")
    await write(server, stream, 1, 2)
    async with feed_of(hub, stream, "1-2") as ahead:
        waiting = asyncio.create_task(read(ahead, 1))
        await eventually(lambda: _waits(server))
        async with feed_of(hub, stream, "1-1") as behind:
            await write(server, stream, 3, 1)
            assert await waiting == [3]
            assert await read(behind, 2) == [2, 3]
    await hub.aclose()


async def test_a_slow_reader_beside_a_quick_one_needs_little_memory_and_misses_nothing(server: Server, keys: Keys):
    hub, stream, rounds = Hub(server), keys.log("r"), 5
    async with feed_of(hub, stream, "0-0") as slow, feed_of(hub, stream, "0-0") as quick:
        for n in range(rounds):
            await write(server, stream, 1 + n * ROOM, ROOM)
            assert await read(quick, ROOM) == list(range(1 + n * ROOM, 1 + (n + 1) * ROOM))
        assert len(slow.entries) < 2 * ROOM
        assert await read(slow, rounds * ROOM) == list(range(1, 1 + rounds * ROOM))
    await hub.aclose()


async def _rests(server: Server) -> bool:
    return not await _waits(server)


async def _waits(server: Server) -> bool:
    clients: list[dict[str, str]] = await server.client.client_list()
    return any(c["cmd"] == "xread" and "b" in c["flags"] for c in clients)


async def test_a_log_that_the_server_cannot_read_ends_its_own_reader_alone(server: Server, keys: Keys):
    hub, stream, alien = Hub(server), keys.log("r"), keys.log("alien")
    async with feed_of(hub, stream, "0-0") as well, feed_of(hub, alien, "0-0") as hurt:
        assert well.tail is hurt.tail
        hurt_reads, well_reads = asyncio.create_task(read(hurt, 1)), asyncio.create_task(read(well, 2))
        await eventually(lambda: _waits(server))
        await server.client.set(alien, "a text", px=60_000)
        await write(server, stream, 1, 1)
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            await hurt_reads
        await write(server, stream, 2, 1)
        assert await well_reads == [1, 2]
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            await read(hurt, 1)


async def test_readers_of_a_tail_that_was_cancelled_get_an_error(server: Server, keys: Keys):
    hub = Hub(server)
    async with feed_of(hub, keys.log("r"), "0-0") as feed:
        waiting = asyncio.create_task(read(feed, 1))
        await eventually(lambda: _waits(server))
        [tail] = [task for task in asyncio.all_tasks() if task.get_name() == "tail of logs"]
        tail.cancel()
        with pytest.raises(RuntimeError, match="cancelled"):
            await waiting


async def test_a_tail_is_kept_for_the_next_reader_and_closed_with_its_hub(server: Server, keys: Keys):
    before = asyncio.all_tasks()
    hub = Hub(server)
    feed = hub.open_feed(keys.log("r"), "0-0")
    waiting = asyncio.create_task(read(feed, 1))
    await eventually(lambda: _waits(server))
    waiting.cancel()
    hub.close_feed(feed)
    await eventually(lambda: _rests(server))  # nothing is read for nobody
    await write(server, keys.log("other"), 1, 2)
    async with feed_of(hub, keys.log("other"), "0-0") as other:
        assert other.tail is feed.tail
        assert await read(other, 2) == [1, 2]
    await hub.aclose()
    assert asyncio.all_tasks() == before


async def test_an_idle_tail_is_closed_after_a_while(server: Server, keys: Keys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tokenbus.client.tailing.IDLE_S", 0.01)
    before = asyncio.all_tasks()
    hub = Hub(server)
    async with feed_of(hub, keys.log("r"), "0-0"):
        pass
    await eventually(lambda: asyncio.all_tasks() == before)
    await write(server, keys.log("r"), 1, 1)
    async with feed_of(hub, keys.log("r"), "0-0") as feed:
        assert await read(feed, 1) == [1]
    await hub.aclose()


async def test_a_reader_may_leave_while_its_client_is_closed(server: Server, keys: Keys):
    before = asyncio.all_tasks()
    hub = Hub(server)
    feed = hub.open_feed(keys.log("r"), "0-0")
    waiting = asyncio.create_task(read(feed, 1))
    await eventually(lambda: _waits(server))
    closing = asyncio.create_task(hub.aclose())
    await asyncio.sleep(0)  # it has begun to end the tail, which takes a command
    assert not closing.done()
    hub.close_feed(feed)
    await closing
    with pytest.raises(RuntimeError, match="closed"):
        await waiting
    assert asyncio.all_tasks() == before
