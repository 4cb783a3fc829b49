"""A key that a whole partition shares has the wrong type: that partition waits, and no other."""

from __future__ import annotations

import logging

import pytest

from tests.contract.bus.toys import GROUP, Bench, Outputs, working
from tests.waiting import eventually


@pytest.mark.parametrize("what", ["input", "output", "lease"])
async def test_a_shared_key_of_the_wrong_type_blocks_only_its_partition_until_it_is_fixed(
    bench: Bench, what: str, caplog: pytest.LogCaptureFixture
):
    client, keys = bench.server.client, bench.keys
    alien = {"input": keys.topic(0, "raw"), "output": keys.topic(0, "runs"), "lease": keys.lease(0, GROUP)}[what]
    await client.set(alien, "somebody's own")
    held, free = bench.runs(0, 1)[0], bench.runs(1, 1)[0]
    if what == "output":
        await bench.feed(0, {held: b"+1"}, {held: b"end"})
    await bench.feed(1, {free: b"+1"})
    stage = bench.stage("a")
    async with working(stage):

        async def reaches() -> bool:
            return await bench.offset(1) == bench.last[1]

        with caplog.at_level(logging.ERROR):
            await eventually(reaches)
            await bench.feed(1, {free: b"end"})
            await eventually(reaches)
            await eventually(lambda: any(alien in record.getMessage() for record in caplog.records))
        assert stage.blocked == [0]
        assert await client.getdel(alien) == b"somebody's own"
        if what != "output":
            await bench.feed(0, {held: b"+1"}, {held: b"end"})
        await eventually(bench.through)
        await eventually(lambda: stage.blocked == [])
    found = await Outputs.of(bench.server, keys, 0)
    assert found.logs[held] == Outputs.expected([{held: b"+1"}, {held: b"end"}]).logs[held]
    assert not await client.exists(keys.dead)
