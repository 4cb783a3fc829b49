"""The leak check of the `keys` fixture finds what it is there for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from uuid import uuid4

import pytest

from tests.leaks import check_keys, check_tasks
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server


@pytest.fixture
async def unchecked(server: Server) -> AsyncGenerator[Keys]:
    keys = Keys(f"leak{uuid4().hex[:12]}", 4)
    yield keys
    async for key in server.client.scan_iter(match=f"{keys.prefix}:*"):
        await server.client.unlink(key)


async def test_the_keys_of_a_deployment_are_no_leak(server: Server, unchecked: Keys):
    for stream in (unchecked.requests, unchecked.dead, unchecked.topic(3, "control"), unchecked.topic(0, "runs")):
        await server.client.xadd(stream, {"f": "v"})
    for mapping in (unchecked.meta, unchecked.lease(0, "parser"), unchecked.state(1, "parser")):
        await server.client.hset(mapping, "f", "v")
    await server.client.zadd(unchecked.members("parser"), {"a": 1})
    await check_keys(server, unchecked)


async def test_a_key_of_a_run_must_have_a_ttl(server: Server, unchecked: Keys):
    await server.client.hset(unchecked.run("r"), "status", "open")
    with pytest.raises(AssertionError, match="run:r has no TTL"):
        await check_keys(server, unchecked)
    await server.client.expire(unchecked.run("r"), 60)
    await check_keys(server, unchecked)


async def test_an_entry_that_is_still_pending_is_a_leak_unless_allowed(server: Server, unchecked: Keys):
    stream = unchecked.topic(0, "turns")
    entry = await server.client.xadd(stream, {"f": "v"})
    await server.client.xgroup_create(stream, "fetcher", id="0")
    await server.client.xreadgroup("fetcher", "c", {stream: ">"})
    with pytest.raises(AssertionError, match="1 entries"):
        await check_keys(server, unchecked)
    await check_keys(server, unchecked, may_leave_pending=True)
    await server.client.xack(stream, "fetcher", entry)
    await check_keys(server, unchecked)


async def test_a_task_that_still_runs_is_a_leak():
    before = asyncio.all_tasks()
    task = asyncio.create_task(asyncio.Event().wait())
    with pytest.raises(AssertionError, match="still running"):
        check_tasks(before)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert check_tasks(before)
