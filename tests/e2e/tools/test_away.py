"""A run that only waits is in no worker, and neither is its parent. Without its index it goes on, a state that nobody
can read ends it, its session reaches it, and a child that is lost ends its parent's call.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
import redis.asyncio as redis

from tests.waiting import eventually
from tokenbus import Client, Run
from tokenbus.bus.erase import erase_runs
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.events.frames import PutBack, decode_events, encode
from tokenbus.events.public import BlockComplete, Cancelled, ChildEnded, Completed, PublicEvent, RunFailedEvent
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
[tools.helper]
kind = "run"
provider = "anthropic"
model = "show"
tools = ["show"]
[tools.brief]
kind = "run"
provider = "anthropic"
model = "show"
tools = ["show"]
timeout_s = 2
"""


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with pytest.MonkeyPatch.context() as patch, LocalBus(SETTINGS) as running:
        patch.setattr(away, "AWAY_AFTER_MS", 0)
        patch.setattr(away, "LOOK_S", 0.0)
        patch.setattr(timeouts, "INDEX_LOOKS", 1)
        calls = {name: ToolCall(name=name, arguments={"task": "go"}) for name in ("show", "gone", "helper", "brief")}
        for name, call in calls.items():
            running.model_says(name, Reply(tool_calls=(call,)), "Done.")
        running.model_says("both", Reply(tool_calls=(calls["helper"], calls["show"])), "Both.")
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
    tenant = {"tenant": "acme"}
    run = await client.publish(bus.request("show", tools=[{"name": "show"}], metadata=tenant))
    key = await key_of(server, run.id)
    await eventually(lambda: is_nothing(server))
    assert len(await listed(server, run.id)) == 5, "as open, as waited for, each for the tenant too, and as put away"
    frame = decode_events(await server.hget(key, "away"))
    (back,) = frame.events
    assert isinstance(back, PutBack)
    unreadable = msgspec.structs.replace(frame, events=[msgspec.structs.replace(back, state=b"\xc1")])
    await server.hset(key, "away", encode(unreadable))
    await client.cancel(run)
    end = await last_of(run)
    assert isinstance(end, RunFailedEvent)
    assert end.error.code == "state_unreadable"
    indexes = await eventually(lambda: ended_only(server, run.id))
    assert sorted(index.rpartition(":index:")[2] for index in indexes) == ["ended", "ended:acme"]


async def ended_only(server: Any, run: str) -> list[str]:
    """The indexes with the run, once its place as a run that is put away is cleared up."""
    found = await listed(server, run)
    return [] if any(index.endswith(":away") for index in found) else found


async def listed(server: Any, run: str) -> list[str]:
    """The indexes that have the run, or something that it waits for."""
    indexes = {key.decode(): await server.zrange(key, 0, -1) async for key in server.scan_iter("*:index:*")}
    return [i for i, members in indexes.items() if any(m.decode().partition("/")[0] == run for m in members)]


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


async def test_a_deleted_session_takes_its_run_along(bus: LocalBus, client: Client, server: Any) -> None:
    session = client.session("deleted")
    await session.configure({"provider": "anthropic", "model": "show", "tools": [{"name": "show"}]})
    run = (await session.send("Show it.")).fate.run
    assert run
    await key_of(server, run)
    await eventually(lambda: is_nothing(server))
    await session.delete()
    await eventually(lambda: is_gone(server, run))


async def test_an_erasure_leaves_a_run_that_is_away_until_it_was_cancelled(
    bus: LocalBus, client: Client, server: Any
) -> None:
    run = await client.publish(bus.request("helper", tools=[{"name": "helper"}]))
    tree = {run.id, f"{run.id}~0"}
    await key_of(server, f"{run.id}~0")
    key = await key_of(server, run.id)
    async with Server(bus.url) as of_bus:
        keys = Keys("tokenbus", 8)
        assert (await erase_runs(of_bus, keys, [run.id])).open == [run.id]
        assert await server.hexists(key, "away")
        await client.cancel(run)
        assert isinstance(await last_of(run), Cancelled)
        await eventually(lambda: ended_only(server, run.id))
        assert set((await erase_runs(of_bus, keys, [run.id])).runs) == tree
    for each in tree:
        assert await left_of(server, each) == []


async def is_gone(server: Any, run: str) -> bool:
    return await left_of(server, run) == []


async def left_of(server: Any, run: str) -> list[str]:
    """The keys and indexes that have the run."""
    keys = [key.decode() async for key in server.scan_iter(f"*:run:{run}")]
    return [*keys, *[key.decode() async for key in server.scan_iter(f"*:log:{run}")], *await listed(server, run)]


async def test_a_parent_is_back_when_its_child_has_ended(bus: LocalBus, client: Client, server: Any) -> None:
    run = await client.publish(bus.request("both", tools=[{"name": "helper"}, {"name": "show"}]))
    child = f"{run.id}~0"
    await key_of(server, child)
    await key_of(server, run.id)
    await eventually(lambda: is_nothing(server))
    (info,) = [info async for info in client.waiting(run=child)]
    await client.tool_result(child, info.wait, {"of": "child"})
    async with aclosing(client.follow(child)) as events:
        assert isinstance([event async for event in events][-1], Completed)
    await key_of(server, run.id)  # it waits for its own call
    await eventually(lambda: is_nothing(server))
    (info,) = [info async for info in client.waiting(run=run)]
    await client.tool_result(run, info.wait, {"of": "parent"})
    async with aclosing(run.events()) as events:
        log = [event async for event in events]
    assert isinstance(log[-1], Completed)
    results = [e.content for e in log if isinstance(e, BlockComplete) and e.kind == "tool_result"]
    assert results == ["Done.", '{"of":"parent"}']


async def test_a_cancel_ends_a_tree_of_which_nothing_is_in_a_worker(bus: LocalBus, client: Client, server: Any) -> None:
    run = await client.publish(bus.request("helper", tools=[{"name": "helper"}]))
    child = f"{run.id}~0"
    await key_of(server, child)
    await key_of(server, run.id)
    await client.cancel(run)
    assert isinstance(await last_of(run), Cancelled)
    async with aclosing(client.follow(child)) as events:
        assert isinstance([event async for event in events][-1], Cancelled)


async def test_the_deadline_of_a_parent_stands_while_it_is_away(bus: LocalBus, client: Client, server: Any) -> None:
    run = await client.publish(bus.request("helper", tools=[{"name": "helper"}], deadline_s=3))
    await key_of(server, run.id)
    end = await last_of(run)
    assert isinstance(end, RunFailedEvent)
    assert end.error.code == "deadline"


async def test_a_child_of_which_nothing_is_left_ends_its_parents_call(
    bus: LocalBus, client: Client, server: Any
) -> None:
    run = await client.publish(bus.request("brief", tools=[{"name": "brief"}]))
    child = await key_of(server, f"{run.id}~0")
    await key_of(server, run.id)
    await eventually(lambda: is_nothing(server))
    await server.delete(child)
    async with aclosing(run.events()) as events:
        log = [event async for event in events]
    assert [(e.status, e.error and e.error.code) for e in log if isinstance(e, ChildEnded)] == [("lost", "child_lost")]
    assert isinstance(log[-1], Completed)
