"""Unreadable state ends its run and never blocks its partition."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from redis.exceptions import ResponseError

from tests.contract.bus.toys import GROUP, Bench, EndingLogic, JoiningLogic, Outputs, working
from tests.waiting import eventually
from tokenbus.bus.liveness import Liveness
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage import checkpoints, partitions


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each commit writes checkpoints of what is open."""
    monkeypatch.setattr(checkpoints, "CHECKPOINT_SPAN", -1)
    monkeypatch.setattr(checkpoints, "MAX_CHECKPOINT_SPAN", -1)


@pytest.mark.parametrize("state", [b"\xc1", b"\x92\xa31-1\xc4\x01\xc1", b"\x95\x01\x02\x03\x04\x05"])
async def test_a_checkpoint_of_another_version_ends_its_run_and_the_others_continue(bench: Bench, state: bytes):
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


def error_once(client: Any, reply: str) -> list[ResponseError]:
    """The next look-up of runs' hashes gets this error reply, as from a proxy or a server in trouble."""
    errors = [ResponseError(reply)]
    pipeline = client.pipeline

    def failing(**options: Any) -> Any:
        pipe = pipeline(**options)
        whole = pipe.execute

        async def execute(**how: Any) -> Any:
            commands = [command[0][0] for command in pipe.command_stack]
            found = await whole(**how)
            if errors and "HMGET" in commands:
                return [errors.pop(), *found[1:]]
            return found

        pipe.execute = execute
        return pipe

    client.pipeline = failing
    return errors


@pytest.mark.parametrize(
    "reply", ["MISCONF Errors writing to the AOF file", "LOADING the dataset", "ERR upstream failure"]
)
async def test_an_error_that_may_pass_costs_no_run_its_number(bench: Bench, server_url: str, reply: str):
    first, second = bench.runs(0, 2)
    await bench.feed(0, {first: b"+1"}, {second: b"+1"}, {second: b"+1"})
    async with working(bench.stage("a", logic=JoiningLogic)):
        await eventually(bench.through)
    async with Server(server_url) as server:
        errors = error_once(server.client, reply)
        async with working(bench.stage("b", server, logic=JoiningLogic)):
            await bench.feed(0, {first: b"+2"}, {second: b"+2"})
            await eventually(bench.through)
        assert not errors
    await bench.check_joined()


class BrokenLogic(EndingLogic):
    """Its replay fails, always."""

    def recall(self, run: str, seq: int) -> None:
        raise RuntimeError("a defect")


async def test_a_partition_whose_replay_always_fails_ends_its_open_runs_and_continues(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(partitions, "MAX_REPLAYS", 2)
    kept, lost, later = bench.runs(0, 3)
    await bench.feed(0, {kept: b"+1"}, {lost: b"+1"}, {kept: b"end"})
    async with working(bench.stage("a", logic=EndingLogic)):
        await eventually(bench.through)
    await bench.feed(0, {lost: b"+2"}, {later: b"+1"}, {later: b"end"})
    liveness = Liveness()
    failed: list[str] = []
    liveness.failed_work = failed.append
    async with working(bench.stage("b", logic=BrokenLogic, liveness=liveness)):
        await eventually(bench.through, timeout=60)
    assert failed == [f"replay {GROUP}"] * 2
    found = await Outputs.of(bench.server, bench.keys, 0)
    assert [msgspec.json.decode(data)["says"] for _, data in found.logs[lost]][:2] == [1, "state_unreadable"]
    assert found.logs[later] == Outputs.expected([{later: b"+1"}, {later: b"end"}]).logs[later]
    assert found.logs[kept] == Outputs.expected([{kept: b"+1"}, {kept: b"end"}]).logs[kept]
    assert await bench.server.client.hget(bench.keys.lease(0, GROUP), "replays") == b"0"
