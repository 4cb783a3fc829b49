"""Slots of a Cluster move to another node while their runs stream: each run ends whole, in its first attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import redis

from tests.e2e.conftest import sender
from tests.e2e.fleet import PIPELINE, ended, fleet, log_of
from tests.servers import ClusterGroup, cluster_group
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, Turn

KEYS = Keys("moving", 6)
TEXT = " ".join(f"word{n}" for n in range(900))
SCRIPTS = [Script(name="long", turns=(Turn(says=Reply(text=TEXT), delivery=Delivery(pace=50)),))]
ONCE = ("requests", "meta", "members:parser", "members:normalizer", "members:fetcher")
"""Keys of which a deployment has one."""


@contextmanager
def moving(group: ClusterGroup, key: str) -> Generator[None]:
    """Move the slot of this key to the next node, as ``redis-cli --cluster reshard`` does; inside, half of its keys are
    there.
    """
    source = group.master_of(key)
    target = group.nodes[(group.nodes.index(source) + 1) % len(group.nodes)]
    with closing(redis.Redis(port=source.port)) as old, closing(redis.Redis(port=target.port)) as new:
        slot = old.execute_command("CLUSTER KEYSLOT", key)
        ids: list[Any] = [client.execute_command("CLUSTER MYID") for client in (old, new)]
        new.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
        old.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
        names: Any = old.execute_command("CLUSTER GETKEYSINSLOT", slot, 1000)
        assert names, key
        send = ("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS")
        old.execute_command(*send, *names[: max(1, len(names) // 2)])
        yield
        while names := old.execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
            old.execute_command(*send, *names)
        for client in (new, old):
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[1])
        for node in group.nodes:
            if node not in (source, target):
                with closing(redis.Redis(port=node.port)) as other:
                    other.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[1])


def move(group: ClusterGroup, key: str) -> None:
    with moving(group, key):
        pass


async def test_slots_move_while_their_runs_stream_and_no_run_loses_an_attempt(tmp_path: Path) -> None:
    with cluster_group() as group:
        async with (
            MockProvider(SCRIPTS) as provider,
            fleet(tmp_path, group.url, KEYS, provider.url, PIPELINE) as running,
            Server(group.url) as server,
        ):
            send = sender(server, KEYS)
            runs = [await send("long", id=f"run-{n}") for n in range(24)]
            elsewhere = next(run for run in runs if KEYS.partition_of(run) == 1)
            assert {KEYS.partition_of(run) for run in runs} == set(range(KEYS.partitions))

            async def events_of(run: str) -> int:
                return len(await log_of(server.client, KEYS, run))

            async def all_stream() -> bool:
                return all([await events_of(run) > 5 for run in runs])

            await eventually(all_stream)
            # Half of a partition's keys are on each node for some seconds, in which the other partitions go on.
            with moving(group, KEYS.topic(0, "raw")):
                before = await events_of(elsewhere)

                async def goes_on() -> bool:
                    return await events_of(elsewhere) > before + 150

                await eventually(goes_on)
            for partition in range(1, KEYS.partitions):
                await asyncio.to_thread(move, group, KEYS.topic(partition, "raw"))
            for name in ONCE:
                await asyncio.to_thread(move, group, f"{KEYS.prefix}:{name}")
            logs: Any = await ended(server.client, KEYS, runs)
            for run in runs:
                chunks = [event["text"] for event in logs[run] if event["type"] == "chunk"]
                assert "".join(chunks) == TEXT
                assert (logs[run][-1]["type"], logs[run][-1]["attempt"]) == ("completed", 1)
            assert [worker.process.returncode for worker in running.workers] == [None] * len(PIPELINE)
            late = await send("long", id="late")
            assert (await ended(server.client, KEYS, [late]))[late][-1]["type"] == "completed"
