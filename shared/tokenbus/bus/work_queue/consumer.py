"""One worker's consumer in the group of a work queue: the items it has claimed, and what it writes about them."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial

import msgspec
from redis.exceptions import RedisError, ResponseError

from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import IDLE_S, Liveness, beat, wait_briefly
from tokenbus.bus.scripts import BEGUN
from tokenbus.bus.scripts.fair_order import Entries, put_back
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.run_scripts import run_script, run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import Fields

log = logging.getLogger(__name__)

LOOK_AHEAD_S = 0.02
"""Poll interval for urgent items while the worker takes no others."""


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


class QueueOptions(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """How a worker takes part in a work queue."""

    group: str
    worker: str
    """Name of its consumer."""
    members: str | None = None
    """Sorted set in which the worker signs on, even while the queue is empty."""
    count: int = 1
    """Maximum items per read and stream."""
    idle_s: float = 4.0
    """An item that no worker has kept alive for this long is claimed by another."""
    beat_s: float = 1.0
    """Interval at which the worker keeps its items alive."""
    fair: Entries | None = None
    """Tenants take turns while items wait (scripts/fair_order.py); None: items come in stream order."""
    idle_only: Callable[[], bool] = lambda: False
    """While it returns True, take only items that no other worker takes at once."""
    prefers: Callable[[str], bool] | None = None
    """Of streams for which it returns False, take only items that no other worker takes at once."""
    on_claimed_away: Callable[[QueueItem], None] = lambda item: None
    """Called with an item that another worker claimed: work on it must stop."""
    urgent: Callable[[QueueItem], bool] | None = None
    """Called with each new item of a fair queue when it is read, even if no caller waits in `read`. It returns True if
    it has handled the item, which then does not wait for its turn.
    """
    unreadable: Callable[[QueueItem, Exception], Awaitable[None]] | None = None
    """Awaited with an item that breaks every connection on which it is read. The values of its fields are empty. The
    item is finished afterwards. It may be awaited more than once for the same item.
    """


class Consumer:
    """The items that the server counts as delivered to this worker, and the subset that `read` has not yet returned.

    Writes retry until the server accepts them, unless they say otherwise.
    """

    def __init__(
        self,
        server: Server,
        options: QueueOptions,
        streams: Sequence[str],
        *,
        keys: Keys | None = None,
        liveness: Liveness | None = None,
    ) -> None:
        """``keys``: of queues by partition, whose fields are named by runs: knows where the runs of held items are."""
        self.server = server
        self.options = options
        self.streams: list[str] = list(streams)
        self.liveness = liveness or Liveness()
        self.healthy = False
        """Whether the last command reached the server."""
        self.closing = False
        """Whether to take no more items from the server."""
        self._keys = keys
        self._items: dict[tuple[str, str], QueueItem] = {}
        self._begun: set[tuple[str, str]] = set()
        self._ready: asyncio.Queue[QueueItem] = asyncio.Queue()
        self._wanted = 0
        """Callers waiting in `read`."""
        self._demand = asyncio.Event()
        """Set if more callers wait in `read` than items are ready, or on shutdown."""

    # --- the group on the server --------------------------------------------------------------------------------

    async def declare(self, streams: Sequence[str]) -> None:
        """Create the streams and the group on them if they are missing. Raises redis-py's errors."""
        for stream in streams:
            try:
                await self.server.client.xgroup_create(stream, self.options.group, id="0-0", mkstream=True)
            except ResponseError as e:
                if "BUSYGROUP" not in str(e):
                    raise

    async def recover(self, error: Exception, pause: float) -> None:
        """After an error of the server: create the group again if it is gone, else wait for ``pause`` seconds."""
        if self.healthy:
            defect = None if isinstance(error, RedisError | OSError) else error
            level = logging.ERROR if defect else logging.WARNING
            log.log(level, "queue %s: %s", self.options.group, error, exc_info=defect)
        self.healthy = False
        if "NOGROUP" in str(error):  # the stream was deleted, or the server restarted empty
            with suppress(RedisError, OSError):
                await self.declare(self.streams)
                return
        beat()
        await asyncio.sleep(pause)

    # --- what is held -------------------------------------------------------------------------------------------

    def __contains__(self, item: QueueItem) -> bool:
        return item.key in self._items

    @property
    def claimed(self) -> int:
        """Number of items that this worker holds."""
        return len(self._items)

    @property
    def places(self) -> Collection[tuple[str, str]]:
        """The stream and entry id of each held item."""
        return self._items

    def has_begun(self, item: QueueItem) -> bool:
        """Whether work on the item has begun, here or by an earlier worker."""
        return item.begun or item.key in self._begun

    def hold(self, item: QueueItem) -> None:
        """Keep alive an item that is looked at before its turn, and that begins no work on its runs yet."""
        self._items[item.key] = item

    def take(self, item: QueueItem) -> None:
        """Keep an item alive that the server delivered; hand it to the next caller of `read` unless it is urgent."""
        if self._keys:
            self._keys.hold(_runs_of(item), item.stream)
        self._items[item.key] = item
        if not (item.deliveries == 1 and self.options.urgent and self.options.urgent(item)):
            self._ready.put_nowait(item)
            self._look_at_demand()

    def drop(self, stream: str, entry_id: str) -> QueueItem | None:
        """Stop keeping the item alive. None: it was not held."""
        item = self._items.pop((stream, entry_id), None)
        self._begun.discard((stream, entry_id))
        if item and self._keys:
            self._keys.release(_runs_of(item))
        return item

    def release(self, items: Sequence[QueueItem]) -> dict[str, list[str]]:
        """Stop keeping these items alive; another worker claims them once they have been idle for ``idle_s``. Returns
        their entry ids by stream.
        """
        by_stream: defaultdict[str, list[str]] = defaultdict(list)
        for item in items:
            self.drop(*item.key)
            by_stream[item.stream].append(item.entry_id)
        return by_stream

    # --- what is ready ------------------------------------------------------------------------------------------

    async def read(self) -> QueueItem:
        """Wait for the next item. While no caller waits, at most one read's worth of items is taken from the server."""
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

    async def read_ready(self) -> list[QueueItem]:
        """Wait for the next item; return it and all others that are ready."""
        return [await self.read(), *self._pop_ready()]

    async def wait_for_demand(self) -> bool:
        """Wait until an item is wanted or the queue closes: True. False: time to look for urgent items."""
        timeout_s = LOOK_AHEAD_S if self.options.urgent else IDLE_S
        while not await wait_briefly(self._demand, timeout_s=timeout_s):
            if self.options.urgent:
                return False
        return True

    def _pop_ready(self) -> list[QueueItem]:
        return [self._ready.get_nowait() for _ in range(self._ready.qsize())]

    def _look_at_demand(self) -> None:
        if self.closing or self._wanted > self._ready.qsize():
            self._demand.set()
        else:
            self._demand.clear()

    # --- writes -------------------------------------------------------------------------------------------------

    async def finish(self, items: Sequence[QueueItem], *, again: Callable[[], Awaitable[None]] | None = None) -> None:
        """Acknowledge and delete the items that this worker still owns.

        ``again`` writes the items' results once more and is awaited before each retry: after a fail-over the server may
        have lost the results and still have the items.
        """
        calls = self._calls(scripts.finish, items)
        tried = False

        async def once() -> None:
            nonlocal tried
            if tried and again:
                await again()
            tried = True
            await run_scripts(self.server, calls)

        await retry_until_available(self.server, once, what=f"finish of {self.options.group}")

    async def still_has(self, item: QueueItem) -> bool:
        """Whether no other worker has claimed the item meanwhile. Keeps it alive."""
        call = scripts.heartbeat(
            item.stream, group=self.options.group, consumer=self.options.worker, ids=[item.entry_id]
        )
        what = f"owner in {self.options.group}"
        return not await retry_until_available(self.server, lambda: run_script(self.server, call), what=what)

    async def hand_back(self, items: Sequence[QueueItem]) -> None:
        """Return items that were not begun, for another worker to take within one beat."""
        await retry_until_available(
            self.server, lambda: self._put_back(items, in_front=True), what=f"hand-back of {self.options.group}"
        )

    async def discard(self, items: Sequence[QueueItem]) -> None:
        """Return items of a fair queue that were not begun to wait for their turn."""
        what = f"items passed over in {self.options.group}"
        await retry_until_available(self.server, lambda: self._put_back(items, in_front=False), what=what)

    async def requeue(self, items: Sequence[QueueItem]) -> None:
        """Move items that were not begun to the end of their queues."""
        calls = self._calls(scripts.requeue, items)
        what = f"requeue of {self.options.group}"
        await retry_until_available(self.server, lambda: run_scripts(self.server, calls), what=what)

    async def mark(self, item: QueueItem, *, begun: bool) -> bool:
        """Record whether work on the item has begun. Returns False if another worker owns the item: then the work must
        not begin.

        If this worker is lost after that, the next one gets the item with `QueueItem.begun`. If this worker is lost
        while the item is marked as not begun, the next one gets it as if it was never delivered; without any mark, the
        next one sees one delivery more.
        """
        group, worker = self.options.group, self.options.worker
        call = scripts.mark(item.stream, group=group, consumer=worker, entry=item.entry_id, begun=begun)
        ours = await retry_until_available(self.server, lambda: run_script(self.server, call), what=f"mark of {group}")
        if ours and begun and item in self:
            self._begun.add(item.key)
        return bool(ours)

    async def _put_back(self, items: Sequence[QueueItem], *, in_front: bool) -> None:
        """Return items to the queue, tried once. Raises redis-py's errors."""
        fair = self.options.fair
        script = partial(put_back, entries=fair, in_front=in_front) if fair else scripts.hand_back
        await run_scripts(self.server, self._calls(script, items))

    def _calls(self, script: Callable[..., scripts.ScriptCall], items: Sequence[QueueItem]) -> list[scripts.ScriptCall]:
        group, worker = self.options.group, self.options.worker
        pages = scripts.pages(self.release(items))
        return [script(stream, group=group, consumer=worker, ids=ids) for stream, ids in pages]


def _runs_of(item: QueueItem) -> list[str]:
    return [name.decode(errors="replace") for name in item.fields]
