"""Script calls: alone, in a pipeline, and on a server that has never seen the script."""

from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import ResponseError

from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.run_scripts import run_script, run_scripts
from tokenbus.bus.server.server import Server


def acquire(keys: Keys, partition: int, owner: str = "a") -> scripts.ScriptCall:
    return scripts.acquire(keys.lease(partition, "g"), keys.topic(partition, "raw"), owner=owner, ttl_ms=60_000)


async def test_a_script_that_the_server_forgot_is_sent_whole(server: Server, keys: Keys):
    for _ in range(2):
        await server.client.script_flush()
        assert (await run_script(server, acquire(keys, 0)))[0]
    assert await server.client.script_exists(acquire(keys, 0).script.sha) == [True]


async def test_in_a_pipeline_each_forgotten_script_is_sent_whole_and_every_reply_is_its_own(server: Server, keys: Keys):
    await server.client.script_flush()
    await run_script(server, acquire(keys, 1, owner="other"))
    member = scripts.present(keys.members("g"), member="m", ttl_ms=60_000)
    replies = await run_scripts(server, [acquire(keys, 0), member, acquire(keys, 1), acquire(keys, 2), member])
    assert replies[0][0]
    assert replies[1] == replies[4] == [b"m"]
    assert replies[2] == [b"", b"other", b""]
    assert replies[3][0]
    assert await run_scripts(server, []) == []


async def test_the_cache_may_be_flushed_at_any_time(server: Server, keys: Keys):
    async def flush() -> None:
        while True:
            await server.client.script_flush()

    flushing = asyncio.create_task(flush())
    try:
        for _ in range(50):
            assert all(token for token, *_ in await run_scripts(server, [acquire(keys, p) for p in range(4)]))
    finally:
        flushing.cancel()
        await asyncio.gather(flushing, return_exceptions=True)


async def test_one_call_that_fails_is_an_error_and_the_others_have_run(server: Server, keys: Keys):
    await server.client.set(keys.members("wrong"), "no sorted set", px=60_000)
    wrong = scripts.present(keys.members("wrong"), member="m", ttl_ms=60_000)
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await run_scripts(server, [acquire(keys, 0), wrong, acquire(keys, 1)])
    for partition in (0, 1):
        assert await server.client.hget(keys.lease(partition, "g"), "owner") == b"a"
