"""The client on a Cluster: partitions on different nodes, and no read may span them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from uuid import uuid4

import pytest

from tests.contract.client.changed_partitions import check_readers
from tests.contract.client.listed import Listed
from tests.contract.client.writer import Writer
from tests.waiting import eventually
from tokenbus import Chunk, Client, Cursor, Generate, Message
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.errors import CursorTrimmed


@pytest.fixture
def keys() -> Keys:
    return Keys(f"t{uuid4().hex[:12]}", 4)


@pytest.fixture
async def bus(cluster_url: str, keys: Keys) -> AsyncGenerator[Client]:
    async with Client(cluster_url, prefix=keys.prefix, partitions=4) as bus:
        yield bus


async def test_a_request_is_published_and_its_run_followed(bus: Client, clustered: Server, keys: Keys):
    run = await bus.publish(Generate(provider="p", model="m", messages=[Message(role="user", content="Hi")]))
    writer = Writer(clustered, keys, run.id)
    task = asyncio.create_task(run.result())
    await writer.start()
    await writer.block("Hello")
    await writer.retry()
    await writer.complete()
    assert (await task).events == 6
    assert [e.seq async for e in bus.follow(run, after=2)] == [3, 4, 5]


async def test_a_subscription_has_the_runs_of_all_nodes(bus: Client, clustered: Server, keys: Keys):
    writers = [Writer(clustered, keys, f"r{i}") for i in range(12)]
    async with bus.subscribe("visible", kinds=Chunk) as events:
        begin = events.cursor
        for writer in writers:
            await writer.say("a", "b")
        seen = [await anext(events) for _ in range(24)]
    assert {(e.run, e.seq) for e in seen} == {(w.run, e.seq) for w in writers for e in w.events}
    async with bus.subscribe("visible", kinds=Chunk, from_=Cursor.parse(str(begin))) as events:
        assert len([await anext(events) for _ in range(24)]) == 24


async def test_trimming_is_noticed(bus: Client, clustered: Server, keys: Keys):
    writer = Writer(clustered, keys, "r", topic_entries=3)
    async with bus.subscribe("visible", kinds=Chunk) as events:
        await writer.say("a")
        await anext(events)
        cursor = events.cursor
    await writer.say("b", "c", "d", "e")
    async with bus.subscribe("visible", kinds=Chunk, from_=cursor) as events:
        with pytest.raises(CursorTrimmed):
            await anext(events)
        assert await anext(events) == writer.events[2]


async def test_a_group_shares_the_partitions_and_continues_at_its_offset(bus: Client, clustered: Server, keys: Keys):
    writers = [Writer(clustered, keys, f"r{i}") for i in range(12)]
    async with (
        bus.subscribe("visible", kinds=Chunk, group="tts", from_="start") as one,
        bus.subscribe("visible", kinds=Chunk, group="tts", from_="start") as two,
    ):
        waiting = asyncio.ensure_future(anext(two))
        await eventually(lambda: len(one.partitions) == len(two.partitions) == 2)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    for writer in writers:
        await writer.say("a")
    async with bus.subscribe("visible", kinds=Chunk, group="tts") as events:
        assert {(await anext(events)).run for _ in range(12)} == {w.run for w in writers}


async def test_the_runs_of_all_nodes_are_listed_in_order_and_described(bus: Client, clustered: Server, keys: Keys):
    listed = Listed(clustered, keys)
    for n in range(16):
        await listed.accept(f"r{n:02}", 1000 + n, "provider", "p", "model", "m")
    for n in range(0, 16, 4):
        await listed.end(f"r{n:02}")
    opened = [f"r{n:02}" for n in range(16) if n % 4]
    assert [info.run async for info in bus.runs(state="open", oldest_first=True)] == opened
    assert {info.run async for info in bus.runs(state="completed")} == {"r00", "r04", "r08", "r12"}
    assert len(await bus.describe([f"r{n:02}" for n in range(20)])) == 16


async def test_readers_follow_a_change_of_the_number_of_partitions(cluster_url: str, clustered: Server, keys: Keys):
    await check_readers(clustered, cluster_url, keys)
