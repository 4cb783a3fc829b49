"""What the parser's clock may write: a deadline ends an open run once, and fences its attempt like a cancel."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.bus.scripts.runs.test_accept_scripts import Scene
from tests.contract.bus.state import everything
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.runs.timeouts import append_timeout, expire
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.events.frames import ANY_FRAME, Lost, RawFrame, raw_decoder


class ClockScene(Scene):
    async def expire(self) -> bytes:
        return await run_script(
            self.server,
            expire(
                self.keys.run(self.run),
                self.topic("events"),
                self.topic("raw"),
                self.topic("control"),
                parser_lease=self.keys.lease(0, "parser"),
                normalizer_lease=self.keys.lease(0, "normalizer"),
                run=self.run,
                frame=b"overdue",
                control_frame=b"told",
            ),
        )

    async def run_once(self) -> int:
        call = append_timeout(
            self.keys.run(self.run),
            self.topic("events"),
            self.keys.lease(0, "parser"),
            run=self.run,
            frame=b"silent",
        )
        return await run_script(self.server, call)


@pytest.fixture
async def scene(server: Server, keys: Keys) -> ClockScene:
    scene = ClockScene(server, keys)
    await scene.accept()
    return scene


async def test_a_deadline_closes_the_attempt_and_notifies_all_workers(scene: ClockScene):
    assert await scene.expire() == b"expiring"
    name = scene.run.encode()
    assert await scene.entries("events") == [{name: b"accepted"}, {name: b"overdue"}]
    assert await scene.entries("control") == [{name: b"told"}]
    [raw] = await scene.entries("raw")
    lost = RawFrame(0, 1, ANY_FRAME, 0, [Lost("the deadline of the run has passed")])
    assert raw_decoder.decode(raw[name]) == lost
    assert await scene.arrived("parser") == len(b"accepted") + len(b"overdue")
    assert await scene.arrived("normalizer") == len(raw[name])
    assert await scene.refused(scene.part(0)) == ["expiring"]


async def test_a_second_clock_and_a_cancel_after_it_change_nothing(scene: ClockScene):
    await scene.expire()
    before = await everything(scene.server, scene.keys)
    assert await scene.expire() == b"expiring"
    assert await scene.cancel() == b"expiring"
    assert await scene.run_once() == 0
    assert await everything(scene.server, scene.keys) == before


@pytest.mark.parametrize("status", ["cancelling", "completed", "failed"])
async def test_a_run_that_is_not_open_is_not_reported(scene: ClockScene, status: str):
    await scene.set(status=status)
    before = await everything(scene.server, scene.keys)
    assert await scene.expire() == status.encode()
    assert await scene.run_once() == 0
    assert await everything(scene.server, scene.keys) == before


async def test_an_attempt_that_ended_is_not_closed_again(scene: ClockScene):
    await scene.append(scene.part(0, final=True))
    raw = await scene.entries("raw")
    assert await scene.expire() == b"expiring"
    assert await scene.entries("raw") == raw


async def test_a_run_with_missing_keys_is_still_reported(scene: ClockScene):
    await scene.client.delete(scene.keys.run(scene.run))
    assert await scene.expire() == b"gone"
    assert await scene.run_once() == 1
    frames: list[Any] = [frame for entry in await scene.entries("events") for frame in entry.values()]
    assert frames == [b"accepted", b"overdue", b"silent"]
    assert not await scene.client.exists(scene.keys.run(scene.run)), "no key without an end"


async def test_silence_fences_nothing(scene: ClockScene):
    assert await scene.run_once() == 1
    assert (await scene.append(scene.part(0)))[0] == "ok"
