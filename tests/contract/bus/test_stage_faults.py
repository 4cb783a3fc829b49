"""Guarantees 1 to 3: a worker of an ordered stage is stopped at each of its commands in turn, and nothing shows.

Each test works the same input once for every command that an undisturbed worker sends, and stops the worker there.
What lies on the streams in the end is what an undisturbed stage writes: entry for entry, number for number.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.contract.bus.faults import Doomed, Fault
from tests.contract.bus.toys import Bench, Frames
from tests.leaks import check_keys
from tokenbus.bus import partition, stage
from tokenbus.bus.keys import Keys
from tokenbus.bus.server import Server

MOST_COMMANDS = 60


@pytest.fixture(autouse=True)
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few frames are several pages and several checkpoints."""
    monkeypatch.setattr(partition, "CHECKPOINT_SPAN", 10)
    monkeypatch.setattr(stage, "REPLAY_PAGE", 2)


def first_half(bench: Bench, number: int, prefix: str = "r") -> list[Frames]:
    a, b, c = bench.runs(number, 3, prefix)
    return [{a: b"+1"}, {a: b"+2", b: b"+10"}, {b: b"+20"}, {a: b"+3"}, {c: b"+100", b: b"end"}, {a: b"+4"}]


def second_half(bench: Bench, number: int) -> list[Frames]:
    a, _, c, d = bench.runs(number, 4)
    return [{c: b"+200"}, {a: b"+5", d: b"+1"}, {c: b"end"}, {a: b"end"}, {d: b"+2"}]


async def feed(bench: Bench, *halves: int) -> None:
    for half in halves:
        for number in range(bench.keys.partitions):
            await bench.feed(number, *(first_half, second_half)[half](bench, number))


async def stopped_at(at: int, server: Server, keys: Keys, fault: Fault, *, replay: bool) -> int:
    """Play the scenario on keys of its own. Returns how many commands the worker sent."""
    bench = Bench(server, Keys(f"{keys.prefix}-{at}", 2))
    doomed = Doomed(server.url.safe, fault, at)
    await scenario(bench, doomed, replay=replay)
    await check_keys(server, bench.keys)
    async for key in server.client.scan_iter(match=f"{bench.keys.prefix}:*", count=1000):
        await server.client.unlink(key)
    return doomed.commands


async def scenario(bench: Bench, doomed: Doomed, *, replay: bool) -> None:
    """A worker that meets its fault, where ``replay`` after another has done half; then one that does what is left."""
    await feed(bench, 0)
    if replay:
        await bench.finish("first")
    await feed(bench, 1)
    running = asyncio.create_task(doomed.run(lambda server: bench.stage("doomed", server), bench.through))
    while not running.done() and not doomed.reached.is_set():
        await asyncio.sleep(0.002)
    if doomed.fault.startswith("freezes") and doomed.reached.is_set():
        await bench.bury()
        await bench.finish("other")
        for number in range(bench.keys.partitions):
            await bench.feed(number, *first_half(bench, number, "late"))
        doomed.thaw()
    await running
    await bench.bury()
    await bench.finish()
    await bench.check()


@pytest.mark.parametrize("replay", [False, True], ids=["from the start", "in a replay"])
@pytest.mark.parametrize(
    "fault", ["dies before", "dies after", "freezes before", "freezes after", "is not sent", "loses its reply"]
)
async def test_a_worker_may_be_stopped_at_any_command(server: Server, keys: Keys, fault: Fault, replay: bool):
    commands = await stopped_at(MOST_COMMANDS, server, keys, fault, replay=replay)
    assert 10 < commands < MOST_COMMANDS
    at_once = asyncio.Semaphore(4)

    async def one(at: int) -> None:
        async with at_once:
            try:
                await stopped_at(at, server, keys, fault, replay=replay)
            except AssertionError as e:
                raise AssertionError(f"stopped at command {at}") from e

    async with asyncio.TaskGroup() as group:
        for at in range(commands):
            group.create_task(one(at))
