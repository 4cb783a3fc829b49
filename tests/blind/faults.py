"""The faults, and a control. Each fault takes effect at once, and the function returns."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import DEVNULL
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.e2e.conftest import Send
from tests.e2e.fleet import Fleet
from tokenbus.bus.keys import Keys
from tokenbus_services.mock_provider import CutOff, Reply, Script, Stall, Status, Turn

HOT_RUNS = 24


class World:
    def __init__(self, services: Fleet, keys: Keys, send: Send, disk: Path, marks: Path) -> None:
        self.services = services
        self.keys = keys
        self.send = send
        self.disk = disk
        self.marks = marks
        self.answer: Script | None = None
        """The provider's answer from now on, to any request."""


def answering(fault: Status | Stall | CutOff) -> Script:
    """An answer of some length, with this fault in it."""
    return Script(turns=(Turn(says=Reply(text="A word and another. " * 10), fault=fault),))


async def nothing(world: World) -> None:
    """No fault: the control."""


async def key_revoked(world: World) -> None:
    """The provider refuses the key."""
    world.answer = answering(Status(status=401))


async def provider_silent(world: World) -> None:
    """The provider answers each request with 200 and then sends nothing."""
    world.answer = answering(Stall())


async def answers_cut(world: World) -> None:
    """The provider ends each answer in the middle."""
    world.answer = answering(CutOff(after_bytes=400))


async def stage_stopped(world: World) -> None:
    """All normalizers exit."""
    for worker in world.services.workers:
        if worker.kind == "normalizer":
            worker.kill()


async def stage_frozen(world: World) -> None:
    """All parsers freeze without an exit."""
    for worker in world.services.workers:
        if worker.kind == "parser":
            worker.freeze()


async def hot_partition(world: World) -> None:
    """Many large answers in one partition."""
    names = (f"hot-{n}" for n in range(1_000_000))
    hot = [
        name for name, _ in zip((n for n in names if world.keys.partition_of(n) == 0), range(HOT_RUNS), strict=False)
    ]
    for name in hot:
        await world.send("large", name, id=name)


async def disk_full(world: World) -> None:
    """The disk of the server's append-only file has no free byte."""
    filling = await asyncio.create_subprocess_exec(
        "dd", "if=/dev/zero", f"of={world.disk / 'filler'}", "bs=64k", stderr=DEVNULL
    )
    await filling.wait()


async def policy_hangs(world: World) -> None:
    """The policy awaits something that never comes."""
    (world.marks / "hang").touch()


FAULTS: dict[str, Callable[[World], Awaitable[None]]] = {
    fault.__name__: fault
    for fault in (
        nothing,
        key_revoked,
        provider_silent,
        answers_cut,
        stage_stopped,
        stage_frozen,
        hot_partition,
        disk_full,
        policy_hangs,
    )
}
