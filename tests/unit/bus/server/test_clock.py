"""The server's time as a worker estimates it, independent of its own clock."""

from __future__ import annotations

import asyncio
import time

import pytest
from redis.exceptions import ConnectionError as ConnectionLost

from tests.waiting import eventually
from tokenbus.bus.server import clock as server_clock
from tokenbus.bus.server.clock import ServerClock

HOUR_S = 3600


class TimeCalls:
    """A server whose clock is an hour ahead of the host's."""

    def __init__(self) -> None:
        self.times = 0
        self.away = False
        self.ahead_s = float(HOUR_S)

    async def __call__(self) -> int:
        self.times += 1
        if self.away:
            raise ConnectionLost("away")
        return int((time.time() + self.ahead_s) * 1_000_000)


def ahead_s(clock: ServerClock) -> float:
    return clock.now_ms() / 1000 - time.time()


async def test_it_returns_the_servers_time_and_not_the_hosts() -> None:
    clock = ServerClock(TimeCalls())
    await clock.measure()
    assert ahead_s(clock) == pytest.approx(HOUR_S, abs=5)


async def test_a_hosts_clock_that_is_changed_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ServerClock(TimeCalls())
    await clock.measure()
    before = clock.now_ms()
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert before <= clock.now_ms() < before + 60_000


async def test_it_refreshes_in_the_background_and_survives_an_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_clock, "LOOK_S", 0.0)
    calls = TimeCalls()
    clock = ServerClock(calls)
    await clock.measure()
    calls.away, calls.ahead_s = True, HOUR_S + 0.9
    assert ahead_s(clock) == pytest.approx(HOUR_S, abs=5)
    await eventually(lambda: clock.now_ms() and calls.times > 3)
    assert ahead_s(clock) == pytest.approx(HOUR_S, abs=5)
    calls.away = False
    await eventually(lambda: ahead_s(clock) > HOUR_S + 0.8)
    await clock.close()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "the server's time"]


async def test_a_slow_reply_does_not_change_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = TimeCalls()
    clock = ServerClock(calls)
    await clock.measure()
    monkeypatch.setattr(server_clock, "LONGEST_LOOK_S", 0.0)
    calls.ahead_s = 2.0 * HOUR_S
    await clock.measure()
    assert ahead_s(clock) == pytest.approx(HOUR_S, abs=5)


class Steady:
    """In place of the host's steady clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(server_clock, "LOOK_S", float("inf"))  # the test looks by itself


@pytest.mark.parametrize("jump_s", [600.0, -600.0])
async def test_a_jump_of_the_servers_clock_moves_durations_by_a_tenth_at_the_most(
    monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    steady, wall = Steady(monkeypatch), [5_000_000.0]

    async def ask() -> int:
        return round(wall[0] * 1_000_000)

    clock = ServerClock(ask)
    await clock.measure()
    began = clock.now_ms()
    wall[0] += jump_s
    await clock.measure()
    assert clock.now_ms() == began
    for _ in range(50):
        before = clock.now_ms()
        steady.now, wall[0] = steady.now + 1, wall[0] + 1
        await clock.measure()
        assert 899 <= clock.now_ms() - before <= 1101
    assert clock.ms_of(round(wall[0] * 1000)) == pytest.approx(clock.now_ms(), abs=2)
    steady.now += 3 * 3600
    assert clock.now_ms() / 1000 == pytest.approx(wall[0] + 3 * 3600, abs=1)


async def test_a_jump_that_is_taken_back_costs_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    steady, wall = Steady(monkeypatch), [5_000_000.0]

    async def ask() -> int:
        return round(wall[0] * 1_000_000)

    clock = ServerClock(ask)
    await clock.measure()
    began = clock.now_ms()
    wall[0] += 1000
    await clock.measure()
    steady.now, wall[0] = steady.now + 5, wall[0] + 5 - 1000
    await clock.measure()
    steady.now += 5
    assert clock.now_ms() - began == pytest.approx(10_000, abs=600)
