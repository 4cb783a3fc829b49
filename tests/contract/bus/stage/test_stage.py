"""The ordered stage: state by replay, checkpoints, poison, back-pressure, and what it does when it is disturbed."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from tests.contract.bus.faults import Gate
from tests.contract.bus.toys import GROUP, NEXT, Bench, JoiningLogic, ToyLogic, working
from tests.waiting import eventually
from tokenbus.bus.dead_letters import KEPT_BYTES
from tokenbus.bus.keys import Keys
from tokenbus.bus.leases import Lease
from tokenbus.bus.scripts import Commit
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage import checkpoints, partition, replay


async def lease_of(bench: Bench, number: int, group: str = GROUP) -> dict[str, str]:
    found = await bench.server.client.hgetall(bench.keys.lease(number, group))
    return {name.decode(): value.decode() for name, value in found.items()}


async def dead(bench: Bench) -> list[dict[str, Any]]:
    return [msgspec.json.decode(f[b"__data__"]) for _, f in await bench.server.client.xrange(bench.keys.dead)]


# --- replay -----------------------------------------------------------------------------------------------------


async def test_a_replayed_state_is_the_undisturbed_one(bench: Bench):
    a, b, c = bench.runs(0, 3)
    await bench.feed(0, {a: b"+1"}, {b: b"+5", c: b"+7"}, {a: b"+2"}, {c: b"end"}, {b: b"+5"})
    first: dict[int, ToyLogic] = {}
    second: dict[int, ToyLogic] = {}
    await bench.finish("first", logics=first)
    async with working(bench.stage("second", logics=second)) as worker:
        await eventually(lambda: worker.owned == [0, 1])
        assert second[0].runs == first[0].runs
        assert set(second[0].runs) == {a, b}
    await bench.check()


async def test_numbers_continue_without_a_gap_for_any_cut_of_the_input(bench: Bench):
    [run] = bench.runs(0, 1)
    await bench.feed(0, *({run: b"+1"} for _ in range(7)))
    await bench.finish("first", logic=JoiningLogic, max_records=2)
    await bench.feed(0, *({run: b"+1"} for _ in range(5)))
    await bench.finish("second", logic=JoiningLogic, max_records=100)
    await bench.check_joined()


async def test_a_long_run_is_checkpointed_and_its_replay_is_short(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoints, "CHECKPOINT_SPAN", 200)
    a, b = bench.runs(0, 2)
    await bench.feed(0, {a: b"+1"}, *({b: b"+1"} for _ in range(400)))
    await bench.finish("first", max_records=10)
    lease = await lease_of(bench, 0)
    needed = await bench.server.client.xrange(bench.keys.topic(0, "raw"), f"({lease['watermark']}", lease["offset"])
    assert len(needed) <= 110
    assert set(await bench.server.client.hgetall(bench.keys.state(0, GROUP))) == {a.encode(), b.encode()}
    logics: dict[int, ToyLogic] = {}
    await bench.feed(0, {a: b"+1"}, {b: b"end"}, {a: b"end"})
    await bench.finish("second", logics=logics)
    await bench.check()
    assert await bench.server.client.hlen(bench.keys.state(0, GROUP)) == 0
    assert (await lease_of(bench, 0))["watermark"] == bench.last[0]


async def test_a_silent_runs_checkpoint_outlasts_the_entries_before_it(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """The watermark passes the checkpoint of a run that does not change; no owner may fall back behind it."""
    monkeypatch.setattr(checkpoints, "CHECKPOINT_SPAN", 50)
    silent, busy = bench.runs(0, 2)
    await bench.feed(0, {silent: b"+1"}, *({busy: b"+1"} for _ in range(600)))
    await bench.finish("first")
    marks = [(await lease_of(bench, 0))["watermark"]]
    for n in range(3):
        await bench.feed(0, {busy: b"+1"})
        await bench.finish(f"later {n}")
        marks.append((await lease_of(bench, 0))["watermark"])
    assert marks == sorted(marks, key=lambda mark: tuple(map(int, mark.split("-"))))
    await bench.feed(0, {silent: b"+1"}, {silent: b"end"}, {busy: b"end"})
    await bench.finish("last")
    await bench.check()


async def test_input_is_kept_as_long_as_an_open_run_needs_it(bench: Bench):
    open_run, other = bench.runs(0, 2)
    await bench.feed(0, {open_run: b"+1"}, *({other: b"+1"} for _ in range(500)))
    await bench.finish("first", max_records=50)
    assert await bench.server.client.xlen(bench.keys.topic(0, "raw")) == 501
    await bench.feed(0, {other: b"end"}, {open_run: b"end"})
    await bench.finish("second")
    assert await bench.server.client.xlen(bench.keys.topic(0, "raw")) <= 200
    await bench.check()


async def test_a_replay_without_its_entries_continues_and_logs_the_loss(bench: Bench, caplog: pytest.LogCaptureFixture):
    [run] = bench.runs(0, 1)
    await bench.feed(0, {run: b"+1"}, {run: b"+1"})
    await bench.finish("first")
    await bench.server.client.xtrim(bench.keys.topic(0, "raw"), maxlen=0, approximate=False)
    await bench.feed(0, {run: b"+1"})
    await bench.finish("second")
    assert "entries that a replay needs are gone" in caplog.text


async def test_a_replay_that_was_overtaken_ends(bench: Bench, caplog: pytest.LogCaptureFixture):
    [run] = bench.runs(0, 1)
    await bench.feed(0, {run: b"+1"}, {run: b"+1"})
    await bench.finish("first")
    stands = await lease_of(bench, 0)
    before = Lease(0, "1:frozen", stands["offset"], stands["watermark"])
    await bench.server.client.xtrim(bench.keys.topic(0, "raw"), maxlen=0, approximate=False)
    part = partition.Partition(before, ToyLogic(0, bench.keys), keys=bench.keys, topic="raw", group=GROUP)
    with pytest.raises(replay.Replaced):
        await replay.rebuild(bench.server, bench.keys, part, before)
    assert "needs are gone" not in caplog.text


async def test_a_replay_whose_entries_a_fail_over_lost_with_the_offset_is_no_error(
    bench: Bench, caplog: pytest.LogCaptureFixture
):
    [run] = bench.runs(0, 1)
    await bench.feed(0, {run: b"+1"}, {run: b"+1"})
    await bench.finish("first")
    stands = await lease_of(bench, 0)
    read = Lease(0, stands["token"], stands["offset"], "0-0")
    part = partition.Partition(read, ToyLogic(0, bench.keys), keys=bench.keys, topic="raw", group=GROUP)
    await bench.server.client.xtrim(bench.keys.topic(0, "raw"), maxlen=0, approximate=False)
    await bench.server.client.hset(part.lease_key, "offset", "0-0")
    await replay.rebuild(bench.server, bench.keys, part, read)
    assert "needs are gone" not in caplog.text
    await bench.server.client.hset(part.lease_key, "offset", read.offset)
    again = partition.Partition(read, ToyLogic(0, bench.keys), keys=bench.keys, topic="raw", group=GROUP)
    await replay.rebuild(bench.server, bench.keys, again, read)
    assert "needs are gone" in caplog.text, "the same offset: the entries are missing, and nothing explains it"


async def test_a_lease_lost_in_a_long_replay_ends_it(bench: Bench, server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replay, "REPLAY_PAGE", 1)
    [run] = bench.runs(0, 1)
    await bench.feed(0, *({run: b"+1"} for _ in range(50)))
    await bench.finish("first", max_records=100)
    async with Server(server.url) as other:
        gate = Gate(other)
        worker = bench.stage("frozen", other)
        await worker.open()
        gate.shut()
        await bench.dead_letter()
        await bench.feed(0, {run: b"+1"})
        await bench.finish("second")
        async with working(bench.stage("third")) as third:
            gate.open()
            await eventually(lambda: len(worker.owned) == len(third.owned) == 1)
        await worker.close()
    await bench.check()


# --- poison -----------------------------------------------------------------------------------------------------


async def test_poison_becomes_a_dead_letter_its_run_ends_and_the_partition_continues(
    bench: Bench, caplog: pytest.LogCaptureFixture
):
    bad, good = bench.runs(0, 2)
    await bench.feed(0, {bad: b"+1", good: b"+1"}, {bad: b"\xff?", good: b"+2"}, {good: b"end"})
    await bench.finish()
    await bench.check()
    [entry] = await dead(bench)
    second = (await bench.server.client.xrange(bench.keys.topic(0, "raw")))[1][0].decode()
    assert entry["run"] == bad
    assert entry["reason"].startswith("ValueError: invalid literal")
    assert (entry["stage"], entry["stream"], entry["entry"]) == (GROUP, bench.keys.topic(0, "raw"), second)
    assert entry["bytes"] == "/z8="
    assert f"{GROUP} partition 0: entry {second}, run {bad}\n" in caplog.text
    assert "ValueError: invalid literal" in caplog.text, "what was raised, with where"


async def test_poison_is_poison_in_a_replay_too_and_is_not_buried_again(bench: Bench):
    bad, good = bench.runs(0, 2)
    await bench.feed(0, {good: b"+1"}, {bad: b"+1"}, {bad: b"poison"})
    await bench.finish("first")
    await bench.feed(0, {good: b"+1"})
    logics: dict[int, ToyLogic] = {}
    await bench.finish("second", logics=logics)
    assert set(logics[0].runs) == {good}
    assert len(await dead(bench)) == 1
    await bench.check()


async def test_a_frame_of_a_run_of_another_partition_is_poison(bench: Bench):
    [here], [elsewhere] = bench.runs(0, 1), bench.runs(1, 1)
    await bench.server.client.xadd(bench.keys.topic(0, "raw"), {elsewhere: b"+1", b"\xfe\xff": b"+1"})
    await bench.feed(0, {here: b"+1"})
    await bench.finish()
    await bench.check()
    assert {entry["run"] for entry in await dead(bench)} <= {elsewhere, "\ufffd\ufffd"}
    assert elsewhere in {entry["run"] for entry in await dead(bench)}


async def test_of_a_huge_poison_frame_only_the_beginning_is_kept(bench: Bench):
    [run] = bench.runs(0, 1)
    await bench.feed(0, {run: b"x" * 3_000_000})
    await bench.finish()
    [entry] = await dead(bench)
    assert len(entry["bytes"]) <= KEPT_BYTES * 4 / 3 + 4
    assert entry["size"] == 3_000_000


class BrokenLogic(ToyLogic):
    """Cannot put out what it has for partition 0."""

    def flush(self, commit: Commit) -> None:
        if self._partition == 0 and self._said:
            raise ZeroDivisionError("a bug")
        super().flush(commit)


async def test_a_bug_in_the_logic_stops_only_its_partition(bench: Bench, caplog: pytest.LogCaptureFixture):
    [a], [b] = bench.runs(0, 1), bench.runs(1, 1)
    await bench.feed(0, {a: b"+1"})
    await bench.feed(1, {b: b"+1"})
    async with working(bench.stage("broken", logic=BrokenLogic)):
        await eventually(lambda: _committed(bench, 1))
        await bench.feed(1, {b: b"+2"})
        await eventually(lambda: _committed(bench, 1))
    assert "partition 0: the logic failed" in caplog.text
    assert await bench.offset(0) == "0-0"
    await bench.finish("mended")
    await bench.check()


class UnstorableLogic(ToyLogic):
    """Cannot serialize the state of one run."""

    unstorable = ""

    def snapshot(self, run: str) -> bytes:
        if run == self.unstorable:
            raise OverflowError("a number too large")
        return super().snapshot(run)


async def test_a_run_whose_state_cannot_be_stored_ends_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoints, "CHECKPOINT_SPAN", 10)
    bad, good = bench.runs(0, 2)
    monkeypatch.setattr(UnstorableLogic, "unstorable", bad)
    entries = [{bad: b"+1", good: b"+1"}, *({good: b"+1"} for _ in range(12)), {good: b"end"}]
    await bench.feed(0, *entries)
    await bench.finish("first", logic=UnstorableLogic)
    log = await bench.server.client.xrange(bench.keys.log(bad))
    assert [msgspec.json.decode(fields[b"__data__"])["says"] for _, fields in log] == [1, "poison"]
    [entry] = await dead(bench)
    assert (entry["run"], entry["reason"]) == (bad, "its state cannot be stored: OverflowError: a number too large")
    logics: dict[int, ToyLogic] = {}
    await bench.feed(0, {good: b"+5"}, {bad: b"+7"})
    await bench.finish("second", logics=logics)
    assert logics[0].runs[good].total == 5, "no other run lost an event"


async def _committed(bench: Bench, number: int) -> bool:
    return await bench.offset(number) == bench.last[number]


async def test_a_commit_that_the_server_always_refuses_stops_only_its_partition(
    bench: Bench, caplog: pytest.LogCaptureFixture
):
    [a], [b] = bench.runs(0, 1), bench.runs(1, 1)
    await bench.server.client.set(bench.keys.topic(0, "events"), "no stream")
    await bench.feed(0, {a: b"+1"})
    await bench.feed(1, {b: b"+1"})
    async with working(bench.stage("a")):
        await eventually(lambda: _committed(bench, 1))
        await eventually(lambda: "partition 0 waits until its key is fixed" in caplog.text)
        await bench.server.client.delete(bench.keys.topic(0, "events"))
        await eventually(bench.through)


# --- back-pressure ------------------------------------------------------------------------------------------------


async def test_a_partition_waits_while_the_next_stage_lags_and_the_others_do_not(bench: Bench):
    [a], [b] = bench.runs(0, 1), bench.runs(1, 1)
    await bench.feed(0, *({a: b"+1"} for _ in range(40)))
    async with working(bench.stage("a", lag_bytes=200, max_records=1)):
        lag = await eventually(lambda: _lag_over(bench, 200))
        assert lag < 300
        await bench.feed(1, {b: b"+1"}, {b: b"+1"})
        await eventually(lambda: _committed(bench, 1))
        assert not await _committed(bench, 0)
        assert await _lag_over(bench, 200) == lag
        for _ in range(40):
            arrived = (await lease_of(bench, 0, NEXT))["arrived"]
            await bench.server.client.hset(bench.keys.lease(0, NEXT), "done", arrived)
            if await _committed(bench, 0):
                break
            await eventually(lambda: _committed_or_lagging(bench))
    await bench.check()


async def _lag_over(bench: Bench, limit: int) -> int:
    lease = await lease_of(bench, 0, NEXT)
    lag = int(lease.get("arrived", 0)) - int(lease.get("done", 0))
    return lag if lag > limit else 0


async def _committed_or_lagging(bench: Bench) -> bool:
    return await _committed(bench, 0) or bool(await _lag_over(bench, 200))


async def test_the_counters_of_lag_are_the_bytes_of_frames(bench: Bench):
    a, b = bench.runs(0, 2)
    await bench.feed(0, {a: b"+100"}, {a: b"bad", b: b"+2"}, {b: b"end"})
    await bench.finish()
    mine, following = await lease_of(bench, 0), await lease_of(bench, 0, NEXT)
    assert (mine["arrived"], mine["done"], mine["entries"]) == ("12", "12", "3")
    written = await bench.server.client.xrange(bench.keys.topic(0, "events"))
    assert int(following["arrived"]) == sum(len(frame) for _, fields in written for frame in fields.values())


async def test_counters_that_disagree_mend_once_all_is_consumed(bench: Bench):
    [run] = bench.runs(0, 1)
    await bench.feed(0, {run: b"+1"})
    await bench.server.client.hincrby(bench.keys.lease(0, GROUP), "arrived", 1000)
    async with working(bench.stage("a", lease_s=0.1)):
        await eventually(bench.through)
        await eventually(lambda: _no_lag(bench))


async def _no_lag(bench: Bench) -> bool:
    lease = await lease_of(bench, 0)
    return lease["arrived"] == lease["done"]


async def test_the_mirror_group_shows_the_exact_lag(bench: Bench):
    [run] = bench.runs(0, 1)
    await bench.feed(0, *({run: b"+1"} for _ in range(5)))
    await bench.finish("a")
    assert await _mirror(bench) == (bench.last[0].encode(), 0, 0)
    await bench.feed(0, *({run: b"+1"} for _ in range(4)))
    assert (await _mirror(bench))[1] == 4
    await bench.finish("b")
    assert await _mirror(bench) == (bench.last[0].encode(), 0, 0)


async def _mirror(bench: Bench) -> tuple[bytes, int, int]:
    [group] = await bench.server.client.xinfo_groups(bench.keys.topic(0, "raw"))
    return group["last-delivered-id"], group["lag"], group["pending"]


# --- disturbed ----------------------------------------------------------------------------------------------------


async def test_workers_may_come_and_go_while_input_flows(bench: Bench):
    runs = {number: bench.runs(number, 5) for number in (0, 1)}
    for round_ in range(5):
        async with working(bench.stage(f"a{round_}", max_records=2)):
            for number in (0, 1):
                await bench.feed(number, *({run: b"+1"} for run in runs[number]))
            async with working(bench.stage(f"b{round_}", max_records=2)):
                for number in (0, 1):
                    await bench.feed(number, {runs[number].pop(): b"end"})
    await bench.finish()
    await bench.check()


async def test_the_script_cache_may_be_flushed_while_it_works(bench: Bench):
    [run] = bench.runs(0, 1)

    async def flush() -> None:
        while True:
            await bench.server.client.script_flush()

    flushing = asyncio.create_task(flush())
    async with working(bench.stage("a")):
        for _ in range(20):
            await bench.feed(0, {run: b"+1"})
        await eventually(bench.through)
    flushing.cancel()
    await asyncio.gather(flushing, return_exceptions=True)
    await bench.check()


async def test_a_stage_works_on_after_the_server_lost_all_data(bench: Bench):
    [run] = bench.runs(0, 1)
    await bench.feed(0, {run: b"+1"})
    async with working(bench.stage("a", logics=(logics := {}))) as worker:
        await eventually(bench.through)
        old = dict(logics)
        names = [name async for name in bench.server.client.scan_iter(match=f"{bench.keys.prefix}*", count=1000)]
        await bench.server.client.delete(*names)
        await eventually(lambda: set(logics) == {0, 1} and all(logics[n] is not old[n] for n in (0, 1)))
        await eventually(lambda: worker.owned == [0, 1])
        bench.entries = {0: [], 1: []}
        await bench.feed(0, {run: b"+5"})
        await eventually(bench.through)
    await bench.check()


async def test_a_batch_whose_partition_was_lost_and_acquired_again_is_not_processed_twice(bench: Bench):
    [run] = bench.runs(0, 1)
    await bench.feed(0, {run: b"+1"}, {run: b"+2"})
    worker = bench.stage("a")
    await worker.open()
    batches = await eventually(worker.read)
    await worker.process(batches)
    await worker.process(batches)
    await worker.close()
    await worker.process(batches)
    await bench.check()


async def test_a_stage_that_is_closed_reads_nothing(bench: Bench):
    worker = bench.stage("a")
    await worker.open()
    assert worker.healthy
    await worker.close()
    assert worker.owned == []
    [run] = bench.runs(0, 1)
    await bench.feed(0, {run: b"+1"})
    assert await worker.read(block_ms=1) == []
    await bench.finish()


async def test_a_cancelled_commit_drops_the_partition_which_is_then_loaded_again(bench: Bench, server: Server):
    [run] = bench.runs(0, 1)
    await bench.feed(0, {run: b"+1"}, {run: b"+2"})
    async with Server(server.url) as other:
        gate = Gate(other)
        worker = bench.stage("a", other, lease_s=5.0)
        await worker.open()
        batches = await eventually(worker.read)
        gate.shut()
        processing = asyncio.create_task(worker.process(batches))
        await asyncio.sleep(0)
        processing.cancel()
        await asyncio.gather(processing, return_exceptions=True)
        assert 0 not in worker.owned
        gate.open()
        async with working(worker, opened=True):
            await eventually(bench.through)
    await bench.check()


async def test_closing_does_not_hang_on_a_commit_that_gets_no_reply(
    bench: Bench, server: Server, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.CRITICAL)
    [run] = bench.runs(0, 1)
    await bench.feed(0, {run: b"+1"})
    async with Server(server.url) as other:
        gate = Gate(other)
        worker = bench.stage("a", other)
        await worker.open()
        batches = await eventually(worker.read)
        gate.shut()
        processing = asyncio.create_task(worker.process(batches))
        await worker.close()  # the gate stays shut until it has
        assert worker.owned == []
        gate.open()
        await processing
    await bench.dead_letter()
    await bench.finish()
    await bench.check()


async def test_a_frozen_owner_writes_nothing_after_the_takeover_and_forgets_its_state(
    bench: Bench, server: Server, keys: Keys
):
    [run] = bench.runs(0, 1)
    await bench.feed(0, {run: b"+1"})
    async with Server(server.url) as other:
        gate = Gate(other)
        logics: dict[int, ToyLogic] = {}
        frozen = bench.stage("frozen", other, logics=logics)
        await frozen.open()
        batches = await eventually(frozen.read)
        stale = logics[0]
        gate.shut()
        processing = asyncio.create_task(frozen.process(batches))
        async with working(bench.stage("b")):
            await eventually(bench.through)
            await bench.feed(0, {run: b"+10"}, {run: b"+20"})
            await eventually(bench.through)
            gate.open()
            await processing
            assert 0 not in frozen.owned
        async with working(frozen, opened=True):
            await eventually(lambda: frozen.owned == [0, 1])
            assert stale.runs[run].total == 1
            assert logics[0].runs[run].total == 31
    await bench.check()
