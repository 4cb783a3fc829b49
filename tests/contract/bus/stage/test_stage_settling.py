"""Outputs that wait for work outside the bus: the work is done before the commit, and again after a crash."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import pytest

from tests.contract.bus.toys import Bench, ToyLogic, working
from tests.waiting import eventually
from tokenbus.bus.keys import Keys


class Outside:
    """The work that the toy's frames require before their output; it may be delayed, or fail."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.begun = 0
        self.free = asyncio.Event()
        self.fails = 0


class SettlingLogic(ToyLogic):
    """Says nothing that was not done outside before."""

    outside: Outside

    def __init__(self, partition: int, keys: Keys) -> None:
        super().__init__(partition, keys)
        self._waiting: list[str] = []

    def apply(self, run: str, frame: bytes) -> None:
        super().apply(run, frame)
        self._waiting.append(frame.decode())

    @property
    def replay_unfinished(self) -> bool:
        return bool(self._waiting)

    async def finish_replay(self) -> None:
        waiting, self._waiting = self._waiting, []
        self.outside.begun += 1
        if self.outside.fails:
            self.outside.fails -= 1
            raise RuntimeError("as asked")
        await self.outside.free.wait()
        self.outside.done += waiting

    def discard_outputs(self) -> None:
        super().discard_outputs()
        self._waiting = []


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> Outside:
    made = Outside()
    monkeypatch.setattr(SettlingLogic, "outside", made, raising=False)
    return made


async def published_count(bench: Bench, partition: int) -> int:
    return await bench.server.client.xlen(bench.keys.topic(partition, "events"))


async def test_outputs_wait_until_it_is_done(bench: Bench, outside: Outside):
    [run] = bench.runs(0, 1)
    await bench.feed(0, {run: b"+1"}, {run: b"+2"})
    async with working(bench.stage("one", logic=SettlingLogic)):
        await eventually(lambda: outside.begun == 1)
        assert await published_count(bench, 0) == 0
        outside.free.set()
        await eventually(bench.through)
    assert outside.done == ["+1", "+2"]
    await bench.check()


async def test_other_partitions_continue_during_the_outage(bench: Bench, outside: Outside):
    [slow], [quick] = bench.runs(0, 1), bench.runs(1, 1)
    logic = {0: SettlingLogic, 1: ToyLogic}
    async with working(bench.stage("one", logic=lambda partition, keys: logic[partition](partition, keys))):
        await bench.feed(0, {slow: b"+1"})
        await eventually(lambda: outside.begun == 1)
        for said_by_now, frame in enumerate((b"+1", b"+2")):
            await bench.feed(1, {quick: frame})
            await eventually(partial(_said_more, bench, 1, said_by_now))
        assert await published_count(bench, 0) == 0
        outside.free.set()
        await eventually(bench.through)
    await bench.check()


async def _said_more(bench: Bench, partition: int, than: int) -> bool:
    return await published_count(bench, partition) > than


async def test_a_worker_that_stops_in_the_middle_leaves_it_to_the_next(bench: Bench, outside: Outside):
    [run] = bench.runs(0, 1)
    await bench.feed(0, {run: b"+1"})
    first = bench.stage("first", logic=SettlingLogic)
    await first.open()
    await eventually(lambda: first.owned == [0, 1])
    await first.process(await eventually(first.read))
    await eventually(lambda: outside.begun == 1)
    await first.close()
    outside.free.set()
    await bench.finish("second", logic=SettlingLogic)
    assert outside.done == ["+1"]
    await bench.check()


async def test_a_replay_has_no_side_effects(bench: Bench, outside: Outside):
    [run] = bench.runs(0, 1)
    outside.free.set()
    await bench.feed(0, {run: b"+1"})
    await bench.finish("first", logic=SettlingLogic)
    await bench.feed(0, {run: b"+2"})
    await bench.finish("second", logic=SettlingLogic)
    assert outside.done == ["+1", "+2"]
    await bench.check()


async def test_a_logic_that_raises_there_is_loaded_again(
    bench: Bench, outside: Outside, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.CRITICAL, "tokenbus.bus.stage.stage")
    [run] = bench.runs(0, 1)
    outside.free.set()
    outside.fails = 1
    await bench.feed(0, {run: b"+1"})
    await bench.finish("one", logic=SettlingLogic)
    assert outside.begun >= 2
    await bench.check()
