"""Durable script calls: a reply says that the write is where the deployment wants it, or that it is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from redis.exceptions import ResponseError

from tests.contract.bus.server.test_run_script import acquire
from tests.servers import binary, cluster_group, part_from_replicas, sentinel_group
from tokenbus import Client
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import join_deployment
from tokenbus.bus.scripts import ScriptCall
from tokenbus.bus.server.durability import NO_DURABILITY, Durability, NotReplicated
from tokenbus.bus.server.run_scripts import run_script, run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.errors import WriteNotReplicated
from tokenbus_services.process.embedded_server import EmbeddedServer

KEYS = Keys("durable", 4)
REQUEST = {"provider": "p", "model": "m", "messages": [{"role": "user", "content": "hi"}]}


def durable(partition: int = 0) -> ScriptCall:
    return msgspec.structs.replace(acquire(KEYS, partition), durable=True)


@contextmanager
def group_with_replica(topology: str, directory: Path) -> Generator[tuple[str, list[int]]]:
    """The url of a group of this topology, and the ports of its masters."""
    if topology == "cluster":
        with cluster_group(replicas=1) as cluster:
            yield cluster.url, [node.port for node in cluster.nodes[:3]]
    else:
        with sentinel_group(directory) as group:
            yield group.url, [group.master.port]


@pytest.mark.parametrize("topology", ["sentinel", "cluster"])
async def test_a_write_counts_once_a_replica_has_it_and_a_publisher_is_told_if_none_has(topology: str, tmp_path: Path):
    with group_with_replica(topology, tmp_path) as (url, ports):
        async with Server(url) as server, Client(url, prefix=KEYS.prefix, partitions=4) as client:
            server.durability = Durability(replicas=1)
            await join_deployment(server, KEYS, durability=Durability("replicated", 1).encoded)
            assert all(token for token, *_ in await run_scripts(server, [durable(p) for p in range(4)]))
            await client.publish(REQUEST)
            for port in ports:
                await asyncio.to_thread(part_from_replicas, port)
            with pytest.raises(NotReplicated, match="0 of 1 replicas"):
                await run_script(server, durable())
            with pytest.raises(WriteNotReplicated) as refused:
                await client.publish(REQUEST)
            assert refused.value.retryable
            assert isinstance(refused.value.request, dict)
            assert refused.value.request["id"]
            await client.publish({**REQUEST, "durability": "server"})  # waits for nobody
            assert await server.client.xlen(KEYS.requests) == 3


async def test_a_request_that_the_deployment_refuses_waits_for_nobody(server: Server, keys: Keys, server_url: str):
    await join_deployment(server, keys, durability=NO_DURABILITY)
    async with Client(server_url, prefix=keys.prefix) as client:
        run = await client.publish({**REQUEST, "durability": "replicated"})
    [(_, fields)] = await server.client.xrange(keys.requests)
    assert run.id in fields[b"__data__"].decode()


@pytest.fixture
async def on_disk(tmp_path: Path) -> AsyncGenerator[Server]:
    options = {"appendonly": "yes", "appendfsync": "always"}
    with EmbeddedServer(tmp_path, binary=binary(), options=options) as embedded:
        async with Server(embedded.url) as server:
            server.durability = Durability(replicas=0, disk=True)
            if (await server.check()).version < (7, 2):
                pytest.skip("this server has no WAITAOF")
            yield server


async def test_a_write_counts_once_the_disk_has_it(on_disk: Server):
    assert (await run_script(on_disk, durable()))[0]
    await on_disk.client.config_set("appendfsync", "no")
    with pytest.raises(NotReplicated, match="disk"):
        await run_script(on_disk, durable())


async def test_a_script_that_the_server_forgot_is_sent_whole_and_an_error_is_the_scripts_own(on_disk: Server):
    await on_disk.client.script_flush()
    assert (await run_script(on_disk, durable()))[0]
    await on_disk.client.set(KEYS.lease(1, "g"), "no hash")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await run_script(on_disk, durable(1))


async def test_a_cancelled_call_leaves_no_reply_for_the_next_one(on_disk: Server):
    for n in range(20):
        call = asyncio.create_task(run_script(on_disk, durable()))
        await asyncio.sleep(0)
        for _ in range(n):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert await on_disk.client.ping() is True
        assert await on_disk.client.execute_command("ECHO", f"{n}") == f"{n}".encode()
