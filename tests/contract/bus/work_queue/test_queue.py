"""The work queue: competing consumers, kept alive, claimed, handed back; nothing swallowed (guarantee 4)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import RedisError

from tests.censoring import FORBIDDEN, censoring
from tests.contract.bus.faults import Gate
from tests.servers import binary
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import Liveness
from tokenbus.bus.server.server import Server
from tokenbus.bus.work_queue import BLOCK_MS, LONG_MS, QueueItem, QueueOptions, WorkQueue, reader
from tokenbus.bus.work_queue import consumer as writes
from tokenbus.events.frames import TurnWork, encode
from tokenbus_services.process.embedded_server import EmbeddedServer

GROUP = "g"
IDLE_S = 0.25
BEAT_S = 0.05


class Scene:
    """Work queues in four partitions."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self.server = server
        self.client = server.client
        self.streams = [keys.topic(p, "turns") for p in range(keys.partitions)]

    def queue(
        self, worker: str, server: Server | None = None, *, liveness: Liveness | None = None, **options: Any
    ) -> WorkQueue:
        quick: dict[str, Any] = {"idle_s": IDLE_S, "beat_s": BEAT_S}
        how = QueueOptions(group=GROUP, worker=worker, **quick | options)
        return WorkQueue(server or self.server, how, self.streams, liveness=liveness)

    async def put(self, *names: str, stream: int = 0) -> None:
        for name in names:
            await self.client.xadd(self.streams[stream], {"n": name})

    async def left(self) -> int:
        return sum([await self.client.xlen(stream) for stream in self.streams])

    async def pending(self) -> dict[str, int]:
        """Consumer -> how many entries it has."""
        counts: dict[str, int] = {}
        for stream in self.streams:
            for consumer in (await self.client.xpending(stream, GROUP))["consumers"]:
                name = consumer["name"].decode()
                counts[name] = counts.get(name, 0) + consumer["pending"]
        return counts

    async def consumers(self) -> set[str]:
        return {c["name"].decode() for stream in self.streams for c in await self.client.xinfo_consumers(stream, GROUP)}


def name(item: QueueItem) -> str:
    return item.fields[b"n"].decode()


@asynccontextmanager
async def opened(queue: WorkQueue) -> AsyncGenerator[WorkQueue]:
    await queue.open()
    try:
        yield queue
    finally:
        await queue.close()


@asynccontextmanager
async def worked(queue: WorkQueue, work: Callable[[QueueItem], Any]) -> AsyncGenerator[None]:
    """A worker that finishes each item after ``work``."""

    async def run() -> None:
        while True:
            for item in await queue.read_ready():
                work(item)
                await queue.finish([item])

    async with opened(queue):
        task = asyncio.create_task(run())
        try:
            yield
        finally:
            await queue.stop_reading()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def scene(server: Server, keys: Keys) -> Scene:
    return Scene(server, keys)


@pytest.fixture
async def other(server: Server) -> AsyncGenerator[Server]:
    """A second connection, for a worker that is to be frozen."""
    async with Server(server.url) as other:
        yield other


async def test_each_item_goes_to_one_worker_and_is_gone_when_finished(scene: Scene):
    done: list[str] = []
    async with (
        worked(scene.queue("a"), lambda item: done.append(name(item))),
        worked(scene.queue("b", count=5), lambda item: done.append(name(item))),
    ):
        names = [f"{stream}-{n}" for stream in range(4) for n in range(25)]
        for each in names:
            await scene.put(each, stream=int(each[0]))
        await eventually(lambda: len(done) == 100)
    assert sorted(done) == sorted(names)
    assert await scene.left() == 0


async def test_an_item_has_its_stream_its_fields_and_whether_it_is_new(scene: Scene):
    async with opened(scene.queue("a")) as queue:
        await scene.put("x", stream=2)
        item = await queue.read()
        assert (item.stream, item.fields, item.deliveries) == (scene.streams[2], {b"n": b"x"}, 1)
        assert queue.claimed == 1
        await queue.finish([item])
        assert queue.claimed == 0


async def test_no_more_is_read_than_waiters_need_and_one_read_returns(scene: Scene):
    async with opened(scene.queue("a", count=2)) as queue:
        for stream in range(4):
            await scene.put(*"12345", stream=stream)
        assert await scene.pending() == {}
        items = await queue.read_ready()
        assert len(items) == queue.claimed == 8
        await eventually(lambda: _not_blocked(scene))
        assert await scene.pending() == {"a": 8}
        await queue.finish(items)
        for _ in range(12):
            await queue.finish([await queue.read()])


async def test_two_may_wait_at_once_and_both_get_something(scene: Scene):
    async with opened(scene.queue("a")) as queue:
        reading = [asyncio.create_task(queue.read()) for _ in range(3)]
        await scene.put("1", "2", "3")
        items = await asyncio.wait_for(asyncio.gather(*reading), 60)
        assert sorted(map(name, items)) == ["1", "2", "3"]
        await queue.finish(items)


async def test_a_read_that_was_cancelled_takes_no_item_along(scene: Scene):
    async with opened(scene.queue("a")) as queue:
        reading = asyncio.create_task(queue.read())
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await scene.put("1")
        item = await queue.read()
        assert name(item) == "1"
        await queue.finish([item])


async def test_a_heartbeat_keeps_work_that_takes_longer_than_the_idle_time(scene: Scene):
    lost: list[QueueItem] = []
    idle_s = 1.0  # long enough for a beat of 50 ms on a loaded machine
    async with opened(scene.queue("a", on_claimed_away=lost.append, idle_s=idle_s)) as a:
        await scene.put("long")
        item = await a.read()
        async with opened(scene.queue("b", idle_s=idle_s)) as b:
            waiting = asyncio.create_task(b.read())
            beats: set[int] = set()

            async def kept() -> bool:
                [p] = await scene.client.xpending_range(item.stream, GROUP, "-", "+", 1)
                assert p["consumer"] == b"a"
                beats.add(int(p["time_since_delivered"] < idle_s * 1000))
                return asyncio.get_running_loop().time() > begin + 2 * idle_s

            begin = asyncio.get_running_loop().time()
            await eventually(kept)
            assert beats == {1}
            assert not waiting.done()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await a.finish([item])
    assert lost == []


async def test_items_of_a_read_that_takes_long_are_not_claimed_before_they_arrive(
    scene: Scene, other: Server, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reader, "LONG_READ_S", BEAT_S)
    arrives, read, idle_s = asyncio.Event(), other.client.xreadgroup, 1.0

    async def slow_read(*args: Any, **options: Any) -> Any:
        found = await read(*args, **options)
        if found:
            await arrives.wait()
        return found

    monkeypatch.setattr(other.client, "xreadgroup", slow_read)
    async with opened(scene.queue("slow", other, idle_s=idle_s)) as slow:
        reading = asyncio.create_task(slow.read())
        await scene.put("beside a huge one")

        async def assigned() -> bool:
            return await scene.pending() == {"slow": 1}

        await eventually(assigned)
        async with opened(scene.queue("b", idle_s=idle_s)) as b:
            waiting, until = asyncio.create_task(b.read()), asyncio.get_running_loop().time() + 2 * idle_s

            async def kept() -> bool:
                assert await assigned()
                return asyncio.get_running_loop().time() > until

            try:
                await eventually(kept)
            finally:
                arrives.set()
            item = await reading
            assert item.deliveries == 1
            assert await slow.still_has(item)
            await slow.finish([item])
            assert not waiting.done()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
    assert await scene.left() == 0


async def test_a_dead_workers_items_go_to_another_and_say_so(scene: Scene, other: Server):
    gate = Gate(other)
    dead = scene.queue("dead", other)
    await dead.open()
    await scene.put("1", "2")
    await dead.read()
    gate.shut()
    async with opened(scene.queue("b")) as b:
        found = {name(item): item for item in [await b.read(), await b.read()]}
        assert found["1"].deliveries == 2
        await b.finish(list(found.values()))
    gate.open()
    await dead.close()


async def test_a_worker_that_has_failed_claims_and_keeps_nothing_more(scene: Scene):
    liveness = Liveness()
    async with opened(scene.queue("a", liveness=liveness)) as a:
        await scene.put("held")
        await a.read()
        liveness.failed = True  # the supervisor, before the worker hands over
        reading = asyncio.create_task(a.read())
        await scene.put("new")
        async with opened(scene.queue("b")) as b:
            found = {name(item): item for item in [await b.read(), await b.read()]}
            assert {item: each.deliveries for item, each in found.items()} == {"held": 2, "new": 1}
            await b.finish(list(found.values()))
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_a_zombie_that_wakes_is_notified_of_lost_items_and_can_neither_finish_nor_return_them(
    scene: Scene, other: Server
):
    gate = Gate(other)
    lost: list[QueueItem] = []
    zombie = scene.queue("zombie", other, on_claimed_away=lost.append)
    async with opened(zombie):
        await scene.put("x")
        item = await zombie.read()
        gate.shut()
        async with opened(scene.queue("b")) as b:
            taken = await b.read()
            assert taken.entry_id == item.entry_id
            gate.open()
            await zombie.hand_back([QueueItem(item.stream, item.entry_id, {}, 1)])
            await zombie.finish([QueueItem(item.stream, item.entry_id, {}, 1)])
            assert await scene.pending() == {"b": 1}
            assert await scene.left() == 1
            await b.finish([taken])


async def test_a_zombie_that_only_holds_items_is_notified_of_its_loss(scene: Scene, other: Server):
    gate = Gate(other)
    lost: list[QueueItem] = []
    async with opened(scene.queue("zombie", other, on_claimed_away=lost.append)) as zombie:
        await scene.put("x")
        item = await zombie.read()
        gate.shut()
        async with opened(scene.queue("b")) as b:
            taken = await b.read()
            gate.open()
            await eventually(lambda: lost == [item])
            assert zombie.claimed == 0
            await b.finish([taken])


async def test_a_lost_callback_that_fails_does_not_end_the_heartbeat(scene: Scene):
    def lost(item: QueueItem) -> None:
        raise LookupError(item.entry_id)

    async with opened(scene.queue("a", on_claimed_away=lost)) as a:
        await scene.put("taken", "kept")
        taken, kept = await a.read(), await a.read()
        await scene.client.xclaim(taken.stream, GROUP, "b", 0, [taken.entry_id])
        await eventually(lambda: a.claimed == 1)
        await scene.client.xclaim(kept.stream, GROUP, "a", 0, [kept.entry_id], idle=60_000, justid=True)
        await eventually(lambda: _idle_below(scene, kept, 1000))
        await a.finish([kept])
        await scene.client.xack(taken.stream, GROUP, taken.entry_id)


async def _idle_below(scene: Scene, item: QueueItem, limit_ms: int) -> bool:
    [p] = await scene.client.xpending_range(item.stream, GROUP, item.entry_id, item.entry_id, 1)
    return p["time_since_delivered"] < limit_ms


async def test_what_is_handed_back_another_takes_under_the_same_id_as_if_new(scene: Scene):
    async with opened(scene.queue("a", idle_s=3600.0)) as a, opened(scene.queue("b", idle_s=3600.0)) as b:
        await scene.put("x")
        item = await a.read()
        await a.hand_back([item])
        assert a.claimed == 0
        again = await asyncio.wait_for(b.read(), 60)
        assert (again.entry_id, again.deliveries) == (item.entry_id, 1)
        await b.finish([again])


async def test_a_shutdown_returns_items_that_were_read_ahead(scene: Scene):
    a = scene.queue("a", count=3)
    await a.open()
    await scene.put("1", "2", "3")
    first = await a.read()
    await a.stop_reading()
    assert a.claimed == 1
    async with opened(scene.queue("b", idle_s=3600.0)) as b:
        others = [await b.read(), await b.read()]
        assert sorted(map(name, others)) == ["2", "3"]
        assert [item.deliveries for item in others] == [1, 1]
        await b.finish(others)
    await a.finish([first])
    await a.close()
    assert await scene.consumers() <= {"-"}


async def test_a_shutdown_loses_no_item_of_a_pending_read(scene: Scene):
    """The server may answer a blocked read after the worker decided to stop."""
    for _ in range(5):
        queue = scene.queue("a")
        await queue.open()
        reading = asyncio.create_task(queue.read())
        await eventually(lambda: _blocked(scene))
        stopping = asyncio.create_task(queue.stop_reading())
        await scene.put("x")
        await stopping
        if reading.done():
            await queue.finish([reading.result()])
        else:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await queue.close()
        async with opened(scene.queue("b")) as b:
            while await scene.left():
                await b.finish([await asyncio.wait_for(b.read(), 60)])


async def _blocked(scene: Scene) -> bool:
    return bool((await scene.client.info("clients"))["blocked_clients"])


async def _not_blocked(scene: Scene) -> bool:
    return not await _blocked(scene)


async def test_items_whose_delivery_was_lost_on_the_way_are_not_lost(scene: Scene):
    """The server gave them to the worker, but the reply never arrived; closing must not delete them with it."""
    a = scene.queue("a")
    await a.open()
    await scene.put("x")
    await scene.client.xreadgroup(GROUP, "a", dict.fromkeys(scene.streams, ">"))
    await a.close()
    async with opened(scene.queue("b")) as b:
        item = await b.read()
        assert (name(item), item.deliveries) == ("x", 2)
        await b.finish([item])


async def test_groups_that_vanished_are_created_again_and_entries_added_meanwhile_are_found(scene: Scene):
    async with opened(scene.queue("a")) as a:
        await scene.put("old")
        old = await a.read()
        await scene.client.delete(*scene.streams)
        await scene.client.xadd(old.stream, {"n": "new"}, id=old.entry_id)  # even an id may come again
        item = await a.read()
        assert name(item) == "new"
        await a.finish([item])
        await a.finish([old])
        assert a.claimed == 0
        await eventually(lambda: a.healthy)


async def test_long_dead_consumers_are_removed_unless_they_have_pending_entries(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tokenbus.bus.work_queue.queue.DEAD_CONSUMER_MS", 0)
    async with opened(scene.queue("a", idle_s=60.0)):
        await scene.put("x")
        await scene.client.xreadgroup(GROUP, "busy", {scene.streams[0]: ">"})
        await scene.client.xgroup_createconsumer(scene.streams[1], GROUP, "idle")
        await eventually(lambda: _are(scene, {"busy"}))
    await scene.client.xgroup_delconsumer(scene.streams[0], GROUP, "busy")


async def _are(scene: Scene, names: set[str]) -> bool:
    return await scene.consumers() - {"a"} == names


async def test_after_an_outage_no_worker_counts_as_dead_before_it_could_send_a_heartbeat(scene: Scene, other: Server):
    """No heartbeat arrived during the outage, so items that look idle are not."""
    gate = Gate(other)
    async with opened(scene.queue("slow", other)) as slow:
        await scene.put("x")
        item = await slow.read()
        async with opened(scene.queue("b")) as b:
            reading = asyncio.create_task(b.read())
            gate.shut()
            await scene.client.xclaim(item.stream, GROUP, "slow", 0, [item.entry_id], idle=0, justid=True)
            await eventually(lambda: _cut(scene, b))
            await scene.client.xclaim(item.stream, GROUP, "slow", 0, [item.entry_id], idle=60_000, justid=True)
            gate.open()
            await eventually(lambda: _idle_below(scene, item, 1000))
            assert await scene.pending() == {"slow": 1}
            assert not reading.done()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await slow.finish([item])


async def test_after_the_server_stalled_no_worker_counts_as_dead_before_it_could_send_a_heartbeat(keys: Keys):
    """No connection broke, and no command failed: only all of them took long."""
    clock = asyncio.get_running_loop().time
    with EmbeddedServer(binary=binary()) as process:
        async with Server(process.url) as one, Server(process.url) as two, Server(process.url) as three:
            scene = Scene(three, keys)
            holder = scene.queue("holder", one, on_claimed_away=lambda item: lost.append(name(item)), beat_s=0.1)
            lost: list[str] = []
            async with opened(holder):
                await scene.put("x")
                item = await holder.read()
                async with opened(scene.queue("eager", two, beat_s=0.1)) as eager:
                    reading = asyncio.create_task(eager.read())
                    await eventually(lambda: _blocked(scene))
                    os.kill(process.pid, signal.SIGSTOP)
                    until = clock() + BLOCK_MS / 1000 + 2 * IDLE_S
                    await eventually(lambda: clock() > until)
                    os.kill(process.pid, signal.SIGCONT)
                    await scene.put("y")
                    assert name(await reading) == "y"
                    await eventually(lambda: _idle_below(scene, item, 100))
                    assert (await scene.pending())["holder"] == 1
                    assert lost == []
                await holder.finish([item])


async def _cut(scene: Scene, queue: WorkQueue) -> bool:
    """Cut all connections until the queue has noticed."""
    try:
        await scene.client.client_kill_filter(_type="normal", skipme=True)
    except RedisError:
        return False
    return not queue.healthy


async def test_before_a_finish_is_retried_its_work_is_written_again(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    """The server may have failed over, to one that has the item and forgot what it came to."""
    seen: list[str] = []
    sends = writes.run_scripts
    async with opened(scene.queue("a")) as queue:
        await scene.put("x")
        item = await queue.read()

        async def again() -> None:
            seen.append(f"{await scene.left()} left")

        async def lost_on_the_way(*args: Any) -> Any:
            monkeypatch.setattr(writes, "run_scripts", sends)
            raise ConnectionLost("failed over")

        monkeypatch.setattr(writes, "run_scripts", lost_on_the_way)
        await queue.finish([item], again=again)
        assert (seen, await scene.left()) == (["1 left"], 0)
        await scene.put("y")
        await queue.finish([await queue.read()], again=again)
        assert (seen, await scene.left()) == (["1 left"], 0)


async def test_a_defect_is_reported_and_does_not_end_the_reading(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    client, read = scene.client, scene.client.xreadgroup
    failed = asyncio.Event()

    async def fail_once(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(client, "xreadgroup", read)
        failed.set()
        raise ValueError("a defect")

    monkeypatch.setattr(client, "xreadgroup", fail_once)
    done: list[str] = []
    async with worked(scene.queue("a"), lambda item: done.append(name(item))):
        await failed.wait()
        await scene.put("1")
        await eventually(lambda: done == ["1"])
    [logged] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert logged.exc_info
    assert isinstance(logged.exc_info[1], ValueError)


@pytest.mark.parametrize("mark", [None, False, True], ids=["unmarked", "not begun", "begun"])
async def test_the_next_worker_learns_whether_a_lost_one_had_begun_an_item(
    scene: Scene, other: Server, mark: bool | None
):
    gate = Gate(other)
    lost = scene.queue("lost", other)
    await lost.open()
    await scene.put("1")
    item = await lost.read()
    if mark is not None:
        assert await lost.mark(item, begun=mark)
    gate.shut()
    async with opened(scene.queue("b")) as b:
        item = await b.read()
        assert (item.begun, item.deliveries) == {None: (False, 2), False: (False, 1), True: (True, 2)}[mark]
        await b.finish([item])
    gate.open()
    await lost.close()


async def test_an_item_that_had_begun_stays_so_while_workers_that_hold_it_stop(scene: Scene):
    await scene.put("1")
    async with opened(scene.queue("a")) as a:
        item = await a.read()
        assert await a.mark(item, begun=True)
    for _ in range(2):  # they get it, and stop before they read it
        idle = scene.queue("idle")
        async with opened(idle):
            reading = asyncio.create_task(idle.read())
            await eventually(lambda idle=idle: idle.claimed)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
    async with opened(scene.queue("b")) as b:
        item = await b.read()
        assert item.begun
        await b.finish([item])


async def test_closing_twice_or_unopened_does_no_harm(scene: Scene):
    queue = scene.queue("a")
    await queue.close()
    async with opened(scene.queue("b")) as b:
        await b.close()


async def test_a_worker_that_reads_what_waited_takes_the_rest_by_turn(scene: Scene):
    """However long the reads themselves take, which on a busy event loop is long."""
    queue = scene.queue("a", fair="turns")
    await queue.open()
    try:
        for tenant, run in [*(("big", f"big{n}") for n in range(8)), ("small", "first")]:
            last = await scene.client.xadd(scene.streams[0], {run: encode(TurnWork(run, 0, 1, tenant=tenant))})

        async def waited() -> bool:
            seconds, micros = await scene.client.time()
            return seconds * 1000 + micros // 1000 >= int(last.partition(b"-")[0]) + LONG_MS

        await eventually(waited)
        items = [await queue.read() for _ in range(9)]
        runs = [next(iter(item.fields)).decode() for item in items]
        assert runs[0] == "big0"
        assert "first" in runs[1:3]
        assert [run for run in runs if run != "first"] == [f"big{n}" for n in range(8)]
        await queue.finish(items)
    finally:
        await queue.close()


@pytest.mark.parametrize("defect", [False, True], ids=["reported", "and the report fails"])
async def test_an_item_that_breaks_each_connection_is_isolated_and_others_are_processed(
    scene: Scene, server_url: str, defect: bool
):
    done, apart = list[tuple[str, int]](), list[QueueItem]()

    async def unreadable(item: QueueItem, error: Exception) -> None:
        apart.append(item)
        if defect:
            raise ValueError("a defect")

    for n in range(4):
        await scene.put(f"before-{n}", stream=n)
    await scene.client.xadd(scene.streams[0], {"n": FORBIDDEN})
    for n in range(4):
        await scene.put(f"after-{n}", stream=n)
    async with censoring(server_url) as url, Server(url) as proxied:
        queue = scene.queue("a", proxied, count=4, unreadable=unreadable)
        async with worked(queue, lambda item: done.append((name(item), item.deliveries))):
            await eventually(lambda: len(done) == 8)
            await eventually(lambda: bool(apart))

            async def none_left() -> bool:
                return await scene.left() == 0

            await eventually(none_left)
    assert {each for each, _ in done} == {f"{when}-{n}" for when in ("before", "after") for n in range(4)}
    assert [(item.stream, item.fields) for item in apart] == [(scene.streams[0], {b"n": b""})]


async def test_an_item_that_breaks_each_connection_is_given_up_by_one_worker_however_long_that_takes(
    scene: Scene, server_url: str
):
    apart, done = list[str](), list[QueueItem]()

    async def unreadable(item: QueueItem, error: Exception) -> None:
        apart.append(item.entry_id)
        await asyncio.sleep(4 * IDLE_S)

    async with censoring(server_url) as url, Server(url) as one, Server(url) as two:
        queues = [scene.queue(w, proxied, unreadable=unreadable) for w, proxied in (("a", one), ("b", two))]
        async with worked(queues[0], done.append), worked(queues[1], done.append):
            await scene.client.xadd(scene.streams[0], {"n": FORBIDDEN})

            async def none_left() -> bool:
                return await scene.left() == 0

            await eventually(none_left)
    assert (len(apart), done) == (1, [])


async def test_a_worker_reads_streams_that_it_does_not_prefer_only_if_no_other_worker_reads_them(scene: Scene):
    first: list[str] = []
    second: list[str] = []
    halves = set(scene.streams[:2]), set(scene.streams[2:])
    ours, theirs = (scene.queue(w, prefers=half.__contains__) for w, half in zip("ab", halves, strict=True))
    async with worked(ours, lambda item: first.append(item.stream)):
        async with worked(theirs, lambda item: second.append(item.stream)):
            for n in range(10):
                for stream in range(4):
                    await scene.put(str(n), stream=stream)
                await eventually(lambda n=n: len(first) + len(second) == 4 * (n + 1))
        # Either may find an item in the instant in which the other is between two reads.
        assert sum(stream in halves[0] for stream in first) >= 15
        assert sum(stream in halves[1] for stream in second) >= 15
        done = len(first)
        for n in range(3):  # no worker prefers these now
            await scene.put(str(n), stream=3)
            await eventually(lambda n=n: len(first) == done + n + 1)
    assert await scene.left() == 0
