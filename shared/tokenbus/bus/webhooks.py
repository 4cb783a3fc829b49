"""Deliveries of webhooks that wait on the server, by receiver, until they are made.

At least once: a delivery stays until it was made or given up. One whose worker is lost is due again after its lease.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts import webhooks
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server

PAGE = 100
KEPT_MS = 30 * 86_400_000
"""How long deliveries are kept after the last one that was added, should no worker ever make them."""


class Delivery(msgspec.Struct, frozen=True, array_like=True):
    """One notice on its way to one receiver."""

    id: str
    run: str
    since_ms: int
    """When the bus began to deliver it."""
    body: bytes


class Taken(msgspec.Struct, frozen=True):
    """What `Deliveries.take` found."""

    now: list[Delivery]
    waiting: int
    """All that there are, these among them."""
    next_s: float | None
    """In how many seconds the next one is due; None: there is none."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Delivery).decode


class Deliveries:
    """The deliveries that wait for one receiver. All methods raise redis-py's errors, and may be repeated."""

    def __init__(self, server: Server, keys: Keys, receiver: str) -> None:
        self._server = server
        self._receiver, self._receivers = receiver, keys.webhook_receivers
        self._due = keys.webhook_due(receiver)
        self._bodies = keys.webhook_bodies(receiver)

    @property
    def place(self) -> str:
        """The key where they wait."""
        return self._due

    async def waiting(self) -> int:
        """How many there are."""
        return await self._server.client.hlen(self._bodies)

    async def add(self, delivery: Delivery) -> None:
        """Deliver this from now on. One that waits already stays as it is."""
        client = self._server.client
        # In this order: if the second is not reached, the caller repeats both.
        await client.hsetnx(self._bodies, delivery.id, _encode(delivery))
        await client.zadd(self._due, {delivery.id: delivery.since_ms}, nx=True)
        await client.sadd(self._receivers, self._receiver)
        for key in (self._bodies, self._due, self._receivers):
            await client.pexpire(key, KEPT_MS)

    async def take(self, most: int, *, lease_ms: int) -> Taken:
        """Take up to ``most`` that are due now."""
        call = webhooks.due(self._due, self._bodies, most=most, lease_ms=lease_ms)
        next_ms, waiting, *found = await run_script(self._server, call)
        next_s = None if next_ms < 0 else next_ms / 1000
        return Taken([_decode(body) for body in found[1::2]], waiting, next_s)

    async def again(self, delivery: Delivery, at_ms: int) -> None:
        """Try it again then."""
        await self._server.client.zadd(self._due, {delivery.id: at_ms}, xx=True)

    async def of_runs(self, runs: Collection[str]) -> AsyncIterator[Delivery]:
        """Those that tell of these runs."""
        async for _, body in self._server.client.hscan_iter(self._bodies, count=PAGE):
            if (delivery := _decode(body)).run in runs:
                yield delivery

    async def done(self, delivery: Delivery) -> None:
        """It was made, or given up."""
        # In this order: a time without a body is forgotten, a body without a time would stay.
        await self._server.client.hdel(self._bodies, delivery.id)
        await self._server.client.zrem(self._due, delivery.id)


async def deliveries_of(
    server: Server, keys: Keys, runs: Collection[str]
) -> AsyncIterator[tuple[Deliveries, Delivery]]:
    """What waits for any receiver and tells of these runs. Raises redis-py's errors."""
    for receiver in await server.client.smembers(keys.webhook_receivers):
        deliveries = Deliveries(server, keys, receiver.decode())
        async for delivery in deliveries.of_runs(runs):
            yield deliveries, delivery
