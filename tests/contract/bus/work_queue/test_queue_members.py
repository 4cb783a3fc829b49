"""Workers of a queue show themselves, on any server and while there is nothing to do."""

from __future__ import annotations

from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.bus.work_queue import QueueOptions, WorkQueue

GROUP = "g"


def queue(server: Server, keys: Keys, worker: str) -> WorkQueue:
    options = QueueOptions(group=GROUP, worker=worker, idle_s=60.0, beat_s=0.05, members=keys.members(GROUP))
    return WorkQueue(server, options, [keys.topic(0, "turns")])


async def members(server: Server, keys: Keys) -> list[bytes]:
    return sorted(await server.client.zrange(keys.members(GROUP), 0, -1))


async def test_an_idle_worker_is_seen_from_its_start_to_its_end(server: Server, keys: Keys):
    one, two = queue(server, keys, "one"), queue(server, keys, "two")
    await one.open()
    await two.open()
    assert await members(server, keys) == [b"one", b"two"]
    await one.close()
    assert await members(server, keys) == [b"two"]
    await two.close()
    assert await members(server, keys) == []


async def test_a_worker_that_died_is_forgotten_by_the_others(server: Server, keys: Keys):
    alive = queue(server, keys, "alive")
    await alive.open()
    await server.client.zadd(keys.members(GROUP), {"dead": 1})

    async def gone() -> bool:
        return await members(server, keys) == [b"alive"]

    await eventually(gone)
    await alive.close()
