"""`tokenbus repartition` and `tokenbus slots` as commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from redis.crc import key_slot

from tests.services.cli.process import run, settings_file
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import join_deployment
from tokenbus.bus.server.server import Server
from tokenbus_services.cli.slots import even_numbers, spread


async def test_the_number_is_changed_shown_and_the_earlier_one_forgotten(
    server: Server, server_url: str, keys: Keys, tmp_path: Path
):
    await join_deployment(server, keys)
    config = settings_file(tmp_path, f'redis_url = "{server_url}"\nprefix = "{keys.prefix}"\npartitions = 4')

    async def facts(*arguments: str) -> dict[str, object]:
        return json.loads((await run("repartition", *arguments, "--json", TOKENBUS_CONFIG=config)).out)

    assert (await facts("6"))["partitions"] == 6
    assert await facts() == {"partitions": 6, "earlier": [4], "served": 6, "announced": None, "open_beyond": 0}
    again = await run("repartition", "6", TOKENBUS_CONFIG=config)
    assert (again.code, again.error) == (1, "error: there are 6 partitions already")
    kept = keys.within(0).run("kept")
    await server.client.hset(kept, "status", "open")
    assert Keys(partitions=6).partition_of("kept") != 0
    assert (
        "runs of earlier numbers are kept, 1 of them"
        in (await run("repartition", "--forget", TOKENBUS_CONFIG=config)).error
    )
    await server.client.delete(kept)
    assert (await facts("--forget"))["earlier"] == []
    shown = await run("repartition", TOKENBUS_CONFIG=config)
    assert shown.out.strip() == "6 partitions"


@pytest.mark.parametrize("nodes", [1, 3, 6])
def test_every_partition_is_on_one_node_by_the_slot_of_its_hash_tag(nodes: int):
    found = spread(64, nodes)
    assert sum(found.nodes) == 64
    assert found.nodes[0] == sum(key_slot(f"t:{{{n}}}:x".encode()) * nodes // 16384 == 0 for n in range(64))


def test_numbers_that_are_called_even_are():
    assert all(
        max(found.nodes) * 3 <= 1.15 * found.partitions for found, _ in zip(even_numbers(8, 3), range(9), strict=False)
    )
