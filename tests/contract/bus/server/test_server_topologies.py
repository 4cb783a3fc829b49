"""The same connection over a real Cluster and a real Sentinel group."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.servers import sentinel_group
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import join_deployment
from tokenbus.bus.server.server import Server, translated
from tokenbus.errors import ServerUnavailable, SettingsError

KEYS = Keys("topologies", 4)


async def test_check_and_join_work_in_a_cluster(clustered: Server):
    assert (await clustered.check()).version >= (7, 0)
    await join_deployment(clustered, KEYS)


async def test_in_a_cluster_a_read_takes_the_keys_of_one_hash_tag(clustered: Server):
    names = [KEYS.topic(p, topic) for topic in ("raw", "control") for p in (0, 1)]
    assert clustered.read_groups(names) == [
        [KEYS.topic(0, "raw"), KEYS.topic(0, "control")],
        [KEYS.topic(1, "raw"), KEYS.topic(1, "control")],
    ]
    assert clustered.read_groups(["a", "b{}", "c{"]) == [["a"], ["b{}"], ["c{"]]


async def test_each_partition_of_a_cluster_can_be_read_and_asks_no_other_node_for_keys(clustered: Server):
    client = clustered.client
    names = [KEYS.topic(p, "raw") for p in range(KEYS.partitions)]
    entries = {name: await client.xadd(name, {"f": name}) for name in names}
    getkeys_calls = await _calls_of(clustered, "cmdstat_command|getkeys")
    for group in clustered.read_groups(names):
        for name in group:
            await client.xgroup_create(name, "STREAMS", id="0")
            expected = [[name.encode(), [(entries[name], {b"f": name.encode()})]]]
            assert await client.xread({name: "0"}) == expected
            assert await client.xreadgroup("STREAMS", "STREAMS", {name: ">"}) == expected
    assert await _calls_of(clustered, "cmdstat_command|getkeys") == getkeys_calls


async def test_keys_of_several_slots_in_one_read_are_refused(clustered: Server):
    names = [KEYS.topic(p, "events") for p in range(KEYS.partitions)]
    with pytest.raises(Exception, match=r"(?i)same slot"):
        await clustered.client.xread(dict.fromkeys(names, "0"))


async def test_a_cluster_node_addressed_as_a_single_server_is_a_settings_error(cluster_url: str):
    first = cluster_url.removeprefix("redis+cluster://").partition(",")[0]
    async with Server(f"redis://{first}") as server:
        with pytest.raises(SettingsError, match=r"redis\+cluster://"):
            await server.check()


async def test_a_single_server_addressed_as_a_cluster_is_unavailable_with_the_reason(server_url: str):
    async with Server(server_url.replace("redis://", "redis+cluster://")) as server:
        with pytest.raises(ServerUnavailable, match=r"(?i)cluster mode is not enabled"):
            await server.check()


async def test_a_sentinel_group_continues_with_the_promoted_replica(tmp_path: Path):
    with sentinel_group(tmp_path) as group:
        async with Server(group.url) as server:
            assert (await server.check()).name in ("redis", "valkey")
            await join_deployment(server, KEYS)
            await server.client.wait(1, 5000)
            group.master.stop()

            async def joined_again() -> bool:
                try:
                    await join_deployment(server, KEYS)
                except ServerUnavailable:
                    return False
                return True

            await eventually(joined_again)
            with translated(server):
                info = await server.client.info("server")
            assert info["tcp_port"] == group.replica.port


async def _calls_of(server: Server, command: str) -> int:
    """How often all nodes together have run a command."""
    nodes = await server.client.info("commandstats", target_nodes=server.client.ALL_NODES)
    return sum(stats.get(command, {}).get("calls", 0) for stats in nodes.values())
