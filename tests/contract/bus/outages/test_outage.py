"""The server dies and restarts: nothing is lost or duplicated, and all workers and clients recover by themselves."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import RedisError, ResponseError

from tests.contract.bus.toys import Bench, working
from tests.servers import binary
from tests.waiting import eventually
from tokenbus.bus.control import ControlListener
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.server import Server
from tokenbus.bus.work_queue import QueueOptions, WorkQueue
from tokenbus.events.frames import Control, encode
from tokenbus_services.process.embedded_server import EmbeddedServer


@pytest.fixture
def mortal(tmp_path: Path) -> Generator[EmbeddedServer]:
    """A server of the test's own, that keeps what it wrote."""
    with EmbeddedServer(tmp_path / "data", binary=binary(), appendonly=True) as server:
        yield server


async def kill(server: EmbeddedServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    await eventually(lambda: not server.running)


async def test_a_stage_continues_at_its_offset_when_the_server_is_back(mortal: EmbeddedServer):
    async with Server(mortal.url) as server, Server(mortal.url) as other:
        bench = Bench(server, Keys("outage", 2))
        runs = [bench.runs(number, 2) for number in (0, 1)]

        async def feed(number: int, run: int, frame: bytes) -> None:
            await bench.feed(number, {runs[number][run]: frame})

        async with working(bench.stage("a", other)) as a, working(bench.stage("b", other)) as b:
            for round_ in range(3):
                await bench.feed(0, *({runs[0][round_ % 2]: b"+1"} for _ in range(30)))
                await feed(1, 0, b"+1")
                await kill(mortal)
                await eventually(lambda: not a.healthy and not b.healthy)
                await asyncio.to_thread(mortal.start)
                await eventually(lambda: _outlast(bench.through))
                await eventually(lambda: a.healthy and b.healthy and len(a.owned) == len(b.owned) == 1)
            for number in (0, 1):
                for run in (0, 1):
                    await feed(number, run, b"end")
            await eventually(bench.through)
        await bench.check()


async def _outlast(condition: object) -> bool:
    try:
        return await condition()  # pyright: ignore
    except (RedisError, OSError):
        return False


async def test_a_queue_and_a_listener_continue_when_the_server_is_back(mortal: EmbeddedServer):
    keys = Keys("outage", 2)
    received: list[str] = []
    async with Server(mortal.url) as server, Server(mortal.url) as other:
        listener = ControlListener(other, keys, lambda message: received.append(message.run))
        await listener.open()
        options = QueueOptions(group="g", worker="a", beat_s=0.05)
        queue = WorkQueue(other, options, [keys.topic(p, "turns") for p in (0, 1)])
        await queue.open()
        await server.client.xadd(keys.topic(0, "turns"), {"n": "held"})
        held = await queue.read()
        reading = asyncio.create_task(queue.read())
        await server.client.xadd(keys.topic(1, "control"), {"r": encode(Control("before"))})
        await eventually(lambda: received == ["before"])
        await kill(mortal)
        await eventually(lambda: not queue.healthy)
        finishing = asyncio.create_task(queue.finish([held]))
        await asyncio.to_thread(mortal.start)
        await finishing
        await eventually(lambda: _outlast(server.client.ping))
        await server.client.xadd(keys.topic(1, "control"), {"r": encode(Control("after"))})
        await server.client.xadd(keys.topic(1, "turns"), {"n": "new"})
        item = await asyncio.wait_for(reading, 60)
        assert item.fields == {b"n": b"new"}
        await queue.finish([item])
        await eventually(lambda: received == ["before", "after"])
        assert await server.client.xlen(keys.topic(0, "turns")) == 0
        await eventually(lambda: queue.healthy)
        await queue.close()
        await listener.close()


async def test_everything_closes_during_an_outage_of_the_server(mortal: EmbeddedServer, keys: Keys):
    async with Server(mortal.url) as server:
        bench = Bench(server, Keys("outage", 2))
        [run] = bench.runs(0, 1)
        await bench.feed(0, {run: b"+1"})
        worker = bench.stage("a")
        await worker.open()
        batches = await eventually(worker.read)
        queue = WorkQueue(server, QueueOptions(group="g", worker="a"), ["{0}:q"])
        await queue.open()
        listener = ControlListener(server, bench.keys, lambda message: None)
        await listener.open()
        mortal.stop()
        processing = asyncio.create_task(worker.process(batches))
        async with asyncio.timeout(60):
            await worker.close()
            await queue.close()
            await listener.close()
            with pytest.raises(ConnectionLost):
                await processing


async def test_what_a_server_takes_later_is_tried_until_then(server: Server, caplog: pytest.LogCaptureFixture):
    answers: list[Exception | str] = [ConnectionLost("gone"), ResponseError("LOADING wait"), OSError("reset"), "done"]

    async def attempt() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert await retry_until_available(server, attempt, what="the test") == "done"
    assert caplog.text.count("the test: trying again") == 1


async def test_what_is_at_fault_itself_is_not_tried_again(server: Server):
    async def attempt() -> None:
        raise ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")

    with pytest.raises(ResponseError):
        await retry_until_available(server, attempt, what="the test")


async def test_no_retry_happens_for_a_caller_who_left(server: Server):
    async def attempt() -> None:
        raise ConnectionLost("gone")

    with pytest.raises(ConnectionLost):
        await retry_until_available(server, attempt, what="the test", stop_if=lambda: True)


async def test_a_full_server_is_an_outage(server: Server, keys: Keys):
    stream = keys.topic(0, "raw")
    await server.client.config_set("maxmemory", 1)
    try:
        add = retry_until_available(server, lambda: server.client.xadd(stream, {"r": "1"}), what="the test")
        adding = asyncio.create_task(add)
        assert not await asyncio.wait({adding}, timeout=0.05) or not adding.done()
    finally:
        await server.client.config_set("maxmemory", 0)
    assert await adding
