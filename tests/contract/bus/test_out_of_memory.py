"""A server out of memory (`noeviction`): what it refuses is refused whole, and all goes on once there is room."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from redis.exceptions import ResponseError

from tests.contract.bus.state import everything
from tests.contract.bus.toys import Bench, working
from tests.servers import binary
from tests.waiting import eventually
from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.queue import Queue
from tokenbus.bus.scripts import Commit
from tokenbus.bus.send import send
from tokenbus.bus.server import Server, may_pass
from tokenbus_services.embedded import EmbeddedServer


@asynccontextmanager
async def small_server() -> AsyncGenerator[Server]:
    """A server of the test's own, whose memory may run out."""
    with EmbeddedServer(binary=binary()) as process:
        async with Server(process.url) as server:
            yield server


@asynccontextmanager
async def full(server: Server) -> AsyncGenerator[None]:
    """No room for anything until the block ends."""
    await server.client.config_set("maxmemory", 1)
    try:
        yield
    finally:
        await server.client.config_set("maxmemory", 0)


async def test_a_commit_that_does_not_fit_writes_nothing_of_itself():
    async with small_server() as server:
        keys = Keys("oom", 1)
        lease, stream = keys.lease(0, "g"), keys.topic(0, "raw")
        token = (await send(server, scripts.acquire(lease, stream, owner="a", ttl_ms=60_000, mirror="g")))[0].decode()
        end = (await server.client.xadd(stream, {"r": "1"})).decode()
        commit = Commit(lease, stream)
        commit.publish(keys.log("r"), "1-0", b"{}", [keys.topic(0, "visible")])
        call = commit.call(
            token=token, ttl_ms=60_000, begin="0-0", end=end, watermark=end, entries=1, size=1,
            mirror="g", entries_read=True, topic_entries=100,
        )  # fmt: skip
        before = await everything(server, keys)
        async with full(server):
            with pytest.raises(ResponseError) as refused:
                await send(server, call)
            assert may_pass(refused.value)
            assert await everything(server, keys) == before
        assert (await send(server, call))[0] == b"ok"


async def test_a_commit_that_begins_in_time_is_written_whole_though_it_fills_the_memory():
    """The server looks at its memory when a script first writes, and not again until the script ends."""
    async with small_server() as server:
        keys = Keys("oom", 1)
        lease, stream = keys.lease(0, "g"), keys.topic(0, "raw")
        token = (await send(server, scripts.acquire(lease, stream, owner="a", ttl_ms=60_000)))[0].decode()
        end = (await server.client.xadd(stream, {"r": "1"})).decode()
        commit = Commit(lease, stream)
        for n in range(200):
            commit.publish(keys.log("r"), f"1-{n}", bytes(50_000), [keys.topic(0, "visible")])
        call = commit.call(
            token=token, ttl_ms=60_000, begin="0-0", end=end, watermark=end, entries=1, size=1,
            mirror="", entries_read=True, topic_entries=1000,
        )  # fmt: skip
        await send(server, scripts.release(keys.lease(0, "other"), token=""))  # the connection's buffers are there
        used = (await server.client.info("memory"))["used_memory"]
        await server.client.config_set("maxmemory", used + 15_000_000)  # the call itself is 10 MB, its writes 20
        assert (await send(server, call))[0] == b"ok"
        assert await server.client.xlen(keys.log("r")) == await server.client.xlen(keys.topic(0, "visible")) == 200
        with pytest.raises(ResponseError, match=r"OOM|maxmemory"):
            await server.client.set("more", "x")


async def test_a_stage_and_a_queue_outlast_a_full_server_and_lose_and_double_nothing(caplog: pytest.LogCaptureFixture):
    async with small_server() as server:
        bench = Bench(server, Keys("oom", 2))
        [run] = bench.runs(0, 1)
        await bench.feed(0, *({run: b"+1"} for _ in range(20)))
        queue = Queue(server, group="g", streams=["{0}:q"], worker="a", lost=lambda item: None, beat_s=0.05, idle_s=0.5)
        async with working(bench.stage("a", max_records=1)) as worker:
            await queue.open()
            await server.client.xadd("{0}:q", {"n": "held"})
            item = await queue.read()
            async with full(server):
                await eventually(lambda: not worker.healthy)
                assert "maxmemory" in caplog.text
            await eventually(bench.through)
            await bench.feed(0, {run: b"end"})
            await eventually(bench.through)
            await eventually(lambda: worker.healthy)
            await queue.finish([item])
            await queue.close()
        await bench.check()
        assert await server.client.xlen("{0}:q") == 0
