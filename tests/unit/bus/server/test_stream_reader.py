"""Reads of a Cluster's slots side by side."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import StreamReader


async def test_a_defect_in_the_read_of_one_slot_is_logged_though_the_others_are_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def xread(streams: dict[str, str], **options: Any) -> list[Any]:
        if "t:{1}:raw" in streams:
            raise TypeError("a defect")
        await asyncio.Event().wait()
        return []

    async with Server("redis+cluster://127.0.0.1:1") as server:
        monkeypatch.setattr(server.client, "xread", xread)
        reader = StreamReader(server, count=1)
        offsets = {"t:{0}:raw": "0-0", "t:{1}:raw": "0-0"}
        with caplog.at_level(logging.ERROR):
            assert await reader.read(offsets) == []
            assert await reader.read(offsets) == []
        await reader.close()
    (record,) = caplog.records
    assert "t:{1}:raw" in record.getMessage()
    assert record.exc_info
