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
    received: list[str] = []
    listener = ControlListener(server, keys, lambda message: received.append(message.run))
    await listener.open()
    try:
        yield received
    finally:
        await listener.close()


async def broadcast(server: Server, keys: Keys, *runs: str) -> None:
    for run in runs:
        await server.client.xadd(keys.topic(keys.partition_of(run), "control"), {run: encode(Control(run))})


async def test_every_listener_gets_each_message_once(server: Server, keys: Keys):
    await broadcast(server, keys, "before")
    runs = [f"r{i}" for i in range(30)]
    async with listening(server, keys) as first, listening(server, keys) as second:
        await broadcast(server, keys, *runs)
        await eventually(lambda: sorted(first) == sorted(second) == sorted(runs))


async def test_nothing_is_missed_or_doubled_over_lost_connections(server: Server, keys: Keys):
    runs = [f"r{i}" for i in range(50)]
    async with Server(server.url) as other, listening(other, keys) as received:
        for run in runs:
            await broadcast(server, keys, run)
            await server.client.client_kill_filter(_type="normal", skipme=True)
        await eventually(lambda: sorted(received) == sorted(runs))


async def test_an_unreadable_control_message_does_not_stop_the_reader(server: Server, keys: Keys):
    async with listening(server, keys) as received:
        await server.client.xadd(keys.topic(1, "control"), {"r": "no frame"})
        await broadcast(server, keys, "r1", "r2", "r3", "r4")
        await eventually(lambda: sorted(received) == ["r1", "r2", "r3", "r4"])


async def test_what_a_message_calls_may_fail(server: Server, keys: Keys):
    received: list[str] = []

    def on_control(message: Control) -> None:
        received.append(message.run)
        raise LookupError(message.run)

    listener = ControlListener(server, keys, on_control)
    await listener.open()
    await broadcast(server, keys, "a", "b", "c")
    await eventually(lambda: sorted(received) == ["a", "b", "c"])
    await listener.close()
