"""The clock of a process: it stands while the process does."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.waiting import eventually
from tokenbus.bus import process_clock
from tokenbus.bus.process_clock import STOOD_S, TICK_S, ProcessClock


class Host:
    """The host's monotonic clock: real time, and what a stop adds to it."""

    def __init__(self) -> None:
        self.stopped_s = 0.0

    def now(self) -> float:
        return asyncio.get_running_loop().time() + self.stopped_s


@pytest.fixture
def host() -> Generator[Host]:
    host = Host()
    before = process_clock.install(ProcessClock(host.now))
    yield host
    process_clock.install(before)


async def test_the_clock_counts_no_time_in_which_the_process_stood(host: Host) -> None:
    with process_clock.ticking():
        before = process_clock.now()
        host.stopped_s += 3600
        assert process_clock.now() - before < 3600 - STOOD_S
        assert process_clock.stood_s() > 3600 - STOOD_S


async def test_a_loop_in_another_thread_does_not_hide_a_stand_from_this_one(host: Host) -> None:
    async def works() -> None:
        async with process_clock.timeout(60):
            pass
        await asyncio.sleep(2 * TICK_S)  # its timer has run once more, and ends

    with process_clock.ticking():
        await asyncio.to_thread(asyncio.run, works())
        before = process_clock.now()
        host.stopped_s += 3600
        assert process_clock.now() - before < 3600 - STOOD_S


async def test_the_clock_counts_all_time_while_nobody_could_notice_a_stand(host: Host) -> None:
    before = process_clock.now()
    host.stopped_s += 3600
    assert process_clock.now() - before >= 3600
    assert process_clock.stood_s() == 0


async def test_a_timeout_that_is_over_because_the_process_stood_is_not_over(host: Host) -> None:
    async with process_clock.timeout(60) as limit:
        host.stopped_s += 3600
        limit._look()  # pyright: ignore[reportPrivateUsage] - its timer, after the stop
        await asyncio.sleep(0)
        assert not limit.expired()


async def test_a_timeout_ends_its_block_and_can_be_moved(host: Host) -> None:
    moved = process_clock.timeout(3600)

    async def wait() -> None:
        async with moved:
            moved.reschedule(process_clock.now() - 1)
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await wait()
    assert moved.expired()
    async with process_clock.timeout(0.001) as never:
        never.reschedule(None)
        await asyncio.sleep(0.01)
    assert not never.expired()


async def test_the_timer_ends_when_nobody_holds_the_clock(host: Host) -> None:
    clock = ProcessClock(host.now)
    with clock.ticking():
        pass

    def ended() -> bool:
        before = clock.stood_s
        host.stopped_s += 100  # noticed as long as its timer runs
        return clock.stood_s == before

    await eventually(ended)


SOURCES = [Path(__file__).parents[3] / source for source in ("shared", "services")]
STAGES = ("intake", "fetcher", "normalizer", "parser", "policy_stage", "tools", "recorder")
BELOW_THEM = ("blobs", "media", "executor", "net")
ROOMS_OF_WORK = ("tokenbus/policy", *(f"tokenbus_services/{room}" for room in (*STAGES, *BELOW_THEM)))
"""Rooms whose timeouts say that something else was too slow."""
BY_THE_WALL = {
    "tokenbus/policy/builtin/model_judge.py": "the end of a cancel nobody waits for",
    "tokenbus_services/blobs/http.py": "a client that sends nothing, which holds a place",
    "tokenbus_services/executor/processes.py": "an own process that begins or ends; its end blames nobody",
    "tokenbus_services/fetcher/attempt_runner.py": "the run's deadline, which is a time of day",
    "tokenbus_services/fetcher/turn_admission.py": "the run's deadline, which is a time of day",
}


def test_a_timeout_that_blames_others_does_not_count_the_time_in_which_its_process_stood():
    found = {
        str(path.relative_to(source))
        for source in SOURCES
        for room in ROOMS_OF_WORK
        for path in (source / room).rglob("*.py")
        if re.search(r"asyncio\.(timeout|timeout_at|wait_for)\((?!None\))", path.read_text())
    }
    assert found == BY_THE_WALL.keys()
