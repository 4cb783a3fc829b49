"""Places among the running calls, as fetchers take them and give them back."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.limits import Scope
from tokenbus.bus.server.server import Server
from tokenbus_services.endpoints.limiter import Limiter, LimitRefusal, Reservation, ReservationRequest


@asynccontextmanager
async def limiter(server: Server, worker: str) -> AsyncGenerator[Limiter]:
    limiter = Limiter(server, worker=worker)
    await limiter.open()
    try:
        yield limiter
    finally:
        await limiter.close()


async def test_a_fetcher_counted_as_dead_frees_its_own_slot_and_not_its_successors(server: Server, keys: Keys) -> None:
    scopes = (Scope("provider", keys.limit("provider:p"), concurrency=2),)
    async with limiter(server, "zombie") as zombie, limiter(server, "successor") as successor:
        before = await zombie.reserve(ReservationRequest("run/1", "", scopes, 0))
        after = await successor.reserve(ReservationRequest("run/1", "", scopes, 0))
        assert isinstance(before, Reservation)
        assert isinstance(after, Reservation)
        zombie.refund(before, used=0)

        async def one_is_left() -> bool:
            return await server.client.zrange(scopes[0].held, 0, -1) == [after.request.member.encode()]

        await eventually(one_is_left)
        other = await successor.reserve(ReservationRequest("other/1", "", scopes, 0))
        assert isinstance(other, Reservation)
        assert isinstance(await successor.reserve(ReservationRequest("third/1", "", scopes, 0)), LimitRefusal)
        successor.refund(after, used=0)
        successor.refund(other, used=0)


async def test_asking_again_after_a_lost_reply_takes_no_second_place(server: Server, keys: Keys) -> None:
    scopes = (Scope("provider", keys.limit("provider:p"), concurrency=2),)
    async with limiter(server, "a") as fetcher:
        request = ReservationRequest("run/1", "", scopes, 0)
        for _ in range(2):
            assert isinstance(await fetcher.reserve(request), Reservation)
        assert await server.client.zcard(scopes[0].held) == 1
        fetcher.refund(Reservation(request, (0,)), used=0)
