"""A log of requests and their responses, which tests inspect and wait on."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Literal

import msgspec

from tokenbus_services.mock_provider.request import ModelRequest

State = Literal["received", "sending", "stalled", "sent", "cut", "disconnected"]
"""`sent`: the whole response was sent; `cut`: this side closed early; `disconnected`: the client left early. These
three are final.
"""

_FINAL = frozenset[State]({"sent", "cut", "disconnected"})


class HttpRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request as received."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes


class Exchange(msgspec.Struct, kw_only=True, eq=False):
    """One request and its response. Times are `time.monotonic()`, in seconds."""

    http_request: HttpRequest
    received_at: float
    request: ModelRequest | None = None
    """None: not a provider API request, or a rejected one."""
    attempt: int = 0
    """How often this turn of the conversation was requested before."""
    state: State = "received"
    status: int | None = None
    reads_sent: int = 0
    bytes_sent: int = 0
    """Of the body."""
    ended_at: float | None = None
    resumed: asyncio.Event = msgspec.field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        """Whether the exchange is finished."""
        return self.state in _FINAL


class RequestLog:
    """The latest exchanges, oldest first, with change notification. Bounded in number and bytes."""

    def __init__(self, *, exchanges: int, body_bytes: int) -> None:
        self.exchanges: deque[Exchange] = deque()
        self.total = 0
        """Number of all requests, including evicted ones."""
        self._exchanges = exchanges
        self._body_bytes = body_bytes
        self._logged_bytes = 0
        self._changed = asyncio.Event()
        self._waiting = 0

    def add(self, exchange: Exchange) -> None:
        """Add a request, evicting the oldest if needed."""
        self.total += 1
        self.exchanges.append(exchange)
        self._logged_bytes += len(exchange.http_request.body)
        while len(self.exchanges) > self._exchanges or self._logged_bytes > self._body_bytes:
            self._logged_bytes -= len(self.exchanges.popleft().http_request.body)
        self.changed()

    def changed(self) -> None:
        """Wake all waiting tasks; free if there are none."""
        if self._waiting:
            before, self._changed = self._changed, asyncio.Event()
            before.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once the condition holds; it is checked after each change."""
        self._waiting += 1
        try:
            while not condition():
                await self._changed.wait()
        finally:
            self._waiting -= 1


class AttemptCounter:
    """Counts tries per turn key. The least recently used of ``limit`` keys is evicted."""

    def __init__(self, limit: int) -> None:
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._limit = limit

    def next(self, key: str) -> int:
        """The number of this try: 0, 1, 2, …"""
        attempt = self._counts.pop(key, 0)
        self._counts[key] = attempt + 1
        if len(self._counts) > self._limit:
            self._counts.popitem(last=False)
        return attempt
