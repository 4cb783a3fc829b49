"""Turns that wait for one upload: they stay alive while it makes progress, and count as stuck if it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from tests.waiting import eventually
from tokenbus.bus import liveness as liveness_module
from tokenbus.bus.liveness import ItemWork, Liveness
from tokenbus.providers.file_api import ProviderFile
from tokenbus_services.fetcher.uploads import upload as flight_module
from tokenbus_services.fetcher.uploads.upload import Flight
from tokenbus_services.media.blob_cache import Found


async def test_a_turn_that_waits_for_an_upload_counts_as_progressing_only_while_it_does(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(flight_module, "IDLE_S", 0.01)
    monkeypatch.setattr(flight_module, "PIECE_S", 0.0)
    monkeypatch.setattr(liveness_module, "IDLE_S", 0.01)
    liveness, flight, proceed = Liveness(), Flight(), asyncio.Event()
    works: list[ItemWork] = []

    async def pieces() -> AsyncGenerator[bytes]:
        yield b"first"
        await proceed.wait()
        yield b"last"

    async def upload() -> ProviderFile:
        async for _ in flight.watched(Found(9, None, pieces)).pieces():
            pass
        return ProviderFile(file_id="file-1")

    async def wait() -> ProviderFile:
        works.append(ItemWork(liveness))
        return await flight.landed()

    flight.start(upload())
    flight.moves(3600.0)  # a step that may take long, in silence
    waiting = [asyncio.create_task(wait()) for _ in range(2)]
    await eventually(lambda: len(works) == 2)
    liveness.elapsed_s = 100.0
    await eventually(lambda: all(work.still_s == 0.0 for work in works))
    flight._quiet_until = 0.0  # pyright: ignore[reportPrivateUsage] - that time has passed
    liveness.elapsed_s = 200.0
    for _ in range(20):
        await asyncio.sleep(0.01)
    assert [work.still_s for work in works] == [100.0, 100.0]
    proceed.set()
    assert [(await one).file_id for one in waiting] == ["file-1"] * 2
