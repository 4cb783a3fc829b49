"""A later stage that stalls: sockets are not read, memory stays as it is, and nothing is dropped."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.e2e import judge
from tests.e2e.conftest import Deploy, Send
from tests.e2e.fleet import PIPELINE, ended, only_separate
from tests.waiting import eventually
from tokenbus import Client
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.errors import CursorTrimmed
from tokenbus_services.mock_provider import Exchange, Reply, Script, ToolCall, Turn

LAG_BYTES = 64 * 1024
WORDS = 1_800_000
"""A stream of some 13 MB: far more than sockets, buffers and both lags may hold. Its chunks are large: the
time that a run takes grows with their number."""
MOST_READ = 8 * 2**20
TEXT = "word " * WORDS
LONG = Script(name="long", turns=(Turn(says=Reply(text=TEXT, chunk_size=250)),))
CALLS = tuple(ToolCall(name="noted", arguments={"n": n}) for n in range(300))
BLOCKS = Script(name="blocks", turns=(Turn(says=Reply(tool_calls=CALLS)),))
"""600 entries of the topic a run: what begins and ends a block is never joined with others."""


NOTED = {"name": "noted", "parameters": {"type": "object"}}


async def lag(server: Server, key: str) -> int:
    arrived, done = await server.client.hmget(key, ["arrived", "done"])
    return int(arrived or 0) - int(done or 0)


@only_separate("a pipeline worker that stands still reads no socket either")
async def test_a_stalled_parser_stops_the_reading_of_sockets_and_nothing_is_lost(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    toml = f"[limits]\nlag_bytes = {LAG_BYTES}\nblock_characters = 16777216\n"
    async with deployed([LONG], PIPELINE, toml) as (provider, services):
        parser = services.worker_of("parser")
        run = await send("long")
        exchange = await provider.requested()
        parser.freeze()
        passed = exchange.bytes_sent  # what it had let through by then
        partition = keys.partition_of(run)
        await eventually(lambda: _over(server, keys.lease(partition, "parser"), LAG_BYTES), timeout=60)
        # A fetcher that stopped reading continues at half the lag, so at least that much waits.
        await eventually(lambda: _over(server, keys.lease(partition, "normalizer"), LAG_BYTES // 2), timeout=60)
        await eventually(lambda: _sends_nothing(exchange), timeout=60)
        # What waits on the server is bounded, and so the rest is still at the provider.
        raw = await lag(server, keys.lease(partition, "normalizer"))
        events = await lag(server, keys.lease(partition, "parser"))
        assert max(raw, events) < LAG_BYTES + 2**20
        assert exchange.bytes_sent - passed < MOST_READ
        assert not exchange.ended
        parser.thaw()
        log: Any = (await ended(server.client, keys, [run], timeout=120))[run]
    judge.check(log)
    assert log[-1]["type"] == "completed"
    assert judge.text(log) == TEXT


async def _over(server: Server, key: str, size: int) -> bool:
    return await lag(server, key) > size


async def _sends_nothing(exchange: Exchange) -> bool:
    """Whether the provider's socket took nothing for a second."""
    before = exchange.bytes_sent
    await asyncio.sleep(1.0)
    return exchange.bytes_sent == before


async def test_a_subscriber_that_slept_too_long_is_notified_of_trimmed_entries(
    server: Server, server_url: str, keys: Keys, send: Send, deployed: Deploy
) -> None:
    toml = "[retention]\ntopic_entries = 1000\n"
    async with (
        deployed([BLOCKS], PIPELINE, toml),
        Client(server_url, prefix=keys.prefix) as bus,
        bus.subscribe("blocks", from_="start") as sleeper,
    ):
        names = [name for name in (f"run-{n}" for n in range(100)) if keys.partition_of(name) == 0][:8]
        await send("blocks", id=names[0], max_tool_depth=0, tools=[NOTED])
        await anext(sleeper)  # then it sleeps
        await ended(server.client, keys, [await send("blocks", id=n, max_tool_depth=0, tools=[NOTED]) for n in names])
        assert await server.client.xlen(keys.topic(0, "blocks")) < 2000, "bounded, however long it sleeps"
        with pytest.raises(CursorTrimmed):
            async for _ in sleeper:
                pass
