"""The scripts' writes to the index of runs: each run is listed once, in any state, and nothing forever."""

from __future__ import annotations

import pytest

from tests.contract.bus.outages.test_out_of_memory import full, small_server
from tests.contract.bus.state import everything
from tests.contract.client.listed import TTL_MS, Listed
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.runs.index import LIFETIMES, MOST_FORGOTTEN
from tokenbus.bus.server.server import Server


@pytest.fixture
def listed(server: Server, keys: Keys) -> Listed:
    """Writes runs."""
    return Listed(server, keys)


async def places(listed: Listed, run: str) -> list[str]:
    partition = listed.keys.partition_of(run)
    keys = {"open": listed.keys.open_runs(partition), "ended": listed.keys.ended_runs(partition)}
    return [name for name, key in keys.items() if await listed.client.zscore(key, run) is not None]


async def test_a_run_is_listed_as_open_and_then_as_ended(listed: Listed) -> None:
    await listed.accept("a", 1000)
    assert await places(listed, "a") == ["open"]
    assert await listed.client.zscore(listed.keys.open_runs(listed.keys.partition_of("a")), "a") == 1000
    ended_ms = await listed.end("a")
    assert await places(listed, "a") == ["ended"]
    assert await listed.client.zscore(listed.keys.ended_runs(listed.keys.partition_of("a")), "a") == ended_ms


async def test_a_repeated_request_adds_nothing_to_the_index(listed: Listed) -> None:
    await listed.accept("a", 1000)
    before = await everything(listed.server, listed.keys)
    assert await listed.accept("a", 2000) == b"open"
    assert await everything(listed.server, listed.keys) == before
    await listed.end("a")
    assert await listed.accept("a", 3000) == b"completed"
    assert await places(listed, "a") == ["ended"]


async def test_a_run_that_takes_the_id_of_an_expired_one_is_listed_once(listed: Listed) -> None:
    await listed.accept("a", 1000)
    await listed.end("a")
    await listed.client.delete(listed.keys.run("a"))
    assert await listed.accept("a", 2000) == b"new"
    assert await places(listed, "a") == ["open"]


async def test_the_index_of_ended_runs_goes_with_their_records(listed: Listed) -> None:
    await listed.accept("a", 1000)
    await listed.end("a", keep_ms=200)
    key = listed.keys.ended_runs(listed.keys.partition_of("a"))
    assert 0 < await listed.client.pttl(key) <= 200

    async def gone() -> bool:
        return not await listed.client.exists(key)

    await eventually(gone)


async def test_a_run_that_ends_drops_some_of_those_that_expired_and_none_that_did_not(listed: Listed) -> None:
    names = [name for name in (f"r{n}" for n in range(1000)) if listed.keys.partition_of(name) == 0][:3]
    key = listed.keys.ended_runs(0)
    await listed.client.zadd(key, {f"old{n}": n for n in range(MOST_FORGOTTEN + 2)})
    for left, run in zip((2, 0, 0), names, strict=True):
        await listed.accept(run, 1000)
        await listed.end(run)
        assert sum(member.startswith(b"old") for member in await listed.client.zrange(key, 0, -1)) == left
    assert {run.decode() for run in await listed.client.zrange(key, 0, -1)} == set(names)


async def test_an_index_of_another_type_holds_up_neither_a_run_nor_its_end(listed: Listed) -> None:
    for name in (listed.keys.open_runs, listed.keys.ended_runs):
        await listed.client.set(name(listed.keys.partition_of("a")), "another program's", px=TTL_MS)
    assert await listed.accept("a", 1000) == b"new"
    await listed.end("a", "failed")
    assert await listed.client.hget(listed.keys.run("a"), "status") == b"failed"


async def test_a_run_with_another_runs_hash_is_still_removed_from_the_list(listed: Listed) -> None:
    await listed.accept("a", 1000)
    await listed.client.delete(listed.keys.run("a"))
    await listed.client.set(listed.keys.run("a"), "another program's", px=TTL_MS)
    with pytest.raises(Exception, match="WRONGTYPE"):  # of the helper, which reads the hash; the commit went through
        await listed.end("a")
    assert await places(listed, "a") == ["ended"]
    await listed.client.delete(listed.keys.run("a"))


async def test_a_run_ends_and_is_unlisted_on_a_full_server() -> None:
    async with small_server() as server:
        listed = Listed(server, Keys("full", 1))
        await listed.accept("a", 1000)
        await listed.client.hset(listed.keys.lease(0, "parser"), mapping={"token": 1, "offset": "0-0"})
        async with full(server):
            await listed.commit_end("a")
        assert await places(listed, "a") == ["ended"]


async def test_a_run_is_listed_by_its_tenant_too_and_the_index_expires_with_the_runs(listed: Listed) -> None:
    partition = listed.keys.partition_of("a")
    opened, ended = listed.keys.open_runs(partition, "acme"), listed.keys.ended_runs(partition, "acme")
    await listed.client.zadd(opened, {"lost": 5_000})
    await listed.accept("a", 5_000 + LIFETIMES * TTL_MS, "tenant", "acme")
    assert await listed.client.zrange(opened, 0, -1) == [b"a"], "an entry that no one ends there expires"
    assert 0 < await listed.client.pttl(opened) <= TTL_MS
    at_ms = await listed.end("a", keep_ms=200)
    assert await listed.client.zrange(ended, 0, -1, withscores=True) == [(b"a", at_ms)]
    assert 0 < await listed.client.pttl(ended) <= 200
    assert not await listed.client.exists(opened)


async def test_a_run_without_a_tenant_is_in_no_tenants_index(listed: Listed) -> None:
    await listed.accept("a", 1000)
    await listed.end("a")
    assert not [key async for key in listed.client.scan_iter(f"{listed.keys.prefix}:*:index:*:*")]


async def test_open_runs_cost_little_memory(listed: Listed) -> None:
    for n in range(500):
        await listed.accept(f"0199d2a0-7c00-7000-8000-{n:012}", 1_800_000_000_000 + n)
    sizes = [await listed.client.memory_usage(listed.keys.open_runs(p)) or 0 for p in range(listed.keys.partitions)]
    assert sum(sizes) < 500 * 160
