"""Guarantees 1 to 3: a worker of an ordered stage is stopped at each of its commands in turn, and nothing shows.

Each test works the same input once for every command that an undisturbed worker sends, and stops the worker there.
At the end the streams equal those of an undisturbed stage, entry by entry, number by number.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.contract.bus.faults import Doomed, Fault
from tests.contract.bus.toys import Bench, Frames, JoiningLogic, Toiler
from tests.leaks import check_keys
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts import commit
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage import checkpoints, replay

MOST_COMMANDS = 200


@pytest.fixture(autouse=True)
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few frames are several pages and several checkpoints."""
    monkeypatch.setattr(checkpoints, "CHECKPOINT_SPAN", 10)
    monkeypatch.setattr(replay, "REPLAY_PAGE", 2)


def first_half(bench: Bench, number: int, prefix: str = "r") -> list[Frames]:
    a, b, c = bench.runs(number, 3, prefix)
    return [{a: b"+1"}, {a: b"+2", b: b"+10"}, {b: b"+20"}, {a: b"+3"}, {c: b"+100", b: b"end"}, {a: b"+4"}]


def second_half(bench: Bench, number: int) -> list[Frames]:
    a, _, c, d = bench.runs(number, 4)
    return [{c: b"+200"}, {a: b"+5", d: b"+1"}, {c: b"end"}, {a: b"end"}, {d: b"+2"}]


def last(bench: Bench, number: int) -> list[Frames]:
    d = bench.runs(number, 4)[3]
    return [{d: b"+3"}, {d: b"+4"}, {d: b"end"}]


async def feed(bench: Bench, *halves: int) -> None:
    for half in halves:
        for number in range(bench.keys.partitions):
            await bench.feed(number, *(first_half, second_half)[half](bench, number))


class Scenario:
    """A worker that meets ``fault``; where ``replay``, after another has done half. Then one that does what is left.

    ``joined``: the numbers depend on how a worker's reads happened to cut the input, and each worker cuts differently.
    """

    def __init__(self, server: Server, keys: Keys, fault: Fault, *, replay: bool, joined: bool = False) -> None:
        self._server = server
        self._keys = keys
        self._fault: Fault = fault
        self._replay = replay
        self._joined = joined
        self._options: dict[str, Any] = {"logic": JoiningLogic} if joined else {}

    async def stopped_at(self, at: int) -> int:
        """Play it on keys of its own. Returns how many commands the worker sent."""
        bench = Bench(self._server, Keys(f"{self._keys.prefix}-{at}", 2))
        doomed = Doomed(self._server.url.safe, self._fault, at)
        await self._play(bench, doomed)
        await (bench.check_joined() if self._joined else bench.check())
        await check_keys(self._server, bench.keys)
        async for key in self._server.client.scan_iter(match=f"{bench.keys.prefix}:*", count=1000):
            await self._server.client.unlink(key)
        return doomed.commands

    async def stopped_anywhere(self) -> None:
        commands = await self.stopped_at(MOST_COMMANDS)
        assert 10 < commands < MOST_COMMANDS
        at_once = asyncio.Semaphore(4)

        async def one(at: int) -> None:
            async with at_once:
                try:
                    await self.stopped_at(at)
                except AssertionError as e:
                    raise AssertionError(f"stopped at command {at}") from e

        async with asyncio.TaskGroup() as group:
            for at in range(commands):
                group.create_task(one(at))

    async def _play(self, bench: Bench, doomed: Doomed) -> None:
        await feed(bench, 0)
        if self._replay:
            await bench.finish("first", **self._options, max_records=2)
        await feed(bench, 1)

        def victim(server: Server) -> Toiler:
            return Toiler(bench.stage("doomed", server, **self._options))

        running = asyncio.create_task(doomed.run(victim, bench.through))
        await eventually(lambda: running.done() or doomed.reached.is_set())
        if self._fault.startswith("freezes") and doomed.reached.is_set():
            await bench.dead_letter()
            await bench.finish("other", **self._options, max_records=1)
            for number in range(bench.keys.partitions):
                await bench.feed(number, *first_half(bench, number, "late"), *last(bench, number))
            doomed.thaw()
        await running
        await bench.dead_letter()
        await bench.finish(**self._options)


@pytest.mark.parametrize("replay", [False, True], ids=["from the start", "in a replay"])
@pytest.mark.parametrize("fault", ["dies after", "freezes before", "freezes after", "is not sent", "loses its reply"])
async def test_a_worker_may_be_stopped_at_any_command(server: Server, keys: Keys, fault: Fault, replay: bool):
    await Scenario(server, keys, fault, replay=replay).stopped_anywhere()


@pytest.mark.parametrize("fault", ["dies after", "freezes before", "freezes after"])
async def test_numbers_have_no_gap_and_no_duplicate_at_whatever_point_a_worker_stops(
    server: Server, keys: Keys, fault: Fault
):
    await Scenario(server, keys, fault, replay=True, joined=True).stopped_anywhere()


@pytest.mark.parametrize("fault", ["dies after", "freezes before", "loses its reply"])
async def test_a_worker_that_commits_in_parts_may_be_stopped_at_any_command(
    server: Server, keys: Keys, fault: Fault, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(commit, "COMMIT_VALUES", 50)
    await Scenario(server, keys, fault, replay=True).stopped_anywhere()
