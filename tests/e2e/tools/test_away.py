"""A run that only waits is in no worker. Without its index it goes on, a state that nobody can read ends it, and its
session reaches it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from typing import Any

import pytest
import redis.asyncio as redis

from tests.waiting import eventually
from tokenbus import Client, Run
from tokenbus.events.frames import CONTROL_ATTEMPT, EventFrame, PutBack, encode
from tokenbus.events.public import Cancelled, Completed, PublicEvent, RunFailedEvent
from tokenbus.testing import LocalBus
from tokenbus_services.mock_provider import Reply, ToolCall
from tokenbus_services.parser import away, timeouts

SETTINGS = """
[limits]
silent_run_s = 0.2
[tools.show]
kind = "client"
description = "Shows something on the client's screen."
timeout_s = 3600
[tools.gone]
kind = "client"
description = "Nobody returns its result."
timeout_s = 4
"""


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with pytest.MonkeyPatch.context() as patch, LocalBus(SETTINGS) as running:
        patch.setattr(away, "AWAY_AFTER_MS", 0)
        patch.setattr(away, "LOOK_S", 0.0)
        patch.setattr(timeouts, "INDEX_LOOKS", 1)
        for tool in ("show", "gone"):
            running.model_says(tool, Reply(tool_calls=(ToolCall(name=tool, arguments={}),)), "Done.")
        yield running


@pytest.fixture
async def client(bus: LocalBus) -> AsyncGenerator[Client]:
    async with bus.client() as client:
        yield client


@pytest.fixture
async def server(bus: LocalBus) -> AsyncGenerator[Any]:
    client: Any = redis.Redis.from_url(bus.url)
    async with client:
        yield client


async def key_of(server: Any, run: str) -> bytes:
    """The hash of a run that is put away."""

    async def found() -> bytes:
        keys: list[bytes] = [key async for key in server.scan_iter(f"*:run:{run}")]
        return keys[0] if keys and await server.hexists(keys[0], "away") else b""

    return await eventually(found)


async def open_in_memory(server: Any) -> int:
    leases = [key async for key in server.scan_iter("*:lease:parser")]
    return sum([int(await server.hget(key, "open") or 0) for key in leases])


async def last_of(run: Run) -> PublicEvent:
    async with aclosing(run.events()) as events:
        return [event async for event in events][-1]


async def test_a_lost_index_is_written_again_and_the_deadline_decides(
    bus: LocalBus, client: Client, server: Any
) -> None:
    run = await client.publish(bus.request("gone", tools=[{"name": "gone"}]))
    await key_of(server, run.id)
    await eventually(lambda: is_nothing(server))
    await server.delete(*[key async for key in server.scan_iter("*:index:away")])
    assert isinstance(await last_of(run), Completed)


async def is_nothing(server: Any) -> bool:
    return await open_in_memory(server) == 0


async def test_a_run_whose_state_cannot_be_read_ends(bus: LocalBus, client: Client, server: Any) -> None:
    run = await client.publish(bus.request("show", tools=[{"name": "show"}]))
    key = await key_of(server, run.id)
    await eventually(lambda: is_nothing(server))
    turn, attempt, seq = (int(number or 0) for number in await server.hmget(key, "turn", "attempt", "seq"))
    unreadable = EventFrame(0, CONTROL_ATTEMPT, 1, [PutBack(b"\xc1", turn, attempt, seq)])
    await server.hset(key, "away", encode(unreadable))
    await client.cancel(run)
    end = await last_of(run)
    assert isinstance(end, RunFailedEvent)
    assert end.error.code == "state_unreadable"


async def test_its_session_reaches_it(bus: LocalBus, client: Client, server: Any) -> None:
    session = client.session("away")
    await session.configure({"provider": "anthropic", "model": "show", "tools": [{"name": "show"}]})
    run = (await session.send("Show it.")).fate.run
    assert run
    await key_of(server, run)
    await session.steer("Show it now.", now=True)
    await key_of(server, run)
    await session.interrupt()
    async with aclosing(client.follow(run)) as events:
        assert isinstance([event async for event in events][-1], Cancelled)
