"""Any number of connections to one host, split into small pools.

At the start and end of every request, httpcore scans all connections of a pool and makes a system call for each idle
one (httpcore/_async/connection_pool.py, `_assign_requests_to_connections`). With a thousand concurrent calls this
dominates the cost of a call.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
from httpx import USE_CLIENT_DEFAULT

AT_ONCE = 4
"""Maximum concurrent calls per pool."""
KEPT_S = 5.0
"""A pool without calls for this long is closed; httpcore keeps a single idle connection as long."""


class _Pool:
    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self.transport = transport
        self.calls = 0
        self.left_at = 0.0

    def leave(self) -> None:
        self.calls -= 1
        self.left_at = time.monotonic()


class _Answer(httpx.AsyncByteStream):
    """A response body that notifies its pool when it is closed."""

    def __init__(self, stream: httpx.AsyncByteStream, pool: _Pool) -> None:
        self._stream = stream
        self._pool: _Pool | None = pool

    def __aiter__(self) -> AsyncIterator[bytes]:
        return aiter(self._stream)

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            if self._pool:
                self._pool.leave()
                self._pool = None


class Pools(httpx.AsyncBaseTransport):
    """As many transports as the current calls need, `AT_ONCE` calls each; the first with room gets the next call."""

    def __init__(self, make: Callable[[], httpx.AsyncBaseTransport]) -> None:
        """``make`` creates a transport with its own pool. Its exceptions propagate."""
        self._make = make
        self._pools = [_Pool(make())]

    def __len__(self) -> int:
        return len(self._pools)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        pool = next((pool for pool in self._pools if pool.calls < AT_ONCE), None)
        if pool is None:
            pool = _Pool(self._make())
            self._pools.append(pool)
        pool.calls += 1
        try:
            await self._close_idle()
            response = await pool.transport.handle_async_request(request)
        except BaseException:
            pool.leave()
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Answer(response.stream, pool)
        return response

    async def _close_idle(self) -> None:
        before = time.monotonic() - KEPT_S
        while not self._pools[-1].calls and self._pools[-1].left_at < before and len(self._pools) > 1:
            await self._pools.pop().transport.aclose()

    async def aclose(self) -> None:
        for pool in self._pools:
            await pool.transport.aclose()


class FreeingClient(httpx.AsyncClient):
    """httpx's client, whose responses are freed once they are closed and no longer used.

    httpx's response and its stream refer to each other (httpx/_client.py, `BoundAsyncStream`). So a closed response
    would stay until the collector finds it, with its request, its connection and the buffers of both; and the collector
    looks at old objects seldom.
    """

    async def send(
        self,
        request: httpx.Request,
        *,
        stream: bool = False,
        auth: Any = USE_CLIENT_DEFAULT,
        follow_redirects: Any = USE_CLIENT_DEFAULT,
    ) -> httpx.Response:
        response = await super().send(request, stream=stream, auth=auth, follow_redirects=follow_redirects)
        if response.is_closed:
            response.stream = httpx.ByteStream(b"")
        else:
            assert isinstance(response.stream, httpx.AsyncByteStream)
            response.stream = _DroppedWhenClosed(response.stream)
        return response


class _DroppedWhenClosed(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream) -> None:
        self._stream = stream

    def __aiter__(self) -> AsyncIterator[bytes]:
        return aiter(self._stream)

    async def aclose(self) -> None:
        stream, self._stream = self._stream, httpx.ByteStream(b"")
        await stream.aclose()
