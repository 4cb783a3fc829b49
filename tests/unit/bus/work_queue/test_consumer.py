"""A consumer group that is gone, and a server that does not take it back."""

from __future__ import annotations

import asyncio
import socket

import pytest
from redis.exceptions import ResponseError

from tokenbus.bus.server.server import Server
from tokenbus.bus.work_queue import QueueOptions, WorkQueue


async def test_a_group_that_cannot_be_created_again_is_not_tried_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with Server(f"redis://127.0.0.1:{port}") as server:
        queue = WorkQueue(server, QueueOptions(group="intake", worker="w1"), ["requests"])
        monkeypatch.setattr(asyncio, "sleep", pause)
        await queue.recover(ResponseError("NOGROUP No such key 'requests' or consumer group 'intake'"), 0.25)
    assert pauses == [0.25]
