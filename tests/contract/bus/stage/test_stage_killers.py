"""An entry that crashes workers is given up after bounded tries, and its partition continues."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import msgspec
import pytest

from tests.contract.bus.toys import GROUP, Bench, EndingLogic, Outputs, ToyLogic, working
from tests.waiting import eventually
from tokenbus.bus.stage import checkpoints, partitions
from tokenbus.bus.stage.partition import CAREFUL_LOADS, MOST_ALONE
from tokenbus.bus.stage.partitions import MAX_REPLAYS
from tokenbus.bus.stage.replay import CAREFUL_REPLAYS, MOST_DEATHS
from tokenbus.bus.stage.stage import Stage


class Death(BaseException):
    """Stands for a process that ends there and then: no handler of an Exception sees it."""


class MortalLogic(ToyLogic):
    """Dies of a frame ``kill``."""

    def apply(self, run: str, frame: bytes) -> None:
        if frame == b"kill":
            raise Death
        super().apply(run, frame)


async def until_it_dies(bench: Bench, worker: str) -> bool:
    """Run one worker until it dies or is done; return whether it died. A dead one returns nothing."""
    stage = bench.stage(worker, logic=MortalLogic)
    await stage.open()
    try:
        while not await bench.through():
            await stage.process(await stage.read(block_ms=20))
    except Death:
        await _vanish(bench, stage)
        return True
    await stage.close()
    return False


async def _vanish(bench: Bench, stage: Stage) -> None:
    """End the stage's tasks; what it held on the server stays to run out, as with a process that was killed."""
    held = {p: await bench.server.client.hgetall(bench.keys.lease(p, GROUP)) for p in stage.owned}
    await stage.close()
    for partition, lease in held.items():
        # What a close commits or gives up, a dead process would not have.
        again = {name: lease[name] for name in (b"owner", b"until") if name in lease}
        if again:
            await bench.server.client.hset(bench.keys.lease(partition, GROUP), mapping=again)


async def dead(bench: Bench) -> list[dict[str, Any]]:
    entries = await bench.server.client.xrange(bench.keys.dead)
    return [msgspec.json.decode(fields[b"__data__"]) for _, fields in entries]


async def test_an_entry_on_which_workers_die_is_given_up_and_no_other_is_lost(bench: Bench):
    victim, beside, later = bench.runs(0, 3)
    await bench.feed(
        0, {beside: b"+1"}, {victim: b"+1"}, {beside: b"+2"}, {victim: b"kill"}, {beside: b"+3"}, {later: b"+7"}
    )
    deaths = 0
    while await until_it_dies(bench, f"w{deaths}"):
        deaths += 1
        assert deaths <= CAREFUL_LOADS + MOST_ALONE + 1, "the tries are bounded"
    assert deaths >= MOST_ALONE
    [entry] = await dead(bench)
    assert (entry["run"], entry["stage"]) == (victim, GROUP)
    assert "did not commit" in entry["reason"]
    await bench.check()  # all that the others say, and of the victim its end as poison


async def test_a_replay_skips_abandoned_entries(bench: Bench):
    victim, beside = bench.runs(0, 2)
    await bench.feed(0, {beside: b"+1"}, {victim: b"+1"}, {victim: b"kill"})
    deaths = 0
    while await until_it_dies(bench, f"w{deaths}"):
        deaths += 1
    await bench.feed(0, {beside: b"+2"})
    async with working(
        bench.stage("next", logic=MortalLogic)
    ):  # its replay begins before the entry, for `beside` is open
        await eventually(bench.through)
    await bench.check()


class DeadlyReplay(EndingLogic):
    """Dies whenever it restores or replays a run named in `victims`. A worker that has processed them did not."""

    victims: ClassVar[set[str]] = set()
    deaths: ClassVar[list[str]] = []

    def apply(self, run: str, frame: bytes) -> None:
        self._die_of(run)
        super().apply(run, frame)

    def restore(self, run: str, state: bytes) -> None:
        self._die_of(run)
        super().restore(run, state)

    def _die_of(self, run: str) -> None:
        if run in self.victims:
            self.deaths.append(run)
            raise Death


@pytest.mark.parametrize("saved", [False, True])
async def test_a_run_whose_state_kills_each_worker_that_restores_it_ends_alone_after_five_of_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, saved: bool
):
    if saved:
        monkeypatch.setattr(checkpoints, "CHECKPOINT_SPAN", 0)
    monkeypatch.setattr(DeadlyReplay, "victims", set())
    monkeypatch.setattr(DeadlyReplay, "deaths", [])
    beside, victim, later = bench.runs(0, 3)
    await bench.feed(0, {beside: b"+1"}, {victim: b"+1"}, {beside: b"+2"}, {victim: b"+1"}, {beside: b"+4"})
    await bench.finish("first", logic=DeadlyReplay)
    DeadlyReplay.victims.add(victim)
    died = 0
    while True:
        stage = bench.stage(f"w{died}", logic=DeadlyReplay)
        await stage.open()
        await eventually(lambda died=died, stage=stage: len(DeadlyReplay.deaths) > died or 0 in stage.owned)
        if 0 in stage.owned:
            break
        await _vanish(bench, stage)
        await bench.dead_letter()
        died += 1
        assert died <= CAREFUL_REPLAYS + 1 + MOST_DEATHS, "the tries are bounded"
    assert DeadlyReplay.deaths == [victim] * (CAREFUL_REPLAYS + 1 + MOST_DEATHS)
    await bench.feed(0, {beside: b"+8"}, {later: b"+1"}, {beside: b"end"}, {later: b"end"})
    async with working(stage, opened=True):
        await eventually(bench.through)
    found = await Outputs.of(bench.server, bench.keys, 0)
    outputs = {run: [msgspec.json.decode(data)["says"] for _, data in log] for run, log in found.logs.items()}
    assert outputs == {beside: [1, 3, 7, 15, "end"], victim: [1, 2, "state_unreadable"], later: [1, "end"]}
    lease = await bench.server.client.hgetall(bench.keys.lease(0, GROUP))
    assert (lease[b"replays"], lease[b"replaying"]) == (b"0", b"")
    DeadlyReplay.victims.clear()
    async with working(bench.stage("after", logic=DeadlyReplay)) as after:
        await stage.close()
        await eventually(lambda: 0 in after.owned)
    assert (await Outputs.of(bench.server, bench.keys, 0)).logs == found.logs


async def test_a_worker_that_dies_as_it_gives_up_leaves_that_to_the_next(bench: Bench):
    [victim] = bench.runs(0, 1)
    await bench.feed(0, {victim: b"kill"})
    noted = {"loads": CAREFUL_LOADS, "suspect": f"{bench.last[0]} {MOST_ALONE + 1}"}
    await bench.server.client.hset(bench.keys.lease(0, GROUP), mapping=noted)
    assert not await until_it_dies(bench, "next")
    [entry] = await dead(bench)
    assert entry["run"] == victim
    await bench.check()


async def test_a_worker_that_dies_for_another_reason_gives_up_no_entry(bench: Bench):
    [run] = bench.runs(0, 1)
    await bench.feed(0, {run: b"+1"})
    for n in range(CAREFUL_LOADS + MOST_ALONE + 3):  # as many loads, and no entry in hand at any end
        stage = bench.stage(f"w{n}")
        await stage.open()
        await eventually(lambda stage=stage: 0 in stage.owned)
        await stage.close()
    async with working(bench.stage("last")):
        await eventually(bench.through)
    assert await dead(bench) == []
    await bench.check()


async def test_a_replay_that_a_stopping_worker_gives_up_does_not_count(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    [run] = bench.runs(0, 1)
    await bench.feed(0, {run: b"+1"}, {run: b"+2"})
    await bench.finish("first")
    lease_key = bench.keys.lease(0, GROUP)
    rebuild = partitions.rebuild
    replayed = asyncio.Event()

    async def endless(*args: Any) -> None:
        await rebuild(*args)
        if args[2].number == 0:
            replayed.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patched:
        patched.setattr(partitions, "rebuild", endless)
        for before in (0, CAREFUL_REPLAYS + 1):  # plain replays, then careful ones, which make notes
            await bench.server.client.hset(lease_key, "replays", before)
            for n in range(MAX_REPLAYS + 1):
                replayed.clear()
                async with working(bench.stage(f"stops{before}-{n}")):
                    await replayed.wait()
                lease = await bench.server.client.hgetall(lease_key)
                assert int(lease[b"replays"]) == before
                assert not lease.get(b"replaying")
    await bench.feed(0, {run: b"end"})
    await bench.finish("last")
    await bench.check()
