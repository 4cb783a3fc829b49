"""Control messages: each listener receives each message once, also after a lost connection."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from tests.waiting import eventually
from tokenbus.bus.control import ControlListener
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.events.frames import Control, encode


@asynccontextmanager
async def listening(server: Server, keys: Keys) -> AsyncGenerator[list[str]]:
    heard: list[str] = []
    listener = ControlListener(server, keys, lambda message: heard.append(message.run))
    await listener.open()
    try:
        yield heard
    finally:
        await listener.close()


async def tell(server: Server, keys: Keys, *runs: str) -> None:
    for run in runs:
        await server.client.xadd(keys.topic(keys.partition_of(run), "control"), {run: encode(Control(run))})


async def test_every_listener_gets_each_message_once(server: Server, keys: Keys):
    await tell(server, keys, "before")
    runs = [f"r{i}" for i in range(30)]
    async with listening(server, keys) as first, listening(server, keys) as second:
        await tell(server, keys, *runs)
        await eventually(lambda: sorted(first) == sorted(second) == sorted(runs))


async def test_nothing_is_missed_or_doubled_over_lost_connections(server: Server, keys: Keys):
    runs = [f"r{i}" for i in range(50)]
    async with Server(server.url) as other, listening(other, keys) as heard:
        for run in runs:
            await tell(server, keys, run)
            await server.client.client_kill_filter(_type="normal", skipme=True)
        await eventually(lambda: sorted(heard) == sorted(runs))


async def test_an_unreadable_control_message_does_not_stop_the_reader(server: Server, keys: Keys):
    async with listening(server, keys) as heard:
        await server.client.xadd(keys.topic(1, "control"), {"r": "no frame"})
        await tell(server, keys, "r1", "r2", "r3", "r4")
        await eventually(lambda: sorted(heard) == ["r1", "r2", "r3", "r4"])


async def test_what_a_message_calls_may_fail(server: Server, keys: Keys):
    heard: list[str] = []

    def told(message: Control) -> None:
        heard.append(message.run)
        raise LookupError(message.run)

    listener = ControlListener(server, keys, told)
    await listener.open()
    await tell(server, keys, "a", "b", "c")
    await eventually(lambda: sorted(heard) == ["a", "b", "c"])
    await listener.close()
