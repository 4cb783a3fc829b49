"""State that nobody can read ends its run, and never blocks its partition."""

from __future__ import annotations

import pytest

from tests.contract.bus.toys import GROUP, Bench, Outputs, Tally, ToyLogic, working
from tests.waiting import eventually
from tokenbus.bus.stage import partition
from tokenbus.bus.stage.partition import RunPosition
from tokenbus.events.error_info import ErrorInfo


class EndingLogic(ToyLogic):
    """Can end a run of which it knows its number alone."""

    def fail_unreadable(self, run: str, error: ErrorInfo, standing: RunPosition) -> None:
        self.runs[run] = Tally(seq=standing.seq)
        self.fail(run, error)


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each commit writes checkpoints of what is open."""
    monkeypatch.setattr(partition, "CHECKPOINT_SPAN", -1)
    monkeypatch.setattr(partition, "MAX_CHECKPOINT_SPAN", -1)


@pytest.mark.parametrize("state", [b"\xc1", b"\x92\xa31-1\xc4\x01\xc1", b"\x95\x01\x02\x03\x04\x05"])
async def test_a_checkpoint_of_another_version_ends_its_run_and_the_others_go_on(bench: Bench, state: bytes):
    lost, kept = bench.runs(0, 2)
    await bench.feed(0, {lost: b"+1"}, {kept: b"+1"})
    async with working(bench.stage("a", logic=EndingLogic)):
        await eventually(bench.through)
    key = bench.keys.state(0, GROUP)
    assert await bench.server.client.hexists(key, lost)
    await bench.server.client.hset(key, lost, state)
    await bench.feed(0, {lost: b"end"}, {kept: b"+2"}, {kept: b"end"})
    async with working(bench.stage("b", logic=EndingLogic)):
        await eventually(bench.through)
    found = await Outputs.of(bench.server, bench.keys, 0)
    assert [data for _, data in found.logs[lost]] == [
        b'{"run":"%s","seq":0,"says":1}' % lost.encode(),
        b'{"run":"%s","seq":1,"says":"state_unreadable"}' % lost.encode(),
    ]
    assert found.logs[kept] == Outputs.expected([{kept: b"+1"}, {kept: b"+2"}, {kept: b"end"}]).logs[kept]
    assert not await bench.server.client.hexists(key, lost)


async def test_a_run_whose_hash_is_none_does_not_hold_up_its_partition(bench: Bench):
    broken, beside = bench.runs(0, 2)
    await bench.feed(0, {broken: b"+1"}, {beside: b"+1"})
    async with working(bench.stage("a", logic=EndingLogic)):
        await eventually(bench.through)
    await bench.server.client.hset(bench.keys.run(broken), "seq", "many")
    await bench.feed(0, {beside: b"+2"}, {beside: b"end"})
    async with working(bench.stage("b", logic=EndingLogic)):
        await eventually(bench.through)
    found = await Outputs.of(bench.server, bench.keys, 0)
    assert found.logs[beside] == Outputs.expected([{beside: b"+1"}, {beside: b"+2"}, {beside: b"end"}]).logs[beside]
