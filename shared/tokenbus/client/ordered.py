"""The subscription without a group: a reader of its own, as one screen or one log needs it."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Generic, Literal, Self, TypeVar, cast

from tokenbus.bus.keys import Keys, PublicTopic
from tokenbus.bus.reader import Entry
from tokenbus.client.cursor import OLDEST, Cursor
from tokenbus.client.deployment import Deployment, Outage
from tokenbus.client.entries import public_event
from tokenbus.client.topic import TopicReader, ends
from tokenbus.errors import DeploymentMismatch, ServerUnavailable
from tokenbus.events.public import PublicEvent

E = TypeVar("E", bound=PublicEvent)


class OrderedSubscription(Generic[E]):
    """Every event of a topic exactly once, those of one run in order; events of different runs in any order.

    Begins when it is entered (``async with``) or first iterated: after a cursor, at the oldest entry that is kept, or
    with what comes from then on. Iterating raises

    - CursorTrimmed where events after the position are gone, because they were trimmed before this reader had
      them. Iterating again goes on at the oldest that is kept (Redis 6.2 cannot tell for a topic that was empty at
      the position);
    - ServerUnavailable when the server was away for longer than the client's ``reconnect_s``; until then the
      subscription waits, and goes on where it stood. Iterating again tries again;
    - Malformed for an entry that is no event. Iterating again leaves it out.

    For one task at a time.
    """

    def __init__(
        self,
        deployment: Deployment,
        topic: PublicTopic,
        *,
        after: Cursor | Literal["oldest"] | None,
        reconnect_s: float,
    ) -> None:
        self._deployment = deployment
        self._topic: PublicTopic = topic
        self._after = after
        self._outage = Outage(reconnect_s)
        self._keys: Keys | None = None
        self._reader: TopicReader | None = None
        self._positions: dict[int, str] = {}
        self._pending: deque[tuple[int, Entry]] = deque()
        self._closed = False

    @property
    def cursor(self) -> Cursor:
        """The place after the event that was given last. Before the subscription has begun: RuntimeError."""
        if self._keys is None:
            raise RuntimeError("the subscription has not begun: enter it, or take an event first")
        return Cursor(self._topic, tuple(self._positions[p] for p in range(self._keys.partitions)))

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the subscription: iterating ends, the connection is given back. `cursor` stays."""
        self._closed = True
        self._pending.clear()
        if self._reader:
            await self._reader.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> E:
        while not self._pending and not self._closed:
            try:
                await self._refill()
                self._outage.over()
            except ServerUnavailable as e:
                await self._outage.wait(e)
        if self._closed:
            raise StopAsyncIteration
        partition, entry = self._pending.popleft()
        self._positions[partition] = entry[0].decode()
        return cast("E", public_event(f"{self._topic} {partition}", entry))

    async def _refill(self) -> None:
        reader = self._reader or await self._open()
        if self._keys:
            await self._deployment.still(self._keys)
        for partition, entries in await reader.read():
            self._pending.extend((partition, entry) for entry in entries)

    async def _open(self) -> TopicReader:
        keys = await self._deployment.keys()
        self._positions = await self._begin(keys)
        self._keys = keys
        self._reader = TopicReader(self._deployment.server, keys, self._topic)
        for partition, position in self._positions.items():
            self._reader.take(partition, position)
        return self._reader

    async def _begin(self, keys: Keys) -> dict[int, str]:
        if self._after is None:
            return await ends(self._deployment.server, keys, self._topic)
        if isinstance(self._after, Cursor):
            if len(self._after.positions) != keys.partitions:
                raise DeploymentMismatch("partitions", str(len(self._after.positions)), str(keys.partitions))
            return dict(enumerate(self._after.positions))
        return dict.fromkeys(range(keys.partitions), OLDEST)
