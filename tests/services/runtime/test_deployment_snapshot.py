"""What is seen of a deployment, on a single server, a Sentinel group and a Cluster."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.servers import cluster, sentinel_group
from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.bus.topology import RECORDER
from tokenbus_services.runtime.deployment_snapshot import DeploymentReader, DeploymentSnapshot, read_nodes
from tokenbus_services.runtime.metrics import server_gauges

KEYS = Keys(prefix="seen", partitions=4)


@contextmanager
def server_of(topology: str, shared_url: str, directory: Path) -> Generator[str]:
    if topology == "single":
        yield shared_url
    elif topology == "sentinel":
        with sentinel_group(directory) as group:
            yield group.url
    else:
        with cluster() as url:
            yield url


@pytest.fixture(params=["single", "sentinel", "cluster"])
async def any_server(request: pytest.FixtureRequest, server_url: str, tmp_path: Path) -> AsyncGenerator[Server]:
    with server_of(request.param, server_url, tmp_path) as url:
        async with Server(url) as server:
            yield server
            for key in (KEYS.requests, KEYS.dead, KEYS.members("parser"), KEYS.members("fetcher")):
                await server.client.delete(key)
            for topic in ("events", "turns", "chunks", "records"):
                await server.client.delete(KEYS.topic(1, topic))
            await server.client.delete(KEYS.lease(1, "parser"))


async def look(server: Server) -> DeploymentSnapshot:
    reader = DeploymentReader(server, KEYS, further=[RECORDER], judged=False, added=True, topic="chunks")
    await server.clock.measure()
    return await reader.read()


async def test_an_empty_deployment_has_an_empty_snapshot(any_server: Server):
    found = await look(any_server)
    assert [p.owner for stage in found.stages for p in stage.partitions] == [None] * 8
    assert [(q.name, q.workers, q.waiting, q.held, q.added) for q in found.queues] == [
        ("intake", [], 0, 0, 0),
        ("fetcher", [], 0, 0, 0),
        ("tools", [], 0, 0, 0),
        ("recorder", [], 0, 0, 0),
    ]
    assert (found.open_runs, found.chunks, found.dead) == (0, 0, 0)
    for node in await read_nodes(any_server):
        assert node.memory_bytes
        assert node.now_ms
        assert node.gauges["tokenbus_server_memory_bytes"] == node.memory_bytes
        assert node.gauges["tokenbus_server_memory_resident_bytes"] > 0
        assert set(node.gauges) <= set(server_gauges(CollectorRegistry()))


async def test_owners_workers_lag_and_work_are_seen(any_server: Server):
    client = any_server.client
    events, turns = KEYS.topic(1, "events"), KEYS.topic(1, "turns")
    lease = KEYS.lease(1, "parser")
    await run_script(any_server, scripts.present(KEYS.members("parser"), member="p", ttl_ms=60_000))
    await client.zadd(KEYS.members("fetcher"), {"long gone": 1})
    await run_script(any_server, scripts.acquire(lease, events, owner="p", ttl_ms=60_000, mirror="parser"))
    await client.hset(lease, mapping={"arrived": 70, "done": 30, "entries": 5, "open": 3})
    await client.xadd(events, {"r": b"x"})
    await client.xgroup_create(turns, "fetcher", id="0", mkstream=True)
    for _ in range(3):
        await client.xadd(turns, {"r": b"x"})
    await client.xreadgroup("fetcher", "f", {turns: ">"}, count=1)
    await client.xadd(KEYS.topic(1, "chunks"), {"__data__": b"{}"})
    await client.xadd(KEYS.topic(1, "records"), {"r": b"x"})
    await client.xadd(KEYS.dead, {"__data__": b"{}"})
    found = await look(any_server)
    parser = found.stages[1]
    one = parser.partitions[1]
    assert (parser.workers, one.owner, one.lag_bytes, one.entries, one.done_bytes) == (["p"], "p", 40, 5, 30)
    assert one.lag_entries in (1, None), "before Redis 7 a server does not know"
    assert found.open_runs == 3
    fetcher = found.queues[1]
    assert (fetcher.workers, fetcher.waiting, fetcher.held) == ([], 2, 1)
    assert (fetcher.added, found.chunks) in ((3, 1), (None, None))
    assert (found.dead, found.rejected) == (1, 0)
    recorder = found.queues[3]
    assert [(s.partition, s.waiting) for s in recorder.streams] == [(0, 0), (1, 1), (2, 0), (3, 0)]


async def test_without_workers_only_lengths_and_leases_are_read(any_server: Server):
    client = any_server.client
    await client.zadd(KEYS.members("fetcher"), {"f": 2**52})
    await client.hset(KEYS.lease(1, "parser"), mapping={"arrived": 70, "done": 30, "open": 3})
    await client.xadd(KEYS.topic(1, "turns"), {"r": b"x"})
    found = await DeploymentReader(any_server, KEYS, further=(), judged=False, workers=False).read()
    assert (found.queues[1].workers, found.queues[1].waiting, found.queues[1].added) == ([], 1, None)
    assert (found.stages[1].lag_bytes, found.stages[1].lag_entries, found.open_runs) == (40, None, 3)


async def test_an_expired_lease_has_no_owner(any_server: Server):
    await any_server.client.hset(KEYS.lease(1, "parser"), mapping={"owner": "p", "until": 1})
    assert (await look(any_server)).stages[1].partitions[1].owner is None


async def test_the_number_of_commands_of_a_sample_does_not_depend_on_the_runs(server: Server, keys: Keys):
    async def commands() -> int:
        before = (await server.client.info("stats"))["total_commands_processed"]
        await DeploymentReader(server, keys, further=[RECORDER], judged=True, added=True, topic="chunks").read()
        return (await server.client.info("stats"))["total_commands_processed"] - before

    await server.clock.measure()  # else the first look asks the time in the background
    await commands()  # the first look also connects
    few = await commands()
    pipe = server.client.pipeline(transaction=False)
    for n in range(2_000):
        pipe.hset(keys.run(f"r{n}"), "status", "open")
        pipe.pexpire(keys.run(f"r{n}"), 60_000)
    await pipe.execute()
    assert await commands() == few
