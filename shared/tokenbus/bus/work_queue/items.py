"""Items a worker has claimed, and the subset that `read` has not yet returned."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Sequence

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import IDLE_S, beat, wait_briefly
from tokenbus.bus.scripts import BEGUN
from tokenbus.bus.server.stream_reader import Fields


class QueueItem(msgspec.Struct, frozen=True, eq=False):
    """One entry that this worker holds."""

    stream: str
    entry_id: str
    fields: Fields
    deliveries: int
    """Number of deliveries, including this one; above 1 an earlier worker was lost while it held the item."""
    begun: bool = False
    """Whether an earlier worker was lost after it had begun the item (`WorkQueue.mark`)."""

    @property
    def key(self) -> tuple[str, str]:
        """Its place on the server."""
        return self.stream, self.entry_id


def queue_item(stream: str, entry_id: bytes, deliveries: int, flat: list[bytes]) -> QueueItem:
    """The item of a script's reply."""
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    return QueueItem(stream, entry_id.decode(), fields, deliveries % BEGUN, begun=deliveries > BEGUN)


class ClaimedItems:
    """The items that this worker holds: the server counts them as delivered to it, and it keeps them alive."""

    def __init__(self, keys: Keys | None) -> None:
        """``keys``: for queues whose fields are named by runs; notes the partitions of held items' runs."""
        self._keys = keys
        self._items: dict[tuple[str, str], QueueItem] = {}
        self._begun: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: QueueItem) -> bool:
        return item.key in self._items

    @property
    def all(self) -> list[QueueItem]:
        """The items."""
        return [*self._items.values()]

    @property
    def places(self) -> Collection[tuple[str, str]]:
        """The stream and entry id of each item."""
        return self._items

    def add(self, item: QueueItem) -> None:
        """The server delivered it to this worker."""
        if self._keys:
            self._keys.hold(_runs_of(item), item.stream)
        self._items[item.key] = item

    def add_urgent(self, item: QueueItem) -> None:
        """As `add`, of an item that is looked at before its turn and begins no work on its runs yet."""
        self._items[item.key] = item

    def drop(self, stream: str, entry_id: str) -> QueueItem | None:
        """Stop keeping the item alive. None: it was not held."""
        item = self._items.pop((stream, entry_id), None)
        self._begun.discard((stream, entry_id))
        if item and self._keys:
            self._keys.release(_runs_of(item))
        return item

    def begin(self, item: QueueItem) -> None:
        """Note that work on the item has begun."""
        if item in self:
            self._begun.add(item.key)

    def has_begun(self, item: QueueItem) -> bool:
        """Whether work on the item has begun, here or by an earlier worker."""
        return item.begun or item.key in self._begun

    def release(self, items: Sequence[QueueItem]) -> dict[str, list[str]]:
        """`drop` these items; return their entry ids by stream."""
        by_stream: defaultdict[str, list[str]] = defaultdict(list)
        for item in items:
            self.drop(*item.key)
            by_stream[item.stream].append(item.entry_id)
        return by_stream


class ReadyItems:
    """Items that wait for a caller of `read`, and whether more are wanted than there are."""

    def __init__(self) -> None:
        self.closing = False
        """Whether no more items may be taken from the server. Set by `close`."""
        self._ready: asyncio.Queue[QueueItem] = asyncio.Queue()
        self._wanted = 0
        """Callers waiting in `read`."""
        self._demand = asyncio.Event()
        """Set if more callers wait in `read` than items are ready, or on shutdown."""

    def put(self, item: QueueItem) -> None:
        """Hand the item to the next caller of `read`."""
        self._ready.put_nowait(item)
        self._look_at_demand()

    async def read(self) -> QueueItem:
        """Wait for the next item."""
        self._wanted += 1
        self._look_at_demand()
        try:
            while True:
                try:
                    async with asyncio.timeout(IDLE_S):
                        return await self._ready.get()
                except TimeoutError:
                    beat()
        finally:
            self._wanted -= 1
            self._look_at_demand()

    def read_ready(self) -> list[QueueItem]:
        """All items that are ready."""
        items: list[QueueItem] = []
        while not self._ready.empty():
            items.append(self._ready.get_nowait())
        return items

    def close(self) -> None:
        """Take no more items from the server."""
        self.closing = True
        self._demand.set()

    async def wait_for_demand(self, timeout_s: float) -> bool:
        """Wait until an item is wanted or the queue closes: True."""
        return await wait_briefly(self._demand, timeout_s=timeout_s)

    def _look_at_demand(self) -> None:
        if self.closing or self._wanted > self._ready.qsize():
            self._demand.set()
        else:
            self._demand.clear()


def _runs_of(item: QueueItem) -> list[str]:
    return [name.decode(errors="replace") for name in item.fields]
