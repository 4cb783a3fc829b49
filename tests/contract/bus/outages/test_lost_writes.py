"""A fail-over that loses the last writes: the owner that remembers them ends runs whose lost events were published.

The server's state is put back to a past one, all keys in one step, as a replica that lagged behind would serve it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, ClassVar

import msgspec
import pytest

from tests.contract.bus.state import everything, put_back
from tests.contract.bus.toys import GROUP, Bench, EndingLogic, Outputs, ToyLogic, working
from tests.waiting import eventually
from tokenbus.bus import scripts
from tokenbus.bus.leases import Lease
from tokenbus.bus.scripts import Commit
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage import commits, replay
from tokenbus.bus.stage.commits import LOST_WRITES, Commits, StageOptions
from tokenbus.bus.stage.partition import Partition


async def says(bench: Bench, run: str) -> list[tuple[str, object]]:
    """The entry ids and sayings of a run's log."""
    entries = await bench.server.client.xrange(bench.keys.log(run))
    return [(entry_id.decode(), msgspec.json.decode(fields[b"__data__"])["says"]) for entry_id, fields in entries]


async def ended_by_loss(bench: Bench, run: str) -> bool:
    return [what for _, what in await says(bench, run)][-1:] == [LOST_WRITES.code]


async def test_runs_of_which_subscribers_have_seen_more_end_and_the_rest_continues(bench: Bench):
    affected, ended, silent, new = bench.runs(0, 4)
    await bench.feed(0, {affected: b"+1", ended: b"+1", silent: b"+1"})
    async with working(bench.stage("a")) as worker:
        await eventually(bench.through)
        past = await everything(bench.server, bench.keys)
        await bench.feed(0, {affected: b"+1"}, {ended: b"+1"}, {affected: b"+2"}, {ended: b"end"}, {new: b"+7"})
        await eventually(bench.through)
        before = {run: await says(bench, run) for run in (affected, ended, new)}
        await put_back(bench.server, bench.keys, past)
        # The stage before lost its outputs too, and writes them again: they must not be published twice.
        await bench.feed(0, {affected: b"+1"}, {ended: b"+1"}, {new: b"+7"}, {silent: b"+4"})
        await eventually(bench.through)
        await bench.feed(0, {affected: b"+5"}, {silent: b"end"})
        await eventually(bench.through)
        await eventually(lambda: worker.owned == [0, 1])
    assert await says(bench, affected) == [*before[affected], ("1-3", LOST_WRITES.code)]
    assert await says(bench, ended) == before[ended]
    assert await says(bench, new) == [*before[new], ("1-1", LOST_WRITES.code)]
    assert await says(bench, silent) == [("1-0", 1), ("1-1", 5), ("1-2", "end")]
    found = await Outputs.of(bench.server, bench.keys, 0)
    for run in (affected, ended, new, silent):
        published = [msgspec.json.decode(data) for data in found.topic]
        assert [event["says"] for event in published if event["run"] == run] == [
            what for _, what in await says(bench, run)
        ]


async def test_the_loss_is_noticed_even_if_nothing_new_comes(bench: Bench, caplog: pytest.LogCaptureFixture):
    [run] = bench.runs(0, 1)
    await bench.feed(0, {run: b"+1"})
    async with working(bench.stage("a")):
        await eventually(bench.through)
        past = await everything(bench.server, bench.keys)
        await bench.feed(0, {run: b"+1"})
        await eventually(bench.through)
        with caplog.at_level(logging.ERROR):
            await put_back(bench.server, bench.keys, past)
            await eventually(lambda: ended_by_loss(bench, run))
    assert await says(bench, run) == [("1-0", 1), ("1-1", 2), ("1-2", LOST_WRITES.code)]
    assert "a fail-over lost the entries after" in caplog.text


async def test_a_run_that_comes_again_during_the_repair_is_not_opened_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    [run] = bench.runs(0, 1)
    repair = Commits.recover_rollback

    async def late(self: Commits, part: Partition, lease: Lease, commit: Commit) -> str | None:
        """The stage before writes the run's beginning again, just before the repair is committed."""
        await bench.feed(0, {run: b"+1"})
        return await repair(self, part, lease, commit)

    monkeypatch.setattr(Commits, "recover_rollback", late)
    async with working(bench.stage("a")):
        await eventually(bench.through)
        past = await everything(bench.server, bench.keys)
        await bench.feed(0, {run: b"+1"})
        await eventually(bench.through)
        await put_back(bench.server, bench.keys, past)
        await eventually(lambda: ended_by_loss(bench, run))
        await eventually(bench.through)
        assert await bench.server.client.hget(bench.keys.lease(0, GROUP), "open") in (None, b"0")
    assert await says(bench, run) == [("1-0", 1), ("1-1", LOST_WRITES.code)]


async def test_a_repair_of_which_every_reply_is_lost_is_written_once(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    keys, client = bench.keys, bench.server.client
    stream, events, topic = keys.topic(0, "raw"), keys.topic(0, "events"), keys.topic(0, "visible")
    at = (await client.xadd(stream, {"a": b"1"})).decode()
    acquired = await run_script(
        bench.server, scripts.acquire(keys.lease(0, GROUP), stream, owner="a", ttl_ms=60_000, start="$")
    )
    lease = Lease(0, acquired[0].decode(), at, "0-0")
    commit = Commit(keys.lease(0, GROUP), stream)
    commit.append(events, ["a", b"lost"])
    commit.publish_to_topic(topic, b"{}")

    async def twice(server: Server, call: scripts.ScriptCall) -> Any:
        await run_script(server, call)
        return await run_script(server, call)

    monkeypatch.setattr(commits, "run_script", twice)
    writes = Commits(bench.server, keys, StageOptions(group=GROUP, topic="raw", worker="a", lease_s=60))
    part = Partition(lease, ToyLogic(0, keys), keys=keys, topic="raw", group=GROUP)
    await writes.recover_rollback(part, lease, commit)
    assert (await client.xlen(events), await client.xlen(topic)) == (1, 1)
    assert not await client.exists(keys.owed(0, GROUP))


async def test_a_later_owner_does_not_open_the_run_again(bench: Bench):
    run, other = bench.runs(0, 2)
    await bench.feed(0, {run: b"+1", other: b"+1"})
    async with working(bench.stage("a")):
        await eventually(bench.through)
        past = await everything(bench.server, bench.keys)
        await bench.feed(0, {run: b"+1"})
        await eventually(bench.through)
        await put_back(bench.server, bench.keys, past)
        await eventually(lambda: ended_by_loss(bench, run))
    # ``other`` keeps the watermark before the entries of ``run``, which every replay meets.
    bench.last[0] = await bench.offset(0)
    await bench.feed(0, {other: b"+1"})
    await bench.finish("b")
    await bench.feed(0, {other: b"end"})
    await bench.finish("c")
    assert await says(bench, run) == [("1-0", 1), ("1-1", 2), ("1-2", LOST_WRITES.code)]
    assert await says(bench, other) == [("1-0", 1), ("1-1", 2), ("1-2", "end")]
    assert await bench.server.client.hgetall(bench.keys.state(0, GROUP)) == {}


async def test_input_that_was_read_and_then_lost_leaves_no_trace(bench: Bench):
    [run] = bench.runs(0, 1)
    await bench.feed(0, {run: b"+1"})
    stage = bench.stage("a")
    await stage.open()
    try:
        batches = await eventually(stage.read)
        await bench.server.client.xdel(bench.keys.topic(0, "raw"), bench.last[0])
        await stage.process(batches)
        assert await says(bench, run) == []
        bench.entries[0].clear()
        bench.last[0] = "0-0"
    finally:
        await stage.close()
    await bench.feed(0, {run: b"+2"}, {run: b"end"})
    await bench.finish("b")
    await bench.check()


async def test_a_repair_that_a_further_fail_over_loses_is_made_again(bench: Bench):
    affected, later, other = bench.runs(0, 3)
    await bench.feed(0, {affected: b"+1", later: b"+1", other: b"+1"})
    async with working(bench.stage("a")):
        await eventually(bench.through)
        past = await everything(bench.server, bench.keys)
        await bench.feed(0, {affected: b"+1"})
        await eventually(bench.through)
        await put_back(bench.server, bench.keys, past)
        await eventually(lambda: ended_by_loss(bench, affected))
        await bench.feed(0, {later: b"+2"})
        await eventually(bench.through)
        await put_back(bench.server, bench.keys, past)  # the state before the repair, of which no offset tells
        await eventually(lambda: ended_by_loss(bench, affected))
        await eventually(lambda: ended_by_loss(bench, later))
        await bench.feed(0, {affected: b"+7", other: b"end"})
        await eventually(bench.through)
    assert await says(bench, affected) == [("1-0", 1), ("1-1", 2), ("1-2", LOST_WRITES.code)]
    assert await says(bench, later) == [("1-0", 1), ("1-1", 3), ("1-2", LOST_WRITES.code)]
    assert await says(bench, other) == [("1-0", 1), ("1-1", "end")]


@pytest.mark.parametrize("step", ["recover_rollback", "_write_owed"])
async def test_a_fail_over_in_the_middle_of_a_repair_begins_it_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str
):
    [run] = bench.runs(0, 1)
    real, lost = getattr(Commits, step), list[bool]()
    await bench.feed(0, {run: b"+1"})
    async with working(bench.stage("a")):
        await eventually(bench.through)
        older = await everything(bench.server, bench.keys)
        await bench.feed(0, {run: b"+1"})
        await eventually(bench.through)
        past = await everything(bench.server, bench.keys)
        await bench.feed(0, {run: b"+1"})
        await eventually(bench.through)

        async def during(*args: Any) -> Any:
            if not lost:
                lost.append(True)
                await put_back(bench.server, bench.keys, older)
            return await real(*args)

        monkeypatch.setattr(Commits, step, during)
        await put_back(bench.server, bench.keys, past)
        await eventually(lambda: ended_by_loss(bench, run))
    assert await says(bench, run) == [("1-0", 1), ("1-1", 2), ("1-2", 3), ("1-3", LOST_WRITES.code)]


async def test_an_end_of_an_unreadable_run_that_is_lost_is_written_again(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    [run] = bench.runs(0, 1)
    await bench.feed(0, {run: b"+1"})
    await bench.finish("a")
    await bench.server.client.hset(bench.keys.state(0, GROUP), run, b"from another version")
    await bench.server.client.hset(bench.keys.lease(0, GROUP), "watermark", await bench.offset(0))
    real, past = Commits.recover_rollback, dict[bytes, bytes]()

    async def noting(*args: Any) -> str | None:
        past.update(await everything(bench.server, bench.keys))
        return await real(*args)

    async def ended() -> bool:
        return [what for _, what in await says(bench, run)] == [1, "state_unreadable"]

    monkeypatch.setattr(Commits, "recover_rollback", noting)
    async with working(bench.stage("b", logic=EndingLogic)) as worker:
        await eventually(ended)
        await eventually(lambda: worker.owned == [0, 1])
        await put_back(bench.server, bench.keys, past)  # under the same lease, before the end
        await eventually(ended)


async def test_a_run_is_numbered_by_the_server_that_gave_the_lease(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    [run] = bench.runs(0, 1)
    await bench.feed(0, {run: b"+1"})
    await bench.finish("a")
    past, last = await everything(bench.server, bench.keys), bench.last[0]
    await bench.feed(0, {run: b"+1"}, {run: b"+1"})
    await bench.finish("a")
    replaced = await everything(bench.server, bench.keys)
    await put_back(bench.server, bench.keys, past)
    bench.last[0] = last
    real, asked, answered = replay.run_positions, asyncio.Event(), asyncio.Event()

    async def of_the_replaced_one(*args: Any) -> Any:
        """The first time the old master answers, which was only stopped."""
        if asked.is_set():
            return await real(*args)
        asked.set()
        present = await everything(bench.server, bench.keys)
        await put_back(bench.server, bench.keys, replaced)
        try:
            return await real(*args)
        finally:
            await put_back(bench.server, bench.keys, present)
            answered.set()

    monkeypatch.setattr(replay, "run_positions", of_the_replaced_one)
    async with working(bench.stage("b")):
        await eventually(answered.is_set)
        await bench.feed(0, {run: b"+5"}, {run: b"end"})
        await eventually(bench.through)
    assert await says(bench, run) == [("1-0", 1), ("1-1", 6), ("1-2", "end")]


async def test_nothing_is_poison_that_follows_what_was_lost(bench: Bench, caplog: pytest.LogCaptureFixture):
    [run] = bench.runs(0, 1)
    await bench.feed(0, {run: b"+1"})
    async with working(bench.stage("a")):
        await eventually(bench.through)
        past = await everything(bench.server, bench.keys)
        await bench.feed(0, {run: b"+1"})
        await eventually(bench.through)
        await put_back(bench.server, bench.keys, past)
        await bench.feed(0, {run: b"only after another entry, which the stage before will write again"})
        await eventually(lambda: ended_by_loss(bench, run))
        await eventually(bench.through)
    assert await bench.server.client.xlen(bench.keys.dead) == 0
    assert not [record.message for record in caplog.records if record.exc_info]


class Busy(ToyLogic):
    """Publishes nothing, and begins work on its own with each frame that it sees, as that of the policies does."""

    begun: ClassVar[list[bytes]] = []

    def apply(self, run: str, frame: bytes) -> None:
        super().apply(run, frame)
        self.begun.append(frame)

    def flush(self, commit: Commit) -> None:
        self.discard_outputs()


async def test_no_work_begins_on_entries_that_were_lost(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Busy, "begun", [])
    [run] = bench.runs(0, 1)
    await bench.feed(0, {run: b"+1"})
    async with working(bench.stage("a", logic=Busy)):
        await eventually(bench.through)
        past = await everything(bench.server, bench.keys)
        await bench.feed(0, {run: b"+2"})
        await eventually(bench.through)
        await put_back(bench.server, bench.keys, past)
        await bench.feed(0, {run: b"+3"})
        await eventually(bench.through)
    assert Busy.begun.count(b"+2") == 1, "it was applied when it came, and no more"
    assert Busy.begun[-1] == b"+3"
