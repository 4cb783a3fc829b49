"""The runtime over a real Cluster of three nodes: partitions are on different nodes, and reads wait independently."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as ServerGone

from tests.censoring import FORBIDDEN
from tests.contract.bus.toys import Bench, Frames, Outputs, saying, working
from tests.waiting import eventually
from tokenbus.bus import scripts
from tokenbus.bus.control import ControlListener
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts import limits
from tokenbus.bus.scripts.limits import Scope
from tokenbus.bus.server.run_scripts import run_script, run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import StreamReader
from tokenbus.bus.work_queue import QueueOptions, WorkQueue
from tokenbus.events.frames import Control, encode

KEYS = Keys("clustered", 6)


class ClusterBench(Bench):
    """Feeds one command at a time: a pipeline may not hold a transaction here."""

    async def feed(self, partition: int, *entries: Frames) -> None:
        for entry in entries:
            self.last[partition] = (await self.server.client.xadd(self.keys.topic(partition, "raw"), entry)).decode()
        self.entries[partition] += entries


async def test_the_partitions_lie_on_different_nodes(clustered: Server):
    await clustered.client.initialize()
    nodes = {clustered.client.get_node_from_key(KEYS.topic(p, "raw")).name for p in range(KEYS.partitions)}
    assert len(nodes) == 3


async def test_a_stage_works_all_its_partitions_and_hands_them_over(clustered: Server):
    bench = ClusterBench(clustered, KEYS)
    runs = {p: bench.runs(p, 2) for p in range(KEYS.partitions)}
    for partition, (a, b) in runs.items():
        await bench.feed(partition, {a: b"+1"}, {b: b"+2"}, {a: b"+3"}, {b: b"bad"})
    async with working(bench.stage("first")) as first:
        await eventually(bench.through)
        async with working(bench.stage("second")) as second:
            await eventually(lambda: len(first.owned) == len(second.owned) == 3)
            for partition, (a, _) in runs.items():
                await bench.feed(partition, {a: b"+4"}, {a: b"end"})
            await eventually(bench.through)
    await bench.check()
    assert await clustered.client.xlen(KEYS.dead) == KEYS.partitions


async def test_an_entry_in_one_partition_is_read_while_the_others_are_silent(clustered: Server):
    reader = StreamReader(clustered, count=10)
    offsets = {KEYS.topic(p, "raw"): "0-0" for p in range(KEYS.partitions)}
    for partition in range(KEYS.partitions):
        reading = asyncio.create_task(reader.read(offsets))
        stream = KEYS.topic(partition, "raw")
        entry_id = await clustered.client.xadd(stream, {"n": "1"})
        [(name, [(found, _)])] = await reading
        assert (name, found) == (stream, entry_id)
        offsets[stream] = entry_id.decode()
    waiting = asyncio.create_task(reader.read(offsets))
    await asyncio.sleep(0)
    reader.wake()
    assert await waiting == []
    await reader.close()


async def test_commands_that_are_redirected_do_not_cut_those_under_way(clustered: Server):
    client = clustered.client
    stream, moved = KEYS.topic(0, "raw"), KEYS.topic(1, "raw")
    await client.initialize()
    right, wrong = client.get_node_from_key(moved), client.get_node_from_key(stream)
    assert right != wrong
    reading = asyncio.create_task(client.xread({stream: "0-0"}, block=60_000))

    async def blocked() -> bool:
        return (await client.info(target_nodes=wrong))["blocked_clients"] == 1

    await eventually(blocked)
    for _ in range(2 * client.reinitialize_steps):
        client.nodes_manager.slots_cache[client.keyslot(moved)] = [wrong]  # as after its slot has moved
        await client.xadd(moved, {"n": "1"})
    assert not reading.done()
    await client.xadd(stream, {"n": "1"})
    [(name, [_])] = await reading
    assert name == stream.encode()
    assert client.get_node_from_key(moved) == right


async def test_scripts_run_on_the_node_of_their_keys_even_if_it_forgot_them(clustered: Server):
    for _ in range(2):
        await clustered.client.execute_command("SCRIPT FLUSH", target_nodes=clustered.client.PRIMARIES)
        calls = [
            scripts.acquire(KEYS.lease(p, "g"), KEYS.topic(p, "raw"), owner="a", ttl_ms=1000)
            for p in range(KEYS.partitions)
        ]
        assert all(token for token, *_ in await run_scripts(clustered, calls))


async def test_a_queue_takes_finishes_and_hands_back_in_all_partitions(clustered: Server):
    streams = [KEYS.topic(p, "turns") for p in range(KEYS.partitions)]

    def queue(worker: str) -> WorkQueue:
        return WorkQueue(clustered, QueueOptions(group="g", worker=worker, idle_s=2.0, beat_s=0.05), streams)

    first, second = queue("a"), queue("b")
    await first.open()
    for stream in streams:
        await clustered.client.xadd(stream, {"n": stream})
    items = [await first.read() for _ in streams]
    assert {item.stream for item in items} == set(streams)
    await first.finish(items[:2])
    await first.hand_back(items[2:4])
    await second.open()
    again = [await second.read() for _ in range(2)]
    assert {item.entry_id for item in again} == {item.entry_id for item in items[2:4]}
    await first.close()
    claimed = [await second.read() for _ in range(2)]
    assert [item.deliveries for item in claimed] == [1, 1], "nobody had begun them"
    await second.finish(again + claimed)
    assert [await clustered.client.xlen(stream) for stream in streams] == [0] * len(streams)
    await second.close()


async def test_the_limits_of_a_call_are_decided_in_one_step_whatever_it_is_limited_by(clustered: Server):
    scopes = [
        Scope("provider", KEYS.limit("provider:p"), concurrency=1, tokens_per_minute=6000),
        Scope("model", KEYS.limit("model:p/m"), requests_per_second=1000),
        Scope("tenant", KEYS.limit("tenant:acme"), concurrency=5),
    ]

    async def ask(call: str, *, worker: str) -> list[Any]:
        return await run_script(
            clustered, limits.reserve(scopes, member=call, worker=worker, tokens=600, lease_ms=60_000)
        )

    granted, *taken = await ask("one", worker="a")
    assert granted == b"ok"
    assert (await ask("two", worker="b"))[:2] == [b"wait", 1], "the provider takes one call at once"
    assert await clustered.client.zrange(scopes[2].held, 0, -1) == [b"one"], "who is refused takes nothing"
    await run_script(clustered, limits.renew(scopes[0].held, lease_ms=60_000, members=["one"]))
    until = [int(time) for time in taken]
    await run_script(clustered, limits.refund(scopes, member="one", left=600, taken=until))
    assert (await ask("two", worker="b"))[0] == b"ok"
    await run_script(clustered, limits.pause(scopes[1].key, ms=60_000))
    await run_script(clustered, limits.refund(scopes, member="two", left=0, taken=until))
    assert (await ask("three", worker="a"))[:2] == [b"wait", 2], "the model's provider asked for a pause"


async def test_control_messages_of_all_partitions_are_received(clustered: Server):
    received: list[str] = []
    listener = ControlListener(clustered, KEYS, lambda message: received.append(message.run))
    await listener.open()
    for round_ in range(3):
        for partition in range(KEYS.partitions):
            await clustered.client.xadd(
                KEYS.topic(partition, "control"), {"r": encode(Control(f"{round_}-{partition}"))}
            )
    await eventually(lambda: len(received) == 18)
    assert len(set(received)) == 18
    await listener.close()


async def test_a_frame_that_breaks_every_connection_ends_only_its_run(
    clustered: Server, monkeypatch: pytest.MonkeyPatch
):
    """As in `test_unreadable_entry`, without a proxy: Cluster clients connect to addresses that nodes report."""
    bench = ClusterBench(clustered, KEYS)
    bad, inside, beside = bench.runs(0, 3)
    [other] = bench.runs(1, 1)
    await bench.feed(0, {bad: b"+1", inside: b"+1"}, {bad: b"+1" + FORBIDDEN, inside: b"+1"}, {beside: b"+1"})
    await bench.feed(0, {inside: b"end"}, {bad: b"+1"}, {beside: b"end"})
    await bench.feed(1, {other: b"+1"}, {other: b"end"})
    read: Any = AbstractConnection.read_response
    broken: list[str] = []

    async def breaks(self: AbstractConnection, *args: Any, **options: Any) -> Any:
        reply = await read(self, *args, **options)
        if FORBIDDEN in repr(reply).encode():
            broken.append(str(self))
            await self.disconnect()
            raise ServerGone("cut off in a reply")
        return reply

    async def through() -> bool:
        try:
            return await bench.through()
        except ServerGone:  # over a connection that just broke
            return False

    with monkeypatch.context() as patch:
        patch.setattr(AbstractConnection, "read_response", breaks)
        async with working(bench.stage("a")):
            await eventually(through)
    assert broken
    async with Server(clustered.url) as unbroken:
        found = await Outputs.of(unbroken, bench.keys, 0)
        elsewhere = await Outputs.of(unbroken, bench.keys, 1)
    assert [data for _, data in found.logs[bad]][:2] == [saying(bad, 0, 1), saying(bad, 1, "poison")]
    expected = Outputs.expected([{inside: b"+1"}, {inside: b"+1"}, {inside: b"end"}, {beside: b"+1"}, {beside: b"end"}])
    assert (found.logs[inside], found.logs[beside]) == (expected.logs[inside], expected.logs[beside])
    assert elsewhere.logs[other] == Outputs.expected([{other: b"+1"}, {other: b"end"}]).logs[other]
