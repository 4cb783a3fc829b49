"""The server's time as a worker tells it, whatever its own clock says."""

from __future__ import annotations

import asyncio
import time

import pytest
from redis.exceptions import ConnectionError as ConnectionLost

from tests.waiting import eventually
from tokenbus.bus.server import clock as server_clock
from tokenbus.bus.server.clock import ServerClock

HOUR_S = 3600


class Asked:
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


async def test_it_tells_the_servers_time_and_not_the_hosts() -> None:
    clock = ServerClock(Asked())
    await clock.look()
    assert ahead_s(clock) == pytest.approx(HOUR_S, abs=5)


async def test_a_hosts_clock_that_is_set_anew_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ServerClock(Asked())
    await clock.look()
    before = clock.now_ms()
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert before <= clock.now_ms() < before + 60_000


async def test_it_looks_again_behind_the_scenes_and_runs_on_while_the_server_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_clock, "LOOK_S", 0.0)
    asked = Asked()
    clock = ServerClock(asked)
    await clock.look()
    asked.away, asked.ahead_s = True, 2.0 * HOUR_S
    assert ahead_s(clock) == pytest.approx(HOUR_S, abs=5)
    await eventually(lambda: clock.now_ms() and asked.times > 3)
    assert ahead_s(clock) == pytest.approx(HOUR_S, abs=5)
    asked.away = False
    await eventually(lambda: ahead_s(clock) > 1.5 * HOUR_S)
    await clock.close()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "the server's time"]


async def test_a_reply_that_took_long_does_not_move_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    clock = ServerClock(asked)
    await clock.look()
    monkeypatch.setattr(server_clock, "LONGEST_LOOK_S", 0.0)
    asked.ahead_s = 2.0 * HOUR_S
    await clock.look()
    assert ahead_s(clock) == pytest.approx(HOUR_S, abs=5)
