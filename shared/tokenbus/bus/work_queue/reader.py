"""Take items from the server while callers want some: new ones, ones handed back, ones whose worker died."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from redis.exceptions import RedisError

from tokenbus.bus import scripts
from tokenbus.bus.scripts.fair_order import reclaim, take
from tokenbus.bus.scripts.work_queue import HANDED_BACK_MS
from tokenbus.bus.server.error_replies import ValueTooLarge
from tokenbus.bus.server.retry import FIRST_PAUSE_S, LONGEST_PAUSE_S, Defects
from tokenbus.bus.server.run_scripts import run_scripts
from tokenbus.bus.unreadable import BROKEN_DELIVERIES, may_be_an_entry, names_in, never_arrived, why_unreadable
from tokenbus.bus.work_queue.consumer import Consumer, QueueItem, queue_item

log = logging.getLogger(__name__)

BLOCK_MS = 500
"""Block time of a read. A read is never cancelled, because the server may already have assigned an item to it; a
shutdown waits at most this long.
"""
LONG_MS = 20
"""If an item waited this long before its read began, items arrive faster than they are processed."""
LOOK_S = 0.1
"""Poll interval of a worker that takes only what no other worker wants."""
LONG_READ_S = 1.0
"""From then on a read brings more than usual. The longest wait for an item is `BLOCK_MS`."""
ADOPTED_S = 5.0
"""How long a worker reads a stream that it does not prefer and that no other worker reads."""


class QueueReader:
    """Reads streams that can share a command, for one worker's consumer."""

    def __init__(self, consumer: Consumer, streams: Sequence[str]) -> None:
        self._consumer = consumer
        self._options = consumer.options
        self._server = consumer.server
        self._streams = list(streams)
        self._names = {"group": consumer.options.group, "consumer": consumer.options.worker}
        self._deep = False
        """Whether items wait, or may wait, so that a fair queue is read by turn. While nothing waits, a blocking read
        is the cheapest way to get an item, and arrival order is fair. The duration of a read says nothing, because on
        a busy event loop the reply waits too.
        """
        self._cursors: dict[str, str] = {}
        """Stream -> where the search for items of dead workers continues."""
        self._adopted: dict[str, float] = {}
        """Stream that is not preferred, but whose items no other worker took at once -> until when it is read with the
        preferred ones.
        """
        self._look_at_others = 0.0
        self._asked_at: float | None = None
        """When the read began that the server has not answered yet."""

    async def on_their_way(self) -> list[tuple[str, str]]:
        """Stream and id of each item that the server has assigned to this worker in a read whose reply takes long: one
        with a huge entry. They are kept alive like those that it has. Else another worker would claim them before they
        arrive, whose read then takes as long.
        """
        if self._asked_at is None or asyncio.get_running_loop().time() < self._asked_at + LONG_READ_S:
            return []
        held = self._consumer.places
        return [
            (stream, entry_id)
            for stream in self._streams
            for entry_id, _ in await never_arrived(self._server, stream, **self._names, held=held, least=1)
        ]

    @contextmanager
    def _asking(self) -> Generator[None]:
        self._asked_at = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self._asked_at = None

    async def run(self) -> None:
        """Read until the queue closes or its worker fails."""
        consumer, options = self._consumer, self._options
        clock = asyncio.get_running_loop().time
        claim_at, pause = 0.0, FIRST_PAUSE_S
        trust_at = 0.0  # from then on an idle item means a dead worker
        defects = Defects()
        while True:
            wanted = await consumer.wait_for_demand()
            if consumer.closing or consumer.liveness.failed:
                return
            try:
                if not wanted:
                    await self._take_by_turn(count=0)
                    continue
                if clock() >= claim_at:
                    if await self._claim(trusted=clock() >= trust_at):
                        continue  # there may be more
                    claim_at = clock() + options.beat_s
                began = clock()
                if not (options.fair and self._deep and await self._take_by_turn(count=options.count)):
                    self._deep = await self._read_new() >= LONG_MS
                consumer.healthy, pause = True, FIRST_PAUSE_S
                defects.none()
                if clock() - began > BLOCK_MS / 1000 + options.idle_s / 2:  # the server or this worker stalled
                    trust_at = clock() + options.idle_s
            except Exception as e:  # any other kind is a defect and must not end the loop silently
                # No heartbeat got through during the outage; give every worker time for one before treating it as dead.
                trust_at = clock() + options.idle_s
                await consumer.recover(e, pause)
                await self._quarantine(e)
                defects.count(e)
                pause = min(pause * 2, LONGEST_PAUSE_S)

    # --- entries that break each read ---------------------------------------------------------------------------

    async def _quarantine(self, error: Exception) -> None:
        """Finish entries that break each read, and return the entries of the same reads to the queue."""
        group = self._options.group
        try:
            if not await may_be_an_entry(self._server, error):
                return
            least = 1 if isinstance(error, ValueTooLarge) else BROKEN_DELIVERIES
            for stream in self._streams:
                for entry_id, deliveries in await never_arrived(
                    self._server, stream, **self._names, held=self._consumer.places, least=least
                ):
                    item = queue_item(stream, entry_id.encode(), deliveries, [])
                    self._consumer.hold(item)  # else others would look at it at the same time
                    try:
                        await self._look_at(item)
                    finally:
                        self._consumer.drop(stream, entry_id)
        except (RedisError, OSError) as e:
            log.warning("queue %s: %s", group, e)

    async def _look_at(self, item: QueueItem) -> None:
        """Finish an item that cannot be read; hand back one that can be."""
        stream, entry_id = item.key
        if not (why := await why_unreadable(self._server, stream, entry_id)):
            if not item.begun:  # else the next claim must find that it was begun
                await self._consumer.hand_back([item])
            return
        if not await self._consumer.still_has(item):
            return  # this worker was so slow that another one claimed it
        names = await names_in(self._server, stream, entry_id)
        log.error("queue %s: entry %s of %s cannot be read: %s", self._options.group, entry_id, stream, why)
        await self._give_up(msgspec.structs.replace(item, fields=dict.fromkeys(names, b"")), why)
        await self._consumer.finish([item])

    async def _give_up(self, item: QueueItem, why: Exception) -> None:
        """Pass on an item that cannot be read. A defect there must not end one worker after the other at this item."""
        if not self._options.unreadable:
            return
        try:
            await self._options.unreadable(item, why)
        except (RedisError, OSError):
            raise
        except Exception:
            log.exception("queue %s: entry %s of %s is dropped", self._options.group, item.entry_id, item.stream)
            self._consumer.liveness.failed_work(f"unreadable {self._options.group}")

    # --- new items, in stream order or by turn ------------------------------------------------------------------

    async def _take_by_turn(self, *, count: int) -> int:
        """Put all new items in order and take those whose turn it is; return how many were taken."""
        fair, urgent_of = self._options.fair, self._options.urgent
        assert fair
        waiting = dict.fromkeys(self._streams, 0)
        taken, unread = 0, self._streams
        while unread and not self._consumer.closing:
            with self._asking():
                replies = await run_scripts(self._server, [take(s, fair, **self._names, count=count) for s in unread])
            mistaken: list[QueueItem] = []
            for stream, (left, _, urgent, items) in zip(unread, replies, strict=True):
                waiting[stream] = left
                taken += len(items)
                for each in items:
                    self._consumer.take(queue_item(stream, *each))
                for each in urgent:
                    item = queue_item(stream, *each)
                    self._consumer.hold(item)
                    if not (urgent_of and urgent_of(item)):
                        mistaken.append(item)
            if mistaken:
                await self._consumer.discard(mistaken)
            self._deep = bool(sum(waiting.values()) + len(mistaken))
            unread = [s for s, (_, more, _, _) in zip(unread, replies, strict=True) if more]
            count = 0
        return taken

    async def _read_new(self) -> float:
        """Read new items in the order of arrival, each stream as far as this worker prefers it. Returns how many ms the
        oldest of them had waited.
        """
        idle_only, prefers = self._options.idle_only(), self._options.prefers
        clock = asyncio.get_running_loop().time
        if prefers and not idle_only:
            ours = [s for s in self._streams if prefers(s) or self._adopted.get(s, 0.0) > clock()]
            if others := [s for s in self._streams if s not in ours]:
                return await self._read_ours_first(ours, others)
        waited = await self._read_streams(self._streams, None if idle_only else BLOCK_MS)
        if idle_only and not waited:
            await asyncio.sleep(LOOK_S)
        return max(waited.values(), default=0.0)

    async def _read_ours_first(self, ours: list[str], others: list[str]) -> float:
        """Read ``ours``; from ``others`` take only items that no other worker takes at once."""
        clock = asyncio.get_running_loop().time
        waited: dict[str, float] = {}
        if ours:
            waited = await self._read_streams(ours, round(LOOK_S * 1000))
        else:
            await asyncio.sleep(LOOK_S)
        if clock() >= self._look_at_others and not self._consumer.closing:
            self._look_at_others = clock() + LOOK_S
            left = await self._read_streams(others, None)
            # No worker waits for these at all: from here on this one does, too.
            self._adopted |= {s: clock() + ADOPTED_S for s, ms in left.items() if ms >= LOOK_S * 500}
            waited |= left
        return max(waited.values(), default=0.0)

    async def _read_streams(self, streams: list[str], block_ms: int | None) -> dict[str, float]:
        """Read new items; return by stream how many ms the oldest of them had waited."""
        now_ms = self._server.clock.now_ms()
        with self._asking():
            found: Any = await self._server.client.xreadgroup(
                *self._names.values(), dict.fromkeys(streams, ">"), count=self._options.count, block=block_ms
            )
        waited: dict[str, float] = {}
        for name, entries in found or ():
            for entry_id, fields in entries:
                self._consumer.take(QueueItem(name.decode(), entry_id.decode(), fields, 1))
            begun_ms = self._server.clock.ms_of(int(entries[0][0].partition(b"-")[0]))
            waited[name.decode()] = max(0.0, now_ms - begun_ms)
        return waited

    # --- items of others ----------------------------------------------------------------------------------------

    async def _claim(self, *, trusted: bool) -> bool:
        """Claim items that were handed back or, if ``trusted``, idle. False if there were none."""
        fair, count = self._options.fair, self._options.count
        idle_ms = round(self._options.idle_s * 1000) if trusted else HANDED_BACK_MS
        calls = [
            reclaim(s, fair, **self._names, idle_ms=idle_ms, start=self._cursors.get(s, "-"), count=count)
            if fair
            else scripts.claim(s, **self._names, idle_ms=idle_ms, start=self._cursors.get(s, "0-0"), count=count)
            for s in self._streams
        ]
        taken = waiting = 0
        with self._asking():
            replies = await run_scripts(self._server, calls)
        for stream, (cursor, *left, entries) in zip(self._streams, replies, strict=True):
            self._cursors[stream] = cursor.decode()
            waiting += sum(left)
            for each in entries:
                item = queue_item(stream, *each)
                if item not in self._consumer:  # else it is our own, after a long pause
                    self._consumer.take(item)
                    taken += 1
        self._deep = self._deep or waiting > 0
        return taken > 0
