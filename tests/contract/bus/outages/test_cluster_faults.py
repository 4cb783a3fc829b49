"""A node of a Cluster stalls, or its replica follows it: partitions of the others continue."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager

import pytest
from redis.asyncio.cluster import NodesManager
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as NoReply

from tests.contract.bus.outages.test_lost_writes import ended_by_loss, says
from tests.contract.bus.test_cluster import ClusterBench
from tests.contract.bus.toys import GROUP, Frames, working
from tests.servers import ClusterGroup, cluster_group, part_from_replicas
from tests.waiting import eventually
from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.leases import Lease, Leases
from tokenbus.bus.server import server as server_module
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.run_scripts import run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage.commits import LOST_WRITES
from tokenbus.bus.stage.stage import Batch, Stage
from tokenbus.bus.work_queue import QueueItem, QueueOptions, WorkQueue
from tokenbus_services.process.embedded_server import EmbeddedServer

KEYS = Keys("clustered", 6)


@contextmanager
def stopped(node: EmbeddedServer) -> Generator[None]:
    """The node takes connections and answers nothing."""
    os.kill(node.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(node.pid, signal.SIGCONT)


def partitions_of(group: ClusterGroup, node: EmbeddedServer) -> set[int]:
    return {p for p in range(KEYS.partitions) if group.master_of(KEYS.topic(p, "raw")) is node}


async def committed(bench: ClusterBench, partitions: set[int]) -> bool:
    return all([await bench.offset(p) == bench.last[p] for p in partitions])


@pytest.mark.parametrize("of_members", [False, True], ids=["another node", "the node of the member set"])
async def test_a_commit_without_a_reply_delays_only_the_stopped_nodes_partitions(
    of_members: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server_module, "REPLY_TIMEOUT_S", 3600.0)
    with cluster_group(cluster_require_full_coverage="no") as group:
        members = group.master_of(KEYS.members(GROUP))
        node = members if of_members else next(node for node in group.nodes if node is not members)
        there = partitions_of(group, node)
        elsewhere = set(range(KEYS.partitions)) - there
        async with Server(group.url) as server:
            bench = ClusterBench(server, KEYS)
            runs = {p: bench.runs(p, 1)[0] for p in range(KEYS.partitions)}
            stage = bench.stage("a")
            await stage.open()
            await eventually(lambda: len(stage.owned) == KEYS.partitions)
            for partition, run in runs.items():
                await bench.feed(partition, {run: b"+1"})
            batches = await read_of_all(stage)
            with stopped(node):
                await stage.process(batches)
                async with working(stage, opened=True):
                    for _ in range(3):
                        for partition in elsewhere:
                            await bench.feed(partition, {runs[partition]: b"+1"})
                        await eventually(lambda: committed(bench, elsewhere))
                    os.kill(node.pid, signal.SIGCONT)
                    await eventually(bench.through)
                    for partition, run in runs.items():
                        await bench.feed(partition, {run: b"end"})
                    await eventually(bench.through)
            await bench.check()


async def read_of_all(stage: Stage) -> list[Batch]:
    batches: dict[int, Batch] = {}
    while len(batches) < KEYS.partitions:
        batches |= {batch.partition: batch for batch in await stage.read()}
    return list(batches.values())


async def test_items_on_other_nodes_are_renewed_while_a_node_is_stopped():
    clock = asyncio.get_running_loop().time
    with cluster_group(cluster_require_full_coverage="no") as group:
        streams = [KEYS.topic(p, "turns") for p in range(KEYS.partitions)]
        node = group.master_of(streams[0])
        elsewhere = [stream for stream in streams if group.master_of(stream) is not node]

        async with Server(group.url) as one, Server(group.url) as two, Server(group.url) as three:
            lost: list[str] = []

            def record_item(item: QueueItem) -> None:
                lost.append(item.stream)

            def queue(worker: str, server: Server) -> WorkQueue:
                options = QueueOptions(group="g", worker=worker, on_claimed_away=record_item, idle_s=2.0, beat_s=0.1)
                return WorkQueue(server, options, streams)

            holder, eager = queue("holder", one), queue("eager", two)
            await holder.open()
            for stream in streams:
                await three.client.xadd(stream, {"n": "held"})
            items = [await holder.read() for _ in streams]
            await eager.open()
            reading = asyncio.create_task(eager.read())
            with stopped(node):
                until = clock() + 4  # longer than an item may be idle, and than a beat that waits for the node
                await eventually(lambda: clock() > until)
                for stream in elsewhere:
                    pending = await three.client.xpending(stream, "g")
                    assert [c["name"] for c in pending["consumers"]] == [b"holder"]
            assert not set(lost) & set(elsewhere)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await holder.finish(items)
            await eager.close()
            await holder.close()


def cluster_leases(server: Server, worker: str, taken: list[Lease]) -> Leases:
    async def gone(partition: int) -> None:
        pass

    return Leases(
        server,
        KEYS,
        group="g",
        topic="raw",
        worker=worker,
        on_acquired=taken.append,
        on_revoked=gone,
        ttl_s=3.0,
        tick_s=0.05,
    )


@pytest.mark.parametrize("of_members", [False, True], ids=["another node", "the node of the member set"])
async def test_leases_on_other_nodes_are_renewed_while_a_node_is_stopped(
    of_members: bool, monkeypatch: pytest.MonkeyPatch
):
    """Several times, as a lease lasts three renewals: on a loaded machine the time alone says nothing."""
    monkeypatch.setattr(server_module, "REPLY_TIMEOUT_S", 3600.0)
    with cluster_group(cluster_require_full_coverage="no") as group:
        members = group.master_of(KEYS.members("g"))
        node = members if of_members else next(node for node in group.nodes if node is not members)
        elsewhere = set(range(KEYS.partitions)) - partitions_of(group, node)
        async with Server(group.url) as server, Server(group.url) as observer:
            taken: list[Lease] = []
            leases = cluster_leases(server, "a", taken)
            await leases.open()
            await eventually(lambda: len(leases.owned) == KEYS.partitions)

            async def ends() -> dict[int, int]:
                """When each lease would end."""
                return {p: int(await observer.client.hget(KEYS.lease(p, "g"), "until")) for p in elsewhere}

            before = await ends()  # and knows the nodes
            with stopped(node):
                for _ in range(4):
                    await eventually(lambda before=before: _all_later(ends, before))
                    before = await ends()
            await leases.close()
            assert {lease.partition for lease in taken} == set(range(KEYS.partitions))


async def _all_later(ends: Callable[[], Awaitable[dict[int, int]]], before: dict[int, int]) -> bool:
    return all(until > before[partition] for partition, until in (await ends()).items())


async def test_partitions_on_other_nodes_that_become_free_are_taken_while_a_node_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(server_module, "REPLY_TIMEOUT_S", 3600.0)
    with cluster_group(cluster_require_full_coverage="no") as group:
        members = group.master_of(KEYS.members("g"))
        node = next(node for node in group.nodes if node is not members)
        elsewhere = set(range(KEYS.partitions)) - partitions_of(group, node)
        async with Server(group.url) as server:
            held = [
                scripts.acquire(KEYS.lease(p, "g"), KEYS.topic(p, "raw"), owner="other", ttl_ms=60_000)
                for p in range(KEYS.partitions)
            ]
            tokens = [
                token.decode()
                for token, *_ in await retry_until_available(server, lambda: run_scripts(server, held), what="leases")
            ]

            async def free(partitions: set[int]) -> None:
                await run_scripts(server, [scripts.release(KEYS.lease(p, "g"), token=tokens[p]) for p in partitions])

            leases = cluster_leases(server, "a", [])
            await leases.open()
            assert not leases.owned
            with stopped(node):
                await free(elsewhere)
                await eventually(lambda: set(leases.owned) == elsewhere)
            await free(set(range(KEYS.partitions)) - elsewhere)
            await eventually(lambda: len(leases.owned) == KEYS.partitions)
            await leases.close()


async def test_commands_to_other_nodes_do_not_wait_until_the_slots_were_asked_for(monkeypatch: pytest.MonkeyPatch):
    was_requested = asyncio.Event()

    async def never_told(*_: object, **__: object) -> None:
        was_requested.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(server_module, "REPLY_TIMEOUT_S", 2.0)
    with cluster_group() as group:
        node = group.master_of("there")
        elsewhere = next(key for key in ("a", "b", "c", "d") if group.master_of(key) is not node)
        async with Server(group.url) as server:
            assert await server.client.get(elsewhere) is None
            monkeypatch.setattr(NodesManager, "initialize", never_told)
            with stopped(node):
                with pytest.raises(NoReply):
                    await server.client.get("there")
                await was_requested.wait()
                assert await server.client.get(elsewhere) is None


async def test_a_stage_continues_when_a_replica_replaces_a_node(caplog: pytest.LogCaptureFixture):
    with cluster_group(replicas=1) as group:
        node = group.master_of(KEYS.topic(0, "raw"))
        async with Server(group.url) as server:
            bench = ClusterBench(server, KEYS)
            runs = {p: bench.runs(p, 1)[0] for p in range(KEYS.partitions)}
            for partition, run in runs.items():
                await bench.feed(partition, *({run: b"+1"} for _ in range(5)))
            async with working(bench.stage("a")):
                await eventually(bench.through)
                await server.client.wait(1, 5000, target_nodes=server.client.PRIMARIES)
                await asyncio.to_thread(node.stop)
                await eventually(lambda: group.master_of(KEYS.topic(0, "raw")) is not node)
                for partition, run in runs.items():
                    await eventually(lambda p=partition, r=run: fed(bench, p, {r: b"+1"}))
                    await bench.feed(partition, {run: b"end"})
                await eventually(bench.through)
            await bench.check()
    assert "a fail-over lost" not in caplog.text


async def fed(bench: ClusterBench, partition: int, entry: Frames) -> bool:
    """Whether the server accepted it, which shows when the outage began."""
    try:
        await bench.feed(partition, entry)
    except (RedisError, OSError):
        return False
    return True


async def test_runs_that_lost_events_with_a_node_end_and_all_others_continue():
    with cluster_group(replicas=1) as group:
        node = group.master_of(KEYS.topic(0, "raw"))
        async with Server(group.url) as server:
            bench = ClusterBench(server, KEYS)
            affected, spared = bench.runs(0, 2)
            elsewhere = next(p for p in range(KEYS.partitions) if group.master_of(KEYS.topic(p, "raw")) is not node)
            [other] = bench.runs(elsewhere, 1)
            await bench.feed(0, {affected: b"+1", spared: b"+1"})
            await bench.feed(elsewhere, {other: b"+1"})
            async with working(bench.stage("a")):
                await eventually(bench.through)
                await server.client.wait(1, 5000, target_nodes=server.client.PRIMARIES)
                await asyncio.to_thread(part_from_replicas, node.port)
                await bench.feed(0, {affected: b"+1"}, {affected: b"+2"})
                await eventually(bench.through)
                before = await says(bench, affected)
                await asyncio.to_thread(node.stop)
                await eventually(lambda: group.master_of(KEYS.topic(0, "raw")) is not node)
                await eventually(lambda: told_of_loss(bench, affected))
                await bench.feed(0, {affected: b"+3"}, {spared: b"+4"}, {spared: b"end"})
                await bench.feed(elsewhere, {other: b"end"})
                await eventually(bench.through)
            assert [what for _, what in before] == [1, 2, 4]
            assert await says(bench, affected) == [*before, ("1-3", LOST_WRITES.code)]
            assert [what for _, what in await says(bench, spared)] == [1, 5, "end"]
            assert [what for _, what in await says(bench, other)] == [1, "end"]


async def told_of_loss(bench: ClusterBench, run: str) -> bool:
    try:
        return await ended_by_loss(bench, run)
    except (RedisError, OSError):
        return False
