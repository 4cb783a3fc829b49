"""The index of runs after lost writes and expired hashes: the parser's clock makes it whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from tests.contract.client.listed import Listed
from tests.services.parser.test_timeouts import open_run
from tests.waiting import eventually
from tokenbus import Client
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage.stage import Stage
from tokenbus_services.parser import index_keeper
from tokenbus_services.parser.index_keeper import IndexKeeper
from tokenbus_services.parser.timeouts import TimeoutClock
from tokenbus_services.settings import LimitSettings, Settings, StageSettings

KEEP_MS = 60_000
OPEN_MS = 60_000


async def listed_runs(server: Server, keys: Keys, name: str = "open") -> set[str]:
    key_of = keys.open_runs if name == "open" else keys.ended_runs
    found = [await server.client.zrange(key_of(partition), 0, -1) for partition in range(keys.partitions)]
    return {run.decode() for members in found for run in members}


async def test_a_run_that_is_missing_from_the_index_is_listed_by_the_parsers_clock(
    server: Server, server_url: str, keys: Keys
) -> None:
    run, logic = await open_run(server, keys, 1, deadline_ms=0)
    settings = Settings(
        prefix=keys.prefix,
        partitions=keys.partitions,
        stages=StageSettings(tick_s=0.02),
        limits=LimitSettings(silent_run_s=0.5),
    )
    clock = TimeoutClock(server, cast("Stage", SimpleNamespace(owned=[1])), settings, {1: logic})
    await clock.open()

    async def is_listed() -> bool:
        return await listed_runs(server, keys) == {run}

    await eventually(is_listed)
    await clock.close()
    async with Client(server_url, prefix=keys.prefix, partitions=keys.partitions) as bus:
        infos = [info async for info in bus.runs(provider="anthropic")]
    assert [(info.run, info.model, info.accepted_ms) for info in infos] == [(run, "m", logic.states()[0].accepted_ms)]


async def test_a_run_that_ended_during_the_listing_is_not_listed_as_open(server: Server, keys: Keys) -> None:
    run, logic = await open_run(server, keys, 0, deadline_ms=0)
    await server.client.hset(keys.run(run), "status", "completed")
    await IndexKeeper(server, keys, keep_ms=KEEP_MS, open_ms=OPEN_MS).look({0: logic.states()})
    assert await listed_runs(server, keys) == set()


async def test_what_is_listed_as_open_and_is_not_is_unlisted_page_by_page_and_no_open_run_with_it(
    server: Server, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_keeper, "PAGE", 3)
    listed = Listed(server, keys)
    names = [name for name in (f"r{n}" for n in range(1000)) if keys.partition_of(name) == 0][:12]
    for n, run in enumerate(names):
        await listed.accept(run, 1000 + n)
    for run in names[::3]:  # its hash has expired
        await server.client.delete(keys.run(run))
    for run in names[1::3]:  # it ended, and the index could not be written
        await server.client.hset(keys.run(run), "status", "failed")
    keeper = IndexKeeper(server, keys, keep_ms=KEEP_MS, open_ms=OPEN_MS)
    for _ in range(12):
        await keeper.look({0: []})
    assert await listed_runs(server, keys) == set(names[2::3])
    assert await listed_runs(server, keys, "ended") == set(names[1::3])


async def test_an_index_of_another_type_holds_up_nothing(server: Server, keys: Keys) -> None:
    _, logic = await open_run(server, keys, 0, deadline_ms=0)
    await server.client.set(keys.open_runs(0), "another program's")
    await IndexKeeper(server, keys, keep_ms=KEEP_MS, open_ms=OPEN_MS).look({0: logic.states()})
    assert await server.client.get(keys.open_runs(0)) == b"another program's"
