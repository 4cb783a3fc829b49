"""The parser's clock on a real server: what it finds becomes an event of the run, in partitions that it owns."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.commits import commit_call
from tests.waiting import eventually
from tokenbus.bus import process_clock
from tokenbus.bus.keys import Keys
from tokenbus.bus.process_clock import ProcessClock
from tokenbus.bus.run_record import RunLifetimes
from tokenbus.bus.scripts import Commit
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage.stage import Stage
from tokenbus.events.child_runs import child_id
from tokenbus.events.frames import (
    CONTROL_ATTEMPT,
    Accepted,
    CancelRequested,
    DeadlinePassed,
    EventFrame,
    Lost,
    RunLimits,
    encode,
    event_decoder,
    raw_decoder,
)
from tokenbus_services.parser import timeouts
from tokenbus_services.parser.logic import ParserLogic
from tokenbus_services.parser.timeouts import TimeoutClock
from tokenbus_services.settings import LimitSettings, Settings, StageSettings


async def open_run(server: Server, keys: Keys, partition: int, *, deadline_ms: int) -> tuple[str, ParserLogic]:
    """A run that is open in the parser's state and in its hash."""
    run = next(name for name in (f"run-{i}" for i in range(1000)) if keys.partition_of(name) == partition)
    logic = ParserLogic(partition, keys, topics=[], lifetimes=RunLifetimes(60_000, 60_000))
    accepted = Accepted(
        provider="anthropic",
        model="m",
        on_failure="fail",
        max_tool_depth=0,
        rules=RunLimits(),
        tools=[],
        deadline_ms=deadline_ms,
    )
    logic.apply(run, encode(EventFrame(0, CONTROL_ATTEMPT, server.clock.now_ms(), [accepted])))
    logic.discard_outputs()
    await server.client.hset(keys.run(run), mapping={"status": "open", "turn": 0, "attempt": 1})
    await server.client.pexpire(keys.run(run), 60_000)
    return run, logic


def clock_of(
    server: Server,
    keys: Keys,
    logics: dict[int, ParserLogic],
    *,
    owned: Sequence[int] | None = None,
    silent_run_s: float = LimitSettings().silent_run_s,
) -> TimeoutClock:
    stage = cast("Stage", SimpleNamespace(owned=list(logics if owned is None else owned)))
    limits = LimitSettings(silent_run_s=silent_run_s)
    stages = StageSettings(tick_s=0.02)
    return TimeoutClock(
        server, stage, Settings(prefix=keys.prefix, partitions=keys.partitions, stages=stages, limits=limits), logics
    )


async def found(server: Server, keys: Keys, partition: int) -> list[str]:
    entries = await server.client.xrange(keys.topic(partition, "events"))
    frames = [event_decoder.decode(data) for _, fields in entries for data in fields.values()]
    return [event.what for frame in frames for event in frame.events if isinstance(event, DeadlinePassed)]


async def test_a_run_past_its_deadline_expires_where_the_partition_is_owned(server: Server, keys: Keys) -> None:
    mine, logic = await open_run(server, keys, 0, deadline_ms=1)
    other, others_logic = await open_run(server, keys, 1, deadline_ms=1)
    clock = clock_of(server, keys, {0: logic, 1: others_logic}, owned=[0])
    await clock.open()

    async def expired() -> bool:
        return await server.client.hget(keys.run(mine), "status") == b"expiring"

    await eventually(expired)
    await clock.close()
    assert await found(server, keys, 0) == ["deadline"]
    assert await found(server, keys, 1) == []
    assert await server.client.hget(keys.run(other), "status") == b"open"


async def test_a_child_run_whose_parent_is_not_open_is_cancelled(server: Server, keys: Keys) -> None:
    parent, logic = await open_run(server, keys, 0, deadline_ms=0)
    kept, orphan = child_id(parent, 2), child_id("gone", 2)
    for run in (kept, orphan):
        accepted = Accepted(provider="p", model="m", on_failure="fail", max_tool_depth=0, rules=RunLimits(), tools=[])
        logic.apply(run, encode(EventFrame(0, CONTROL_ATTEMPT, server.clock.now_ms(), [accepted])))
        await server.client.hset(keys.within(0).run(run), mapping={"status": "open", "turn": 0, "attempt": 1})
        await server.client.pexpire(keys.within(0).run(run), 60_000)
    logic.discard_outputs()
    clock = clock_of(server, keys, {0: logic})
    await clock.open()

    async def cancelled() -> bool:
        return await server.client.hget(keys.within(0).run(orphan), "status") == b"cancelling"

    await eventually(cancelled)
    await clock.close()
    for run in (parent, kept):
        assert await server.client.hget(keys.within(0).run(run), "status") == b"open"
    [(_, fields)] = await server.client.xrange(keys.topic(0, "events"))
    ((cancel,),) = [event_decoder.decode(data).events for data in fields.values()]
    assert cancel == CancelRequested("the run whose tool call began this run has ended")


async def apply_and_commit(server: Server, keys: Keys, partition: int, logic: ParserLogic, run: str) -> None:
    """What the parser does with the first entry that the clock wrote: the run is not open after it."""
    [(entry_id, fields), *_] = await server.client.xrange(keys.topic(partition, "events"))
    logic.apply(run, fields[run.encode()])
    assert logic.states() == []
    commit = Commit(keys.lease(partition, "parser"), keys.topic(partition, "events"))
    logic.flush(commit)
    await server.client.hset(keys.lease(partition, "parser"), mapping={"token": "1", "offset": "0-0"})
    call = commit_call(commit, end=entry_id.decode())
    assert (await run_script(server, call))[0] == b"ok"


async def test_a_run_that_its_hash_says_has_ended_is_forgotten_and_nothing_more_is_written(
    server: Server, keys: Keys
) -> None:
    run, logic = await open_run(server, keys, 3, deadline_ms=0)
    await server.client.delete(keys.run(run))
    ended = {"status": "completed", "result": "its end", "seq": "7"}
    await server.client.hset(keys.run(run), mapping=ended)
    await server.client.xadd(keys.log(run), {"__data__": "its end"}, id="1-6")
    clock = clock_of(server, keys, {3: logic}, silent_run_s=0.5)
    await clock.open()
    await eventually(lambda: server.client.xlen(keys.topic(3, "events")))
    await clock.close()
    await apply_and_commit(server, keys, 3, logic, run)
    found = await server.client.hgetall(keys.run(run))
    assert {name.decode(): value.decode() for name, value in found.items()} == ended
    assert await server.client.xlen(keys.log(run)) == 1
    for key in (keys.run(run), keys.log(run)):
        assert 0 < await server.client.pttl(key) <= 60_000


@pytest.mark.parametrize("status", [None, "cancelling"])
async def test_a_run_whose_keys_are_gone_or_refuse_all_writes_ends_and_leaves_none_for_ever(
    server: Server, keys: Keys, status: str | None
) -> None:
    run, logic = await open_run(server, keys, 3, deadline_ms=0)
    await server.client.delete(keys.run(run))
    if status:
        await server.client.hset(keys.run(run), "status", status)
    clock = clock_of(server, keys, {3: logic}, silent_run_s=0.5)
    await clock.open()

    async def entries() -> list[Any]:
        return await server.client.xrange(keys.topic(3, "events"))

    await eventually(entries)
    await clock.close()
    await apply_and_commit(server, keys, 3, logic, run)
    assert await server.client.hget(keys.run(run), "status") == b"incomplete"
    for key in (keys.run(run), keys.log(run)):
        assert 0 < await server.client.pttl(key) <= 60_000


async def is_lost(server: Server, keys: Keys, run: str) -> bool:
    """Whether the run's attempt was closed, which its normalizer reads."""
    entries = await server.client.xrange(keys.topic(keys.partition_of(run), "raw"))
    frames = [raw_decoder.decode(data) for _, fields in entries for data in fields.values()]
    lost = [item for frame in frames for item in frame.items if isinstance(item, Lost)]
    return bool(lost) and await server.client.hget(keys.run(run), "closed") == b"1"


async def test_an_attempt_that_is_in_no_queue_is_lost(server: Server, keys: Keys) -> None:
    run, logic = await open_run(server, keys, 2, deadline_ms=0)
    logic.states()[0].accepted_ms -= 3_600_000
    clock = clock_of(server, keys, {2: logic}, silent_run_s=1)
    await clock.open()
    await eventually(lambda: is_lost(server, keys, run))
    await clock.close()
    assert await server.client.xlen(keys.topic(2, "raw")) == 1, "it is closed once"
    await server.client.delete(keys.topic(2, "raw"))


async def test_an_attempt_whose_last_frame_was_written_and_is_gone_ends_its_run(server: Server, keys: Keys) -> None:
    run, logic = await open_run(server, keys, 2, deadline_ms=0)
    logic.states()[0].accepted_ms -= 3_600_000
    await server.client.hset(keys.run(run), "closed", 1)
    clock = clock_of(server, keys, {2: logic}, silent_run_s=0.2)
    await clock.open()

    async def reported() -> bool:
        return "silent" in await found(server, keys, 2)

    await eventually(reported)
    await clock.close()


class Stood(ProcessClock):
    """A clock of a process that stood for as long as the test says."""

    hours = 0

    @property
    def stood_s(self) -> float:
        return 3600.0 * self.hours


@pytest.mark.parametrize("hours", [0, 1])
async def test_a_process_that_stood_reports_no_run_as_silent_for_that(
    server: Server, keys: Keys, hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "LOOKS_PER_SILENCE", 90_000)
    run, silent = await open_run(server, keys, 2, deadline_ms=0)
    silent.states()[0].accepted_ms -= 3_600_000
    silent.states()[0].seen_ms -= 3_600_000
    _, expired = await open_run(server, keys, 3, deadline_ms=1)  # is found at the same look, in the next partition
    stood = Stood()
    before = process_clock.install(stood)
    try:
        clock = clock_of(server, keys, {2: silent, 3: expired}, silent_run_s=1800)
        stood.hours = hours
        await clock.open()

        async def looked() -> bool:
            looks: int = clock._looks  # pyright: ignore[reportPrivateUsage]
            return looks > 5 and "deadline" in await found(server, keys, 3)

        await eventually(looked)
        await clock.close()
    finally:
        process_clock.install(before)
    assert await is_lost(server, keys, run) is not bool(hours)
    await server.client.delete(keys.topic(2, "raw"))
