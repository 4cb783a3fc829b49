"""Take items from the server while callers want some: new ones, ones handed back, ones whose worker died."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from redis.exceptions import RedisError

from tokenbus.bus import scripts
from tokenbus.bus.backlog import Backlog
from tokenbus.bus.liveness import IDLE_S, Defects, Liveness
from tokenbus.bus.scripts.fair_order import Entries, reclaim, take
from tokenbus.bus.scripts.work_queue import HANDED_BACK_MS
from tokenbus.bus.server.retry import FIRST_PAUSE_S, LONGEST_PAUSE_S
from tokenbus.bus.server.run_scripts import run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.bus.unreadable import may_be_an_entry, names_in, never_arrived, why_unreadable
from tokenbus.bus.work_queue.consumer_group import ConsumerGroup
from tokenbus.bus.work_queue.item_writes import ItemWrites
from tokenbus.bus.work_queue.items import ClaimedItems, QueueItem, ReadyItems, queue_item
from tokenbus.bus.work_queue.preferred import PreferredStreams

log = logging.getLogger(__name__)

BLOCK_MS = 500
"""Block time of a read. A read is never cancelled, because the server may already have assigned an item to it; a
shutdown waits at most this long.
"""
LOOK_AHEAD_S = 0.02
"""Poll interval for urgent items while the worker takes no others."""


class QueueReader:
    """Reads the streams of one worker; one loop for each group of streams that can share a command."""

    def __init__(
        self,
        server: Server,
        group: ConsumerGroup,
        claimed: ClaimedItems,
        ready: ReadyItems,
        writes: ItemWrites,
        *,
        count: int,
        idle_s: float,
        beat_s: float,
        fair: Entries | None,
        preferred: PreferredStreams,
        urgent: Callable[[QueueItem], bool] | None,
        unreadable: Callable[[QueueItem, Exception], Awaitable[None]] | None,
        liveness: Liveness,
    ) -> None:
        """See `WorkQueue`."""
        self._server = server
        self._group = group
        self._claimed = claimed
        self._ready = ready
        self._writes = writes
        self._count = count
        self._idle_s = idle_s
        self._beat_s = beat_s
        self._fair: Entries | None = fair
        self._preferred = preferred
        self._urgent = urgent
        self._unreadable = unreadable
        self._liveness = liveness
        self._cursors: dict[str, str] = {}
        """Stream -> where the search for items of dead workers continues."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, streams: list[str]) -> None:
        """Read these streams from now on."""
        self._tasks.append(self._liveness.start(self._read_loop(streams), name=f"queue {self._group.name}"))

    async def stop(self) -> None:
        """Wait until the loops have ended; close `ReadyItems` before."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read_loop(self, streams: list[str]) -> None:
        clock = asyncio.get_running_loop().time
        claim_at, pause = 0.0, FIRST_PAUSE_S
        trust_at = 0.0  # from then on an idle item means a dead worker
        backlog = Backlog()
        defects = Defects()
        while True:
            wanted = await self._until_wanted()
            if self._ready.closing or self._liveness.failed:
                return
            try:
                if not wanted:
                    await self._take_by_turn(streams, backlog, count=0)
                    continue
                if clock() >= claim_at:
                    if await self._claim(streams, backlog, trusted=clock() >= trust_at):
                        continue  # there may be more
                    claim_at = clock() + self._beat_s
                began = clock()
                if not (self._fair and backlog.deep and await self._take_by_turn(streams, backlog, count=self._count)):
                    backlog.read(await self._read_new(streams))
                self._group.healthy, pause = True, FIRST_PAUSE_S
                defects.none()
                if clock() - began > BLOCK_MS / 1000 + self._idle_s / 2:  # the server or this worker stalled
                    trust_at = clock() + self._idle_s
            except Exception as e:  # any other kind is a defect and must not end the loop silently
                # No heartbeat got through during the outage; give every worker time for one before treating it as dead.
                trust_at = clock() + self._idle_s
                await self._group.recover(e, pause)
                await self._quarantine(streams, e)
                defects.count(e)
                pause = min(pause * 2, LONGEST_PAUSE_S)

    async def _until_wanted(self) -> bool:
        """Wait until an item is wanted or the queue closes: True. False: time to look for urgent items."""
        while not await self._ready.wait_for_demand(LOOK_AHEAD_S if self._urgent else IDLE_S):
            if self._urgent:
                return False
        return True

    # --- entries that break each read ---------------------------------------------------------------------------

    async def _quarantine(self, streams: list[str], error: Exception) -> None:
        """Finish entries that break each read, and return the entries of the same reads to the queue."""
        try:
            if not await may_be_an_entry(self._server, error):
                return
            group, consumer = self._group.name, self._group.consumer
            for stream in streams:
                for entry_id, deliveries in await never_arrived(
                    self._server, stream, group=group, consumer=consumer, held=self._claimed.places
                ):
                    item = queue_item(stream, entry_id.encode(), deliveries, [])
                    if not (why := await why_unreadable(self._server, stream, entry_id)):
                        if not item.begun:  # else the next claim must find that it was begun
                            await self._writes.hand_back([item])
                        continue
                    names = await names_in(self._server, stream, entry_id)
                    log.error("queue %s: entry %s of %s cannot be read: %s", group, entry_id, stream, why)
                    await self._give_up(msgspec.structs.replace(item, fields=dict.fromkeys(names, b"")), why)
                    await self._writes.finish([item])
        except (RedisError, OSError) as e:
            log.warning("queue %s: %s", self._group.name, e)

    async def _give_up(self, item: QueueItem, why: Exception) -> None:
        """Pass on an item that cannot be read. A defect there must not end one worker after the other at this item."""
        if not self._unreadable:
            return
        try:
            await self._unreadable(item, why)
        except (RedisError, OSError):
            raise
        except Exception:
            log.exception("queue %s: entry %s of %s is dropped", self._group.name, item.entry_id, item.stream)
            self._liveness.failed_work(f"unreadable {self._group.name}")

    # --- new items, in stream order or by turn ------------------------------------------------------------------

    async def _take_by_turn(self, streams: list[str], backlog: Backlog, *, count: int) -> int:
        """Put all new items in order and take those whose turn it is; return how many were taken."""
        waiting = dict.fromkeys(streams, 0)
        taken, unread = 0, streams
        while unread and not self._ready.closing:
            group, consumer = self._group.name, self._group.consumer
            calls = [take(s, self._fair or "turns", group=group, consumer=consumer, count=count) for s in unread]
            replies = await run_scripts(self._server, calls)
            mistaken: list[QueueItem] = []
            for stream, (left, _, urgent, items) in zip(unread, replies, strict=True):
                waiting[stream] = left
                taken += len(items)
                for each in items:
                    self._claim_item(queue_item(stream, *each))
                for each in urgent:
                    item = queue_item(stream, *each)
                    self._claimed.add_urgent(item)
                    if not (self._urgent and self._urgent(item)):
                        mistaken.append(item)
            if mistaken:
                await self._writes.discard(mistaken)
            backlog.left(sum(waiting.values()) + len(mistaken))
            unread = [s for s, (_, more, _, _) in zip(unread, replies, strict=True) if more]
            count = 0
        return taken

    async def _read_new(self, streams: list[str]) -> float:
        """Read new items; return how many ms the oldest of them had waited."""
        waited = await self._preferred.read(streams, self._read_streams, BLOCK_MS, closing=lambda: self._ready.closing)
        return max(waited.values(), default=0.0)

    async def _read_streams(self, streams: list[str], block_ms: int | None) -> dict[str, float]:
        """Read new items; return by stream how many ms the oldest of them had waited."""
        now_ms = self._server.clock.now_ms()
        found: Any = await self._server.client.xreadgroup(
            self._group.name, self._group.consumer, dict.fromkeys(streams, ">"), count=self._count, block=block_ms
        )
        waited: dict[str, float] = {}
        for name, entries in found or ():
            for entry_id, fields in entries:
                self._claim_item(QueueItem(name.decode(), entry_id.decode(), fields, 1))
            begun_ms = self._server.clock.ms_of(int(entries[0][0].partition(b"-")[0]))
            waited[name.decode()] = max(0.0, now_ms - begun_ms)
        return waited

    # --- items of others ----------------------------------------------------------------------------------------

    async def _claim(self, streams: list[str], backlog: Backlog, *, trusted: bool) -> bool:
        """Claim items that were handed back or, if ``trusted``, idle. False if there were none."""
        group, consumer, fair = self._group.name, self._group.consumer, self._fair
        idle_ms = round(self._idle_s * 1000) if trusted else HANDED_BACK_MS
        calls: list[scripts.ScriptCall] = []
        for s in streams:
            start, most = self._cursors.get(s, "-" if fair else "0-0"), self._count
            if fair:
                call = reclaim(s, fair, group=group, consumer=consumer, idle_ms=idle_ms, start=start, count=most)
            else:
                call = scripts.claim(s, group=group, consumer=consumer, idle_ms=idle_ms, start=start, count=most)
            calls.append(call)
        taken = waiting = 0
        for stream, (cursor, *left, entries) in zip(streams, await run_scripts(self._server, calls), strict=True):
            self._cursors[stream] = cursor.decode()
            waiting += sum(left)
            for each in entries:
                item = queue_item(stream, *each)
                if item not in self._claimed:  # else it is our own, after a long pause
                    self._claim_item(item)
                    taken += 1
        if waiting:
            backlog.left(waiting)
        return taken > 0

    def _claim_item(self, item: QueueItem) -> None:
        self._claimed.add(item)
        if self._urgent and item.deliveries == 1 and self._urgent(item):
            return
        self._ready.put(item)
