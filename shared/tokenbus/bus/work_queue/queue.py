"""One worker's share of a group's work queues.

Each worker reads under its own consumer name. It claims its items again every ``beat_s`` to keep them alive, and claims
items that no worker has kept alive for ``idle_s``. The earlier worker of a claimed item may be a zombie that still
runs, so the effects of an item must be fenced (guarantee 4 of design.md).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from redis.exceptions import RedisError

from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import Liveness
from tokenbus.bus.scripts.fair_order import Entries
from tokenbus.bus.server.server import Server
from tokenbus.bus.work_queue.consumer_group import ConsumerGroup
from tokenbus.bus.work_queue.heartbeat import Heartbeats
from tokenbus.bus.work_queue.item_writes import ItemWrites
from tokenbus.bus.work_queue.items import ClaimedItems, QueueItem, ReadyItems
from tokenbus.bus.work_queue.preferred import PreferredStreams
from tokenbus.bus.work_queue.reader import QueueReader

log = logging.getLogger(__name__)


class WorkQueue:
    """One worker's share of a group's work queues. Call `open`, `read` in a loop, `finish` each item, `close`."""

    def __init__(
        self,
        server: Server,
        *,
        group: str,
        streams: Sequence[str],
        worker: str,
        on_claimed_away: Callable[[QueueItem], None],
        count: int = 1,
        idle_s: float = 4.0,
        beat_s: float = 1.0,
        members: str | None = None,
        idle_only: Callable[[], bool] = lambda: False,
        prefers: Callable[[str], bool] | None = None,
        fair: Entries | None = None,
        urgent: Callable[[QueueItem], bool] | None = None,
        unreadable: Callable[[QueueItem, Exception], Awaitable[None]] | None = None,
        keys: Keys | None = None,
        liveness: Liveness | None = None,
    ) -> None:
        """- ``on_claimed_away`` is called with an item that another worker claimed: work on it must stop.
        - ``count``: maximum items per read and stream.
        - ``members``: sorted set in which the worker signs on, even while the queue is empty.
        - ``idle_only``: while it returns True, take only items that no other worker takes at once.
        - ``prefers``: of streams for which it returns False, take only items that no other worker takes at once.
        - ``fair``: tenants take turns while items wait (scripts/fair_order.py); None: items come in stream order.
        - ``urgent`` is called with each new item of a fair queue when it is read, even if no caller waits in `read`. It
          returns True if it has handled the item, which then does not wait for its turn.
        - ``unreadable`` is awaited with an item that breaks every connection on which it is read. The values of its
          fields are empty. The item is finished afterwards. It may be awaited more than once for the same item.
        - ``keys``: of queues by partition, whose fields are named by runs: knows where the runs of held items are.
        """
        liveness = liveness or Liveness()
        self._server = server
        self._group = ConsumerGroup(server, group, worker, streams)
        self._claimed = ClaimedItems(keys)
        self._ready = ReadyItems()
        self._writes = ItemWrites(server, self._claimed, group=group, worker=worker, fair=fair)
        self._reader = QueueReader(
            server,
            self._group,
            self._claimed,
            self._ready,
            self._writes,
            count=count,
            idle_s=idle_s,
            beat_s=beat_s,
            fair=fair,
            preferred=PreferredStreams(idle_only=idle_only, prefers=prefers),
            urgent=urgent,
            unreadable=unreadable,
            liveness=liveness,
        )
        self._heartbeats = Heartbeats(
            server,
            self._group,
            self._claimed,
            idle_s=idle_s,
            beat_s=beat_s,
            members=members,
            on_claimed_away=on_claimed_away,
            liveness=liveness,
        )

    @property
    def healthy(self) -> bool:
        """Whether the last command reached the server."""
        return self._group.healthy

    @property
    def claimed(self) -> int:
        """Number of items that this worker holds."""
        return len(self._claimed)

    async def open(self) -> None:
        """Create missing consumer groups and start reading. Raises redis-py's errors."""
        await self._group.declare(self._group.streams)
        await self._heartbeats.sign_on()
        self._group.healthy = True
        self._start_reading(self._group.streams)
        self._heartbeats.start_sign_on()

    async def add(self, streams: Sequence[str]) -> None:
        """Read these streams too, if they are new. Raises redis-py's errors."""
        new = [stream for stream in streams if stream not in self._group.streams]
        if self._heartbeats.running and not self._ready.closing:
            await self._group.declare(new)
            self._start_reading(new)
        self._group.streams += new

    def _start_reading(self, streams: Sequence[str]) -> None:
        for group in self._server.read_groups(list(streams)):
            self._reader.start(group)
            self._heartbeats.start(group)

    async def read(self) -> QueueItem:
        """Wait for the next item. While no caller waits, at most one read's worth of items is taken from the server."""
        return await self._ready.read()

    async def read_ready(self) -> list[QueueItem]:
        """Wait for the next item; return it and all others that are ready."""
        first = await self._ready.read()
        return [first, *self._ready.read_ready()]

    async def finish(self, items: Sequence[QueueItem], *, again: Callable[[], Awaitable[None]] | None = None) -> None:
        """Acknowledge and delete the items that this worker still owns. Retries until the server accepts it.

        ``again`` writes the items' results once more and is awaited before each retry: after a fail-over the server may
        have lost the results and still have the items.
        """
        await self._writes.finish(items, again=again)

    def release(self, items: Sequence[QueueItem]) -> None:
        """Stop keeping these items alive; another worker claims them once they have been idle for ``idle_s``."""
        self._claimed.release(items)

    async def hand_back(self, items: Sequence[QueueItem]) -> None:
        """Return items that were not begun, for another worker to take within one beat. Retries until the server
        accepts it.
        """
        await self._writes.hand_back(items)

    async def requeue(self, items: Sequence[QueueItem]) -> None:
        """Move items that were not begun to the end of their queues. Retries until the server accepts it."""
        await self._writes.requeue(items)

    async def mark(self, item: QueueItem, *, begun: bool) -> bool:
        """Record whether work on the item has begun. Returns False if another worker owns the item: then the work must
        not begin. Retries until the server accepts it.

        If this worker is lost after that, the next one gets the item with `QueueItem.begun`. If this worker is lost
        while the item is marked as not begun, the next one gets it as if it was never delivered; without any mark, the
        next one sees one delivery more.
        """
        return await self._writes.mark(item, begun=begun)

    def has_begun(self, item: QueueItem) -> bool:
        """Whether work on the item has begun, here or by an earlier worker."""
        return self._claimed.has_begun(item)

    async def discard(self, items: Sequence[QueueItem]) -> None:
        """Return items of a fair queue that were not begun to wait for their turn. Retries until the server accepts
        it.
        """
        await self._writes.discard(items)

    async def stop_reading(self) -> None:
        """Stop taking items; return those that `read` has not handed out and that no earlier worker had begun. Held
        items stay alive.
        """
        self._ready.close()
        await self._reader.stop()
        waiting = self._ready.read_ready()
        self.release([item for item in waiting if item.begun])
        waiting = [item for item in waiting if not item.begun]
        try:
            await self._writes.put_back(waiting, in_front=True)
        except (RedisError, OSError) as e:
            log.warning("queue %s: %d items left to be claimed: %s", self._group.name, len(waiting), e)

    async def close(self, *, used: Callable[[QueueItem], bool] = lambda item: False) -> None:
        """Stop completely. Held items that have not begun and are not ``used`` are returned; the others are left for
        another worker to claim.

        Removes the consumer if it holds nothing.
        """
        if not self._ready.closing:
            await self.stop_reading()
        await self._heartbeats.stop()
        try:
            unused = [item for item in self._claimed.all if not self.has_begun(item) and not used(item)]
            await self._writes.put_back(unused, in_front=True)
            await self._writes.retire(self._group.streams)
            await self._heartbeats.sign_off()
        except (RedisError, OSError) as e:
            log.warning("queue %s: consumer not removed, a later sweep removes it: %s", self._group.name, e)
