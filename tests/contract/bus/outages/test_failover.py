"""A real fail-over: Sentinel, or the Cluster itself, promotes a replica, with all writes of its master or without."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from redis.exceptions import RedisError

from tests.contract.bus.outages.test_lost_writes import ended_by_loss, says
from tests.contract.bus.toys import Bench, working
from tests.servers import sentinel_group
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage.commits import LOST_WRITES


async def test_a_stage_continues_after_a_fail_over(tmp_path: Path):
    with sentinel_group(tmp_path) as group:
        async with Server(group.url) as server:
            bench = Bench(server, Keys("failover", 2))
            [a], [b] = bench.runs(0, 1), bench.runs(1, 1)
            await bench.feed(0, *({a: b"+1"} for _ in range(10)))
            await bench.feed(1, {b: b"+1"})
            async with working(bench.stage("a")) as worker:
                await eventually(bench.through)
                await asyncio.to_thread(group.master.stop)
                await eventually(lambda: not worker.healthy)
                await eventually(lambda: worker.healthy)
                await bench.feed(0, {a: b"+1"}, {a: b"end"})
                await bench.feed(1, {b: b"end"})
                await eventually(bench.through)
            await bench.check()


async def test_runs_that_lost_events_in_a_fail_over_end_and_others_continue(tmp_path: Path):
    with sentinel_group(tmp_path) as group:
        async with Server(group.url) as server:
            bench = Bench(server, Keys("failover", 2))
            affected, spared = bench.runs(0, 2)
            await bench.feed(0, {affected: b"+1", spared: b"+1"})
            async with working(bench.stage("a")) as worker:
                await eventually(bench.through)
                await server.client.wait(1, 5000)
                await asyncio.to_thread(group.part)
                await bench.feed(0, {affected: b"+1"}, {affected: b"+2"})
                await eventually(bench.through)
                before = await says(bench, affected)
                await asyncio.to_thread(group.master.stop)
                await eventually(lambda: not worker.healthy)
                await eventually(lambda: worker.healthy)
                await eventually(lambda: ended_by_loss(bench, affected))
                await bench.feed(0, {affected: b"+3"}, {spared: b"+4"}, {spared: b"end"})
                await eventually(bench.through)
            assert [what for _, what in before] == [1, 2, 4]
            assert await says(bench, affected) == [*before, ("1-3", LOST_WRITES.code)]
            assert [what for _, what in await says(bench, spared)] == [1, 5, "end"]


async def test_nothing_is_asked_of_a_master_that_was_stopped_and_has_been_replaced(tmp_path: Path):
    with sentinel_group(tmp_path) as group:
        async with Server(group.url) as server:
            client, old = server.client, group.master.pid

            async def answers() -> set[bytes]:
                """Of several connections at once."""
                return set(await asyncio.gather(*(client.get("which") for _ in range(4))))

            async def of_the_new_one() -> bool:
                try:
                    return await client.config_get("port") == {"port": str(group.replica.port)}
                except (RedisError, OSError):
                    return False

            await client.set("which", "old")
            await client.wait(1, 5000)
            assert await answers() == {b"old"}
            os.kill(old, signal.SIGSTOP)
            try:
                await eventually(of_the_new_one)
                await client.set("which", "new")
            finally:
                os.kill(old, signal.SIGCONT)
            assert await answers() == {b"new"}
