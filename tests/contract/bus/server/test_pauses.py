"""However long an outage lasts, every process retries within half a second, so all recover within one.

The pauses themselves are looked at, not how long they take.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from redis.exceptions import ConnectionError as ConnectionLost

from tests.waiting import eventually
from tokenbus.bus.control import ControlListener
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.retry import LONGEST_PAUSE_S, retry_until_available
from tokenbus.bus.server.server import Server
from tokenbus.bus.work_queue import QueueOptions, WorkQueue
from tokenbus.events.frames import Control, encode

LONG = 30
"""Enough failed tries that an unbounded pause would exceed the limit."""


class Outage:
    """A connection that loses every command, once it has begun, and a clock on which pauses take no time."""

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pauses: defaultdict[str, list[float]] = defaultdict(list)
        """By the name of the task."""
        self._away = False
        sleep, command = asyncio.sleep, server.client.execute_command

        async def take_note(seconds: float, *more: Any) -> None:
            task = asyncio.current_task()
            if not self._away or not seconds or task is self._tester:
                await sleep(seconds)
                return
            assert task
            self.pauses[task.get_name()].append(seconds)
            await sleep(0.001)

        async def execute_command(*args: Any, **options: Any) -> Any:
            if self._away:
                raise ConnectionLost("away")
            return await command(*args, **options)

        self._tester = asyncio.current_task()
        monkeypatch.setattr(asyncio, "sleep", take_note)
        server.client.execute_command = execute_command

    def begin(self) -> None:
        self._away = True

    def end(self) -> None:
        self._away = False

    async def has_been_long(self, task: str) -> None:
        """Until this task has tried often."""
        await eventually(lambda: len(self.pauses[task]) >= LONG)


@pytest.fixture
async def other(server: Server) -> AsyncGenerator[Server]:
    async with Server(server.url) as connection:
        yield connection


@pytest.fixture
async def outage(other: Server, monkeypatch: pytest.MonkeyPatch) -> Outage:
    return Outage(other, monkeypatch)


async def test_a_queue_pauses_for_half_a_second_at_the_most(outage: Outage, other: Server, server: Server, keys: Keys):
    stream = keys.topic(0, "turns")
    queue = WorkQueue(other, QueueOptions(group="g", worker="a", beat_s=0.2), [stream])
    await queue.open()
    reading = asyncio.create_task(queue.read())
    outage.begin()
    await outage.has_been_long("queue g")
    assert max(outage.pauses["queue g"]) == LONGEST_PAUSE_S
    outage.end()
    await server.client.xadd(stream, {"n": "new"})
    await queue.finish([await reading])
    await queue.close()


async def test_a_listener_pauses_for_half_a_second_at_the_most(
    outage: Outage, other: Server, server: Server, keys: Keys
):
    received: list[str] = []
    listener = ControlListener(other, keys, lambda message: received.append(message.run))
    await listener.open()
    outage.begin()
    await outage.has_been_long("control")
    assert max(outage.pauses["control"]) == LONGEST_PAUSE_S
    outage.end()
    await server.client.xadd(keys.topic(1, "control"), {"r": encode(Control("after"))})
    await eventually(lambda: received == ["after"])
    await listener.close()


async def test_what_must_be_sent_is_tried_every_half_second_at_the_least(outage: Outage, other: Server):
    outage.begin()
    sending = asyncio.create_task(retry_until_available(other, other.client.ping, what="the test"), name="sending")
    await outage.has_been_long("sending")
    assert max(outage.pauses["sending"]) == LONGEST_PAUSE_S
    outage.end()
    assert await sending
