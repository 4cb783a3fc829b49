"""Many calls to one place at once: none of them is looked at by all the others' pool, and no place leaks."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from tokenbus_services.net import http_client as pools
from tokenbus_services.net.http_client import AT_ONCE, Pools


class Body(httpx.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"answer"


class Transport(httpx.AsyncBaseTransport):
    def __init__(self) -> None:
        self.asked = 0
        self.closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        if request.url.path == "/broken":
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(200, stream=Body())

    async def aclose(self) -> None:
        self.closed = True


class Made(list[Transport]):
    def make(self) -> Transport:
        self.append(Transport())
        return self[-1]


async def opened(client: httpx.AsyncClient, path: str = "/") -> httpx.Response:
    return await client.send(client.build_request("GET", f"http://provider{path}"), stream=True)


async def test_parallel_calls_share_small_pools_and_the_next_calls_use_a_pool_with_room() -> None:
    made = Made()
    async with httpx.AsyncClient(transport=Pools(made.make)) as client:
        given_up, *answers = [await opened(client) for _ in range(2 * AT_ONCE + 1)]
        assert [transport.asked for transport in made] == [AT_ONCE, AT_ONCE, 1]
        await given_up.aclose()
        await given_up.aclose()  # a second time frees nothing more
        more = [await opened(client), await opened(client)]
        assert [transport.asked for transport in made] == [AT_ONCE + 1, AT_ONCE, 2]
        for answer in [*answers, *more]:
            assert await answer.aread() == b"answer"
    assert all(transport.closed for transport in made)


async def test_a_call_that_fails_leaves_its_place_to_another() -> None:
    made = Made()
    async with httpx.AsyncClient(transport=Pools(made.make)) as client:
        for _ in range(3 * AT_ONCE):
            with pytest.raises(httpx.ConnectError):
                await opened(client, "/broken")
    assert len(made) == 1


async def test_unused_pools_are_closed_with_their_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pools, "KEPT_S", -1.0)
    made = Made()
    transport = Pools(made.make)
    async with httpx.AsyncClient(transport=transport) as client:
        for answer in [await opened(client) for _ in range(3 * AT_ONCE)]:
            await answer.aread()
        assert len(transport) == 3
        await (await opened(client)).aread()
        assert len(transport) == 1
        assert [t.closed for t in made] == [False, True, True]
