"""How much one read brings: bounded over all partitions, also after their number has grown."""

from __future__ import annotations

from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.client.subscriptions.cursor import OLDEST
from tokenbus.client.subscriptions.topic_reader import TopicReader


async def next_read(reader: TopicReader) -> list[int]:
    """How many entries each partition brings; a read that `take` has woken brings none."""
    while not (found := await reader.read()):
        pass
    return [len(entries) for _, entries in found]


async def test_a_read_returns_no_more_entries_when_partitions_are_added(server: Server, keys: Keys) -> None:
    keys.apply((1,), 1, 1, (1,))
    for partition in range(4):
        for n in range(4):
            await server.client.xadd(keys.topic(partition, "visible"), {"field": n})
    reader = TopicReader(server, keys, "visible", most=4)
    reader.take(0, OLDEST)
    assert await next_read(reader) == [4]
    keys.apply((4, 1), 4, 2, (1, 4))
    for partition in (1, 2, 3):
        reader.take(partition, OLDEST)
    assert await next_read(reader) == [1, 1, 1]
    await reader.close()
