"""The work queue's worker is stopped at each of its commands in turn: no item is lost, and in the end none is left."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.contract.bus.faults import Doomed, Fault
from tests.leaks import check_keys
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.bus.work_queue import QueueItem, QueueOptions, WorkQueue, reader

MOST_COMMANDS = 40
ITEMS = [f"item{n}" for n in range(7)]


class Worker:
    """Works items, one after the other; hands every third back when it first sees it."""

    def __init__(self, server: Server, keys: Keys, name: str) -> None:
        self.done: Counter[str] = Counter()
        self._queue = WorkQueue(
            server,
            QueueOptions(group="g", worker=name, count=2, idle_s=0.06, beat_s=0.02),
            [keys.topic(p, "turns") for p in range(keys.partitions)],
        )
        self._refused: set[str] = set()
        self.open = self._queue.open

    async def work(self) -> None:
        while True:
            item = await self._queue.read()
            if self._refuses(item):
                await self._queue.hand_back([item])
                continue
            self.done[item.fields[b"n"].decode()] += 1
            await self._queue.finish([item])

    def _refuses(self, item: QueueItem) -> bool:
        name = item.fields[b"n"].decode()
        first = name in ITEMS[::3] and name not in self._refused
        self._refused.add(name)
        return first

    async def close(self) -> None:
        await self._queue.stop_reading()
        await self._queue.close()


async def left(server: Server, keys: Keys) -> int:
    return sum([await server.client.xlen(keys.topic(p, "turns")) for p in range(keys.partitions)])


async def stopped_at(at: int, server: Server, keys: Keys, fault: Fault) -> int:
    """Play the scenario on keys of its own. Returns how many commands the worker sent."""
    keys = Keys(f"{keys.prefix}-{at}", 2)
    for n, item in enumerate(ITEMS):
        await server.client.xadd(keys.topic(n % 2, "turns"), {"n": item})
    doomed, workers = Doomed(server.url.safe, fault, at), list[Worker]()

    def make(connection: Server) -> Worker:
        workers.append(Worker(connection, keys, f"w{len(workers)}"))
        return workers[-1]

    async def through(observer: Server) -> bool:
        return not await left(observer, keys)

    running = asyncio.create_task(doomed.run(make, through))
    await eventually(lambda: running.done() or doomed.reached.is_set())
    if doomed.reached.is_set():
        survivor = make(server)
        await survivor.open()
        working = asyncio.create_task(survivor.work())
        if not doomed.fault.startswith("freezes"):
            await running
        await eventually(lambda: through(server))
        if doomed.fault.startswith("freezes"):
            doomed.thaw()
        await running
        await survivor.close()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    await running
    assert set(sum((w.done for w in workers), Counter[str]())) == set(ITEMS)
    await check_keys(server, keys)
    async for key in server.client.scan_iter(match=f"{keys.prefix}:*", count=1000):
        await server.client.unlink(key)
    return doomed.commands


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a worker closes quickly."""
    monkeypatch.setattr(reader, "BLOCK_MS", 20)


@pytest.mark.parametrize("fault", ["dies after", "freezes before", "freezes after", "is not sent", "loses its reply"])
async def test_a_worker_may_be_stopped_at_any_command(server: Server, keys: Keys, fault: Fault):
    commands = await stopped_at(MOST_COMMANDS, server, keys, fault)
    assert commands > 10
    at_once = asyncio.Semaphore(6)

    async def one(at: int) -> None:
        async with at_once:
            try:
                await stopped_at(at, server, keys, fault)
            except AssertionError as e:
                raise AssertionError(f"stopped at command {at}") from e

    async with asyncio.TaskGroup() as group:
        for at in range(min(commands, MOST_COMMANDS)):
            group.create_task(one(at))
