"""clients/typescript on a Cluster of which a node fails."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from tests.clients import node
from tests.contract.client.writer import Writer
from tests.servers import ClusterGroup, cluster_group
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import join_deployment
from tokenbus.bus.server.server import Server

KEYS = Keys("nodes", 4)
RUNS = [f"run-{n}" for n in range(12)]


async def test_the_client_works_on_a_cluster_and_its_followers_outlive_a_node(tmp_path: Path):
    project = node.project(tmp_path)
    compiled = node.run("node_modules/typescript/bin/tsc", cwd=project)
    assert compiled.returncode == 0, compiled.stdout
    with cluster_group(replicas=1) as group:
        async with Server(group.url) as server:
            await join_deployment(server, KEYS)
            env = {**os.environ, "TOKENBUS_TEST_CLUSTER": group.url, "TOKENBUS_TEST_PREFIX": KEYS.prefix}
            script = ("--test", "dist/test/cluster.test.js")
            process = await asyncio.create_subprocess_exec(
                node.NODE, *script, cwd=project, env=env, stdout=asyncio.subprocess.PIPE
            )
            output = asyncio.create_task(process.communicate())
            serving = asyncio.create_task(_serve(server, group))
            try:
                await asyncio.wait({output, serving}, return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    await serving
                text = (await asyncio.wait_for(output, 120))[0].decode()
                assert process.returncode == 0, text
                await serving
            finally:
                serving.cancel()
                if process.returncode is None:
                    process.kill()
                    await output


async def _serve(server: Server, group: ClusterGroup) -> None:
    """Write the runs that are asked for, and the ends of open ones after a node has failed."""
    await eventually(lambda: _asked(server, RUNS[-1]))
    for n, run in enumerate(RUNS):
        writer = Writer(server, KEYS, run)
        await writer.start()
        await writer.block(f"Hello {n}.")
        await writer.complete()
    await eventually(lambda: _asked(server, "open"))
    opened = [Writer(server, KEYS, f"open-{run}") for run in RUNS]
    for writer in opened:
        await writer.accept()
        await writer.start()
    failing = group.master_of(KEYS.topic(0, "visible"))
    await server.client.wait(1, 5000, target_nodes=server.client.PRIMARIES)
    await asyncio.to_thread(failing.stop)
    await eventually(lambda: group.master_of(KEYS.topic(0, "visible")) is not failing)
    for writer in opened:
        await eventually(lambda run=writer.run: _accepts(server, run))
        await writer.block("Hello.")
        await writer.complete()
    await eventually(lambda: _asked(server, "after"))
    writer = Writer(server, KEYS, "after")
    await writer.start()
    await writer.block("Hello.")
    await writer.complete()


async def _asked(server: Server, run: str) -> bool:
    try:
        entries: Any = await server.client.xrange(KEYS.requests)
    except (RedisError, OSError):
        return False
    return any(json.loads(fields[b"__data__"])["id"] == run for _, fields in entries)


async def _accepts(server: Server, run: str) -> bool:
    try:
        await server.client.hset(KEYS.run(run), "status", "open")
    except (RedisError, OSError):
        return False
    return True
