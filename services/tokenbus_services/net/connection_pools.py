"""Any number of connections to one place, in pools of few each.

httpcore looks at every connection of a pool, and asks the system about each idle one, whenever a request begins or ends
(httpcore/_async/connection_pool.py, `_assign_requests_to_connections`). With a thousand calls at once that is most of
what a call costs.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable

import httpx

AT_ONCE = 4
"""Calls of one pool."""
KEPT_S = 5.0
"""A pool without a call for so long is closed with its connections; httpcore keeps a single idle one as long."""


class _Pool:
    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self.transport = transport
        self.calls = 0
        self.left_at = 0.0

    def leave(self) -> None:
        self.calls -= 1
        self.left_at = time.monotonic()


class _Answer(httpx.AsyncByteStream):
    """The body of an answer, whose end its pool hears of."""

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
    """As many transports as the calls of now need, `AT_ONCE` calls in each; the first with room takes the next call."""

    def __init__(self, make: Callable[[], httpx.AsyncBaseTransport]) -> None:
        """``make`` gives a transport with a pool of its own. Raises what it raises."""
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
