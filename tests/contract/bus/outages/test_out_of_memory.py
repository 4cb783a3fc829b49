"""A server out of memory (`noeviction`): refused writes are refused whole, and work continues once there is room."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from redis.exceptions import ResponseError

from tests.commits import commit_call
from tests.contract.bus.state import everything
from tests.contract.bus.toys import Bench, working
from tests.run_calls import accept_call, cancel_call
from tests.servers import binary
from tests.waiting import eventually
from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts import Commit
from tokenbus.bus.server.error_replies import may_pass
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.bus.work_queue import QueueOptions, WorkQueue
from tokenbus_services.process.embedded_server import EmbeddedServer


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


async def test_a_commit_is_accepted_on_a_full_server_because_it_frees_memory():
    async with small_server() as server:
        keys = Keys("oom", 1)
        lease, stream = keys.lease(0, "g"), keys.topic(0, "raw")
        end = (await server.client.xadd(stream, {"r": "1"})).decode()
        async with full(server):
            acquire = scripts.acquire(lease, stream, owner="a", ttl_ms=60_000, mirror="g")
            token = (await run_script(server, acquire))[0].decode()
            assert await run_script(server, scripts.renew(lease, stream, token=token, ttl_ms=60_000)) == b"0-0"
            assert await run_script(server, scripts.present(keys.members("g"), member="a", ttl_ms=1000)) == [b"a"]
            assert await run_script(server, scripts.count(lease, field="loads")) == 1
            await run_script(server, scripts.note(lease, field="suspect", value="1-0 1"))
            commit = Commit(lease, stream)
            commit.publish(keys.log("r"), "1-0", b"{}", [keys.topic(0, "visible")])
            call = commit_call(commit, token=token, ttl_ms=60_000, end=end, watermark=end, mirror="g")
            assert (await run_script(server, call))[0] == b"ok"
            with pytest.raises(ResponseError, match="maxmemory"):
                await server.client.xadd(stream, {"r": "2"})


def append(keys: Keys, run: str, n: int, *, final: bool = False) -> scripts.ScriptCall:
    part = scripts.RawPart(run, keys.run(run), 1, n, final, b"frame", "w")
    return scripts.append_raw(keys.topic(0, "raw"), keys.lease(0, "normalizer"), [part])


async def test_a_full_server_takes_no_further_run_and_no_frame_but_what_ends_an_attempt_or_a_run():
    async with small_server() as server:
        keys = Keys("oom", 1)
        for run in ("ends", "cancelled"):
            assert await run_script(server, accept_call(keys, run)) == b"new"
        assert (await run_script(server, append(keys, "ends", 0)))[0] == b"ok"
        before = await everything(server, keys, at_once=False)
        async with full(server):
            with pytest.raises(ResponseError) as refused:
                await run_script(server, accept_call(keys, "late"))
            assert may_pass(refused.value)
            assert (await run_script(server, append(keys, "ends", 1)))[0] == b"full"
            assert await everything(server, keys, at_once=False) == before
            assert (await run_script(server, append(keys, "ends", 1, final=True)))[0] == b"ok"
            cancel = cancel_call(keys, "cancelled")
            assert await run_script(server, cancel) == b"cancelling"


async def test_the_last_tenth_of_the_memory_is_for_the_runs_that_are_open():
    async with small_server() as server:
        keys = Keys("oom", 1)
        assert await run_script(server, accept_call(keys, "open")) == b"new"
        used = (await server.client.info("memory"))["used_memory"]
        await server.client.config_set("maxmemory", round(used / 0.95))
        with pytest.raises(ResponseError) as refused:
            await run_script(server, accept_call(keys, "late"))
        assert may_pass(refused.value)
        assert (await run_script(server, append(keys, "open", 0)))[0] == b"ok"
        await server.client.config_set("maxmemory", round(used / 0.5))
        assert await run_script(server, accept_call(keys, "late")) == b"new"


async def test_a_commit_that_begins_in_time_is_written_whole_though_it_fills_the_memory():
    """The server looks at its memory when a script first writes, and not again until the script ends."""
    async with small_server() as server:
        keys = Keys("oom", 1)
        lease, stream = keys.lease(0, "g"), keys.topic(0, "raw")
        token = (await run_script(server, scripts.acquire(lease, stream, owner="a", ttl_ms=60_000)))[0].decode()
        end = (await server.client.xadd(stream, {"r": "1"})).decode()
        commit = Commit(lease, stream)
        for n in range(200):
            commit.publish(keys.log("r"), f"1-{n}", bytes(50_000), [keys.topic(0, "visible")])
        call = commit_call(commit, token=token, ttl_ms=60_000, end=end, watermark=end)
        await run_script(
            server, scripts.release(keys.lease(0, "other"), token="")
        )  # the connection's buffers are there
        used = (await server.client.info("memory"))["used_memory"]
        await server.client.config_set("maxmemory", used + 15_000_000)  # the call itself is 10 MB, its writes 20
        assert (await run_script(server, call))[0] == b"ok"
        assert await server.client.xlen(keys.log("r")) == await server.client.xlen(keys.topic(0, "visible")) == 200
        with pytest.raises(ResponseError, match=r"OOM|maxmemory"):
            await server.client.set("more", "x")


async def test_a_stage_and_a_queue_work_on_though_the_server_is_full():
    async with small_server() as server:
        bench = Bench(server, Keys("oom", 2))
        [run] = bench.runs(0, 1)
        await bench.feed(0, *({run: b"+1"} for _ in range(20)))
        queue = WorkQueue(server, QueueOptions(group="g", worker="a", beat_s=0.05, idle_s=0.5), ["{0}:q"])
        async with working(bench.stage("a", max_records=1)) as worker:
            await queue.open()
            await server.client.xadd("{0}:q", {"n": "held"})
            item = await queue.read()
            await bench.feed(0, {run: b"end"})
            async with full(server):
                await eventually(bench.through)
                assert worker.healthy
                await queue.requeue([item])
                item = await queue.read()
                await queue.finish([item])
            await queue.close()
        await bench.check()
        assert await server.client.xlen("{0}:q") == 0
