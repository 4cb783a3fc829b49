"""Which faults a round injects, and what each does."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos import hostile
from tests.chaos.deployment import servers
from tests.chaos.deployment.servers import Single, single
from tests.chaos.faults import ALL, THEMES, Chaos, Rates
from tests.chaos.judging import pressure
from tests.waiting import eventually

NOTHING: Any = SimpleNamespace(kinds=(), well=list)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Single]:
    async with single(tmp_path) as server:
        assert isinstance(server, Single)
        yield server


async def test_a_round_may_have_only_faults_that_last_throughout() -> None:
    """`make chaos FAULTS=clocks`."""
    chaos = Chaos(random.Random(1), Rates(pause_s=0.001, weights={}), *[NOTHING] * 5)
    await chaos.run(0.01)
    assert not chaos.tally


def test_the_faults_of_a_theme_are_faults_of_all_rounds() -> None:
    assert [fault for theme in THEMES for fault in theme if fault not in ALL] == []


async def test_all_workers_of_each_kind_stop_in_turn() -> None:
    stopped: list[str] = []
    kinds = ("fetcher", "parser", "tools")

    def worker(kind: str) -> Any:
        return SimpleNamespace(freeze=lambda: stopped.append(kind), thaw=lambda: stopped.append(f"not {kind}"))

    workers: Any = SimpleNamespace(kinds=kinds, well=lambda *of: [worker(kind) for kind in of * 2])
    rates = Rates(pause_s=0.001, freeze_kind_s=(60.0, 60.0), weights={"stop a kind": 1})
    chaos = Chaos(random.Random(1), rates, workers, *[NOTHING] * 4)
    workers.start = lambda kind: None
    while len(stopped) < 2 * len(kinds):
        await chaos._stop_a_kind()  # pyright: ignore[reportPrivateUsage]
    assert sorted(stopped) == sorted(kinds * 2)
    assert [*chaos.tally] == [fault for fault in chaos.tally if fault.startswith(pressure.STANDING)]
    await chaos.heal()
    assert sum(name.startswith("not ") for name in stopped) == 2 * len(kinds)


async def test_a_full_server_waits_for_whoever_makes_room(server: Single) -> None:
    await server.put_ballast("p", 1)
    over = asyncio.Event()
    filling = asyncio.create_task(server.fill(over))

    async def is_full() -> bool:
        return int((await server.client.info("memory"))["maxmemory"]) > 0

    await eventually(is_full)
    await server.client.unlink(*(f"p:{{0}}:{topic}" for topic in servers.TOPICS))
    assert await filling is None
    assert not int((await server.client.info("memory"))["maxmemory"])


async def test_a_full_server_in_which_nobody_makes_room_is_a_defect(
    server: Single, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "ROOM_S", 0.3)
    assert "no room" in (await server.fill(asyncio.Event()) or "")
    over = asyncio.Event()
    over.set()
    assert await server.fill(over) is None, "the round is over"


async def test_a_huge_request_is_one_entry_or_refused(server: Single) -> None:
    _, request = hostile.huge_scene("giant")
    assert await hostile.send_huge(server.port, "p:requests", request, 3 * 2**20)
    [(_, fields)] = await server.client.xrange("p:requests")
    assert json.loads(fields[b"__data__"]) == {**request, "text": "x" * 3 * 2**20}
    await server.client.config_set("maxmemory", 1)
    assert not await hostile.send_huge(server.port, "p:requests", request, 2**20)
