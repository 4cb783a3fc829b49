"""What all processes agree on is on the server for as long as one of them works."""

from __future__ import annotations

import pytest

from tests.waiting import eventually
from tokenbus.bus import layout as repartition
from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import Liveness
from tokenbus.bus.server.server import Server
from tokenbus_services.runtime import worker_core as deployment_agreement
from tokenbus_services.runtime.worker_core import DeploymentAgreement


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment_agreement, "AGREE_S", 0.02)


async def test_a_flushed_server_gets_the_agreement_again(server: Server, keys: Keys):
    agreed = DeploymentAgreement(server, keys, Liveness(), None)
    await agreed.open()
    before = await server.client.hgetall(keys.meta)
    await server.client.delete(keys.meta)

    async def is_visible() -> bool:
        return await server.client.hgetall(keys.meta) == before

    await eventually(is_visible)
    await agreed.close()
    await server.client.delete(keys.meta)


async def test_a_worker_ends_if_another_deployment_replaced_its_own(server: Server, keys: Keys):
    liveness, ended = Liveness(), list[str]()
    liveness.ended = lambda long_task: ended.append(long_task.name)
    agreed = DeploymentAgreement(server, keys, liveness, None)
    await agreed.open()
    await server.client.hset(keys.meta, "partitions", keys.partitions + 1)
    await eventually(lambda: ended == ["deployment"])
    await agreed.close()
    await server.client.delete(keys.meta)


async def test_a_server_that_lost_a_change_of_partitions_gets_it_again(server: Server, keys: Keys):
    agreed = DeploymentAgreement(server, keys, Liveness(), None)
    await agreed.open()
    before = await server.client.hgetall(keys.meta)
    await repartition.announce(server, keys, await repartition.layout(server, keys), 7)
    await eventually(lambda: keys.partitions == 7 and keys.epoch == 1)
    await repartition.place(server, keys, await repartition.layout(server, keys))
    await eventually(lambda: keys.numbers[0] == 7)
    await server.client.delete(keys.meta)
    await server.client.hset(keys.meta, mapping=before)

    async def is_visible() -> bool:
        now = await repartition.layout(server, keys)
        return (now.placing, now.numbers, now.spread, now.epoch) == (7, (7, 4), 7, 2)

    await eventually(is_visible)
    await agreed.close()
    await server.client.delete(keys.meta)
