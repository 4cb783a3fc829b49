"""Work queue: competing consumers for long, independent items, at-least-once delivery.

Each worker reads under its own consumer name. It claims its items again every ``beat_s`` to keep them alive, and claims
items that no worker has kept alive for ``idle_s``. The earlier worker of a claimed item may be a zombie that still
runs, so the effects of an item must be fenced (guarantee 4 of design.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from redis.exceptions import RedisError, ResponseError

from tokenbus.bus import scripts
from tokenbus.bus.backlog import Backlog
from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import IDLE_S, Defects, Liveness, beat, rest, wait_briefly
from tokenbus.bus.scripts.order import Entries, put_back, reclaim, take
from tokenbus.bus.scripts.work_queue import HANDED_BACK_MS
from tokenbus.bus.server.retry import FIRST_PAUSE_S, LONGEST_PAUSE_S, retry_until_available
from tokenbus.bus.server.run_scripts import run_script, run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import Fields
from tokenbus.bus.unreadable import may_be_an_entry, names_in, never_arrived, why_unreadable

log = logging.getLogger(__name__)

BLOCK_MS = 500
"""Block time of a read. A read is never cancelled, because the server may already have assigned an item to it; a
shutdown waits at most this long.
"""
LOOK_S = 0.1
"""Poll interval of a worker that takes only what no other worker wants."""
ADOPTED_S = 5.0
"""How long a worker reads a stream that it does not prefer and that no other worker reads."""
LOOK_AHEAD_S = 0.02
"""Poll interval for urgent items while the worker takes no others."""
SWEEP_S = 60.0
DEAD_CONSUMER_MS = 600_000


class QueueItem(msgspec.Struct, frozen=True, eq=False):
    """One entry that this worker holds."""

    stream: str
    entry_id: str
    fields: Fields
    deliveries: int
    """Number of deliveries, including this one; above 1 an earlier worker was lost after it had begun the item."""


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
        - ``fair``: tenants take turns while items wait (scripts/order.py); None: items come in stream order.
        - ``urgent`` is called with each new item of a fair queue when it is read, even if no caller waits in `read`. It
          returns True if it has handled the item, which then does not wait for its turn.
        - ``unreadable`` is awaited with an item that breaks every connection on which it is read. The values of its
          fields are empty. The item is finished afterwards. It may be awaited more than once for the same item.
        - ``keys``: of queues by partition, whose fields are named by runs: knows where the runs of held items are.
        """
        self._server = server
        self._group = group
        self._streams = list(streams)
        self._worker = worker
        self._on_claimed_away = on_claimed_away
        self._count = count
        self._idle_only = idle_only
        self._prefers = prefers
        self._adopted: dict[str, float] = {}
        """Stream that is not preferred, but whose items no other worker took at once -> until when it is read with the
        preferred ones.
        """
        self._look_at_others = 0.0
        self._fair: Entries | None = fair
        self._urgent = urgent
        self._unreadable = unreadable
        self._idle_s = idle_s
        self._beat_s = beat_s
        self._members = members
        self._keys = keys
        self._liveness = liveness or Liveness()
        self._claimed: dict[tuple[str, str], QueueItem] = {}
        self._ready: asyncio.Queue[QueueItem] = asyncio.Queue()
        self._wanted = 0
        """Callers waiting in `read`."""
        self._demand = asyncio.Event()
        """Set if more callers wait in `read` than items are ready, or on shutdown."""
        self._cursors = dict.fromkeys(self._streams, "-" if fair else "0-0")
        self._readers: list[asyncio.Task[None]] = []
        self._beats: list[asyncio.Task[None]] = []
        """One heartbeat per group of streams, because in a Cluster the groups lie on different nodes."""
        self._closing = False
        self._healthy = False

    @property
    def healthy(self) -> bool:
        """Whether the last command reached the server."""
        return self._healthy

    @property
    def claimed(self) -> int:
        """Number of items that this worker holds."""
        return len(self._claimed)

    async def open(self) -> None:
        """Create missing consumer groups and start reading. Raises redis-py's errors."""
        await self._declare(self._streams)
        await self._sign_on()
        self._healthy = True
        self._start_reading(self._streams)
        self._beats.append(self._liveness.start(self._at_each_beat(self._sign_on), name=f"sign-on {self._group}"))

    async def add(self, streams: Sequence[str]) -> None:
        """Read these streams too, if they are new. Raises redis-py's errors."""
        new = [stream for stream in streams if stream not in self._streams]
        if self._beats and not self._closing:
            await self._declare(new)
            self._start_reading(new)
        self._cursors |= dict.fromkeys(new, "-" if self._fair else "0-0")
        self._streams += new

    def _start_reading(self, streams: list[str]) -> None:
        groups = self._server.read_groups(streams)
        start, group = self._liveness.start, self._group
        self._readers += [start(self._read_loop(g), name=f"queue {group}") for g in groups]
        self._beats += [start(self._keep_alive(g), name=f"heartbeat {group}") for g in groups]

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
        items = [await self.read()]
        while not self._ready.empty():
            items.append(self._ready.get_nowait())
        return items

    async def finish(self, items: Sequence[QueueItem], *, again: Callable[[], Awaitable[None]] | None = None) -> None:
        """Acknowledge and delete the items that this worker still owns. Retries until the server accepts it.

        ``again`` writes the items' results once more and is awaited before each retry: after a fail-over the server may
        have lost the results and still have the items.
        """
        calls = [
            scripts.finish(stream, group=self._group, consumer=self._worker, ids=ids)
            for stream, ids in self._release(items).items()
        ]
        tried = False

        async def once() -> None:
            nonlocal tried
            if tried and again:
                await again()
            tried = True
            await run_scripts(self._server, calls)

        await retry_until_available(self._server, once, what=f"finish of {self._group}")

    def release(self, items: Sequence[QueueItem]) -> None:
        """Stop keeping these items alive; another worker claims them once they have been idle for ``idle_s``."""
        self._release(items)

    async def hand_back(self, items: Sequence[QueueItem]) -> None:
        """Return items that were not begun, for another worker to take within one beat. Retries until the server
        accepts it.
        """
        await retry_until_available(self._server, lambda: self._hand_back(items), what=f"hand-back of {self._group}")

    async def _hand_back(self, items: Sequence[QueueItem]) -> None:
        await self._put_back(items, in_front=True)

    async def discard(self, items: Sequence[QueueItem]) -> None:
        """Return items of a fair queue that were not begun to wait for their turn. Retries until the server accepts
        it.
        """
        await retry_until_available(
            self._server, lambda: self._put_back(items, in_front=False), what=f"items passed over in {self._group}"
        )

    async def _put_back(self, items: Sequence[QueueItem], *, in_front: bool) -> None:
        group, consumer, fair = self._group, self._worker, self._fair
        calls = [
            put_back(stream, fair, group=group, consumer=consumer, ids=ids, in_front=in_front)
            if fair
            else scripts.hand_back(stream, group=group, consumer=consumer, ids=ids)
            for stream, ids in self._release(items).items()
        ]
        await run_scripts(self._server, calls)

    async def requeue(self, items: Sequence[QueueItem]) -> None:
        """Move items that were not begun to the end of their queues. Retries until the server accepts it."""
        calls = [
            scripts.requeue(stream, group=self._group, consumer=self._worker, ids=ids)
            for stream, ids in self._release(items).items()
        ]
        await retry_until_available(
            self._server, lambda: run_scripts(self._server, calls), what=f"requeue of {self._group}"
        )

    async def mark(self, item: QueueItem, *, begun: bool) -> bool:
        """Record whether work on the item has begun; initially it counts as begun.

        If this worker dies before the work has begun, the next worker gets the item as if it was never delivered.
        Returns False if another worker owns the item. Retries until the server accepts it.
        """
        call = scripts.mark(item.stream, group=self._group, consumer=self._worker, entry=item.entry_id, begun=begun)
        return bool(
            await retry_until_available(
                self._server, lambda: run_script(self._server, call), what=f"mark of {self._group}"
            )
        )

    async def stop_reading(self) -> None:
        """Stop taking items; return those that `read` has not handed out. Held items stay alive."""
        self._closing = True
        self._demand.set()
        await asyncio.gather(*self._readers, return_exceptions=True)
        waiting: list[QueueItem] = []
        while not self._ready.empty():
            waiting.append(self._ready.get_nowait())
        try:
            await self._hand_back(waiting)
        except (RedisError, OSError) as e:
            log.warning("queue %s: %d items left to be claimed: %s", self._group, len(waiting), e)

    async def close(self, *, begun: Callable[[QueueItem], bool] = lambda item: True) -> None:
        """Stop completely. Held items that are not ``begun`` are returned; the others are left for another worker to
        claim.

        Removes the consumer if it holds nothing.
        """
        if not self._closing:
            await self.stop_reading()
        for task in self._beats:
            task.cancel()
        await asyncio.gather(*self._beats, return_exceptions=True)
        try:
            await self._hand_back([item for item in self._claimed.values() if not begun(item)])
            await run_scripts(
                self._server, [scripts.retire(s, group=self._group, consumer=self._worker) for s in self._streams]
            )
            if self._members:
                await self._server.client.zrem(self._members, self._worker)
        except (RedisError, OSError) as e:
            log.warning("queue %s: consumer left to be swept away: %s", self._group, e)

    def _release(self, items: Sequence[QueueItem]) -> dict[str, list[str]]:
        by_stream: defaultdict[str, list[str]] = defaultdict(list)
        for item in items:
            self._drop((item.stream, item.entry_id))
            by_stream[item.stream].append(item.entry_id)
        return by_stream

    def _drop(self, key: tuple[str, str]) -> QueueItem | None:
        item = self._claimed.pop(key, None)
        if item and self._keys:
            self._keys.release(_runs_of(item))
        return item

    # --- reading: only on demand --------------------------------------------------------------------------------

    def _look_at_demand(self) -> None:
        if self._closing or self._wanted > self._ready.qsize():
            self._demand.set()
        else:
            self._demand.clear()

    async def _read_loop(self, streams: list[str]) -> None:
        clock = asyncio.get_running_loop().time
        claim_at, pause = 0.0, FIRST_PAUSE_S
        trust_at = 0.0  # from then on an idle item means a dead worker
        backlog = Backlog()
        defects = Defects()
        while True:
            wanted = await self._until_wanted()
            if self._closing or self._liveness.failed:
                return
            try:
                if not wanted:
                    await self._claim_by_turn(streams, backlog, count=0)
                    continue
                if clock() >= claim_at:
                    if await self._claim(streams, backlog, trusted=clock() >= trust_at):
                        continue  # there may be more
                    claim_at = clock() + self._beat_s
                began = clock()
                if not (self._fair and backlog.deep and await self._claim_by_turn(streams, backlog, count=self._count)):
                    backlog.read(await self._read_new(streams))
                self._healthy, pause = True, FIRST_PAUSE_S
                defects.none()
                if clock() - began > BLOCK_MS / 1000 + self._idle_s / 2:  # the server or this worker stalled
                    trust_at = clock() + self._idle_s
            except Exception as e:  # any other kind is a defect and must not end the loop silently
                # No heartbeat got through during the outage; give every worker time for one before treating it as dead.
                trust_at = clock() + self._idle_s
                await self._recover(e, pause)
                await self._quarantine(streams, e)
                defects.count(e)
                pause = min(pause * 2, LONGEST_PAUSE_S)

    async def _quarantine(self, streams: list[str], error: Exception) -> None:
        """Finish entries that break each read, and return the entries of the same reads to the queue."""
        try:
            if not await may_be_an_entry(self._server, error):
                return
            group, consumer = self._group, self._worker
            for stream in streams:
                for entry_id, deliveries in await never_arrived(
                    self._server, stream, group=group, consumer=consumer, held=self._claimed
                ):
                    item = QueueItem(stream, entry_id, {}, deliveries)
                    if not (why := await why_unreadable(self._server, stream, entry_id)):
                        await self.hand_back([item])
                        continue
                    names = await names_in(self._server, stream, entry_id)
                    log.error("queue %s: entry %s of %s cannot be read: %s", group, entry_id, stream, why)
                    await self._give_up(msgspec.structs.replace(item, fields=dict.fromkeys(names, b"")), why)
                    await self.finish([item])
        except (RedisError, OSError) as e:
            log.warning("queue %s: %s", self._group, e)

    async def _give_up(self, item: QueueItem, why: Exception) -> None:
        """Pass on an item that cannot be read. A defect there must not end one worker after the other at this item."""
        if not self._unreadable:
            return
        try:
            await self._unreadable(item, why)
        except (RedisError, OSError):
            raise
        except Exception:
            log.exception("queue %s: entry %s of %s is dropped", self._group, item.entry_id, item.stream)
            self._liveness.failed_work(f"unreadable {self._group}")

    async def _until_wanted(self) -> bool:
        """Wait until an item is wanted or the queue closes: True. False: time to look for urgent items."""
        while not await wait_briefly(self._demand, timeout_s=LOOK_AHEAD_S if self._urgent else IDLE_S):
            if self._urgent:
                return False
        return True

    async def _claim_by_turn(self, streams: list[str], backlog: Backlog, *, count: int) -> int:
        """Put all new items in order and take those whose turn it is; return how many were taken."""
        waiting = dict.fromkeys(streams, 0)
        taken, unread = 0, streams
        while unread and not self._closing:
            group, consumer = self._group, self._worker
            calls = [take(s, self._fair or "turns", group=group, consumer=consumer, count=count) for s in unread]
            replies = await run_scripts(self._server, calls)
            mistaken: list[QueueItem] = []
            for stream, (left, _, urgent, items) in zip(unread, replies, strict=True):
                waiting[stream] = left
                taken += len(items)
                for each in items:
                    self._claim_items(_queue_item(stream, *each))
                for each in urgent:
                    item = _queue_item(stream, *each)
                    self._claimed[(item.stream, item.entry_id)] = item
                    if not (self._urgent and self._urgent(item)):
                        mistaken.append(item)
            if mistaken:
                await self.discard(mistaken)
            backlog.left(sum(waiting.values()) + len(mistaken))
            unread = [s for s, (_, more, _, _) in zip(unread, replies, strict=True) if more]
            count = 0
        return taken

    async def _read_new(self, streams: list[str]) -> float:
        """Read new items; return how many ms the oldest of them had waited."""
        patient = self._idle_only()
        block = None if patient else BLOCK_MS
        if self._prefers and not patient:
            now = asyncio.get_running_loop().time()
            ours = [s for s in streams if self._prefers(s) or self._adopted.get(s, 0.0) > now]
            if len(ours) < len(streams):
                return await self._read_preferred(ours, [s for s in streams if s not in ours])
        waited = await self._read_streams(streams, block)
        if patient and not waited:
            await asyncio.sleep(LOOK_S)
        return max(waited.values(), default=0.0)

    async def _read_preferred(self, ours: list[str], others: list[str]) -> float:
        """Read `ours`; of `others` take what no worker took at once. Return as `_read_new` does."""
        clock = asyncio.get_running_loop().time
        waited: dict[str, float] = {}
        if ours:
            waited = await self._read_streams(ours, round(LOOK_S * 1000))
        else:
            await asyncio.sleep(LOOK_S)
        if clock() >= self._look_at_others and not self._closing:
            self._look_at_others = clock() + LOOK_S
            left = await self._read_streams(others, None)
            # No worker waits for these at all: from here on this one does, too.
            self._adopted |= {s: clock() + ADOPTED_S for s, ms in left.items() if ms >= LOOK_S * 500}
            waited |= left
        return max(waited.values(), default=0.0)

    async def _read_streams(self, streams: list[str], block: int | None) -> dict[str, float]:
        """Read new items; return by stream how many ms the oldest of them had waited."""
        now_ms = self._server.clock.now_ms()
        found: Any = await self._server.client.xreadgroup(
            self._group, self._worker, dict.fromkeys(streams, ">"), count=self._count, block=block
        )
        waited: dict[str, float] = {}
        for name, entries in found or ():
            for entry_id, fields in entries:
                self._claim_items(QueueItem(name.decode(), entry_id.decode(), fields, 1))
            begun_ms = self._server.clock.ms_of(int(entries[0][0].partition(b"-")[0]))
            waited[name.decode()] = max(0.0, now_ms - begun_ms)
        return waited

    async def _claim(self, streams: list[str], backlog: Backlog, *, trusted: bool) -> bool:
        """Claim items that were handed back or, if ``trusted``, idle. False if there were none."""
        group, consumer, fair = self._group, self._worker, self._fair
        idle_ms = round(self._idle_s * 1000) if trusted else HANDED_BACK_MS
        calls: list[scripts.ScriptCall] = []
        for s in streams:
            start, most = self._cursors[s], self._count
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
                item = _queue_item(stream, *each)
                if (item.stream, item.entry_id) not in self._claimed:  # else it is our own, after a long pause
                    self._claim_items(item)
                    taken += 1
        if waiting:
            backlog.left(waiting)
        return taken > 0

    def _claim_items(self, item: QueueItem) -> None:
        if self._keys:
            self._keys.hold(_runs_of(item), item.stream)
        self._claimed[(item.stream, item.entry_id)] = item
        if self._urgent and item.deliveries == 1 and self._urgent(item):
            return
        self._ready.put_nowait(item)
        self._look_at_demand()

    # --- keeping alive --------------------------------------------------------------------------------------------

    async def _keep_alive(self, streams: list[str]) -> None:
        clock = asyncio.get_running_loop().time
        sweep_at = clock()

        async def keep() -> None:
            nonlocal sweep_at
            await self._beat(streams)
            if clock() >= sweep_at:
                sweep_at = clock() + SWEEP_S
                await self._sweep(streams)

        await self._at_each_beat(keep)

    async def _at_each_beat(self, do: Callable[[], Awaitable[None]]) -> None:
        defects = Defects()
        while True:
            await rest(self._beat_s)
            if self._liveness.failed:
                return
            try:
                await do()
                defects.none()
            except (RedisError, OSError) as e:
                await self._recover(e, FIRST_PAUSE_S)
            except Exception as e:
                log.exception("heartbeat of %s", self._group)
                defects.count(e)

    async def _sign_on(self) -> None:
        if self._members:
            call = scripts.present(self._members, member=self._worker, ttl_ms=round(self._idle_s * 1000))
            await run_script(self._server, call)

    async def _beat(self, streams: list[str]) -> None:
        by_stream: defaultdict[str, list[str]] = defaultdict(list)
        for stream, entry_id in self._claimed:
            if stream in streams:
                by_stream[stream].append(entry_id)
        calls = [
            scripts.heartbeat(stream, group=self._group, consumer=self._worker, ids=ids)
            for stream, ids in by_stream.items()
        ]
        for stream, lost in zip(by_stream, await run_scripts(self._server, calls), strict=True):
            for entry_id in lost:
                if item := self._drop((stream, entry_id.decode())):
                    self._on_claimed_away(item)

    async def _sweep(self, streams: list[str]) -> None:
        """Remove consumers that died long ago and hold nothing, so that their number stays bounded."""
        for stream in streams:
            consumers: Any = await self._server.client.xinfo_consumers(stream, self._group)
            dead = [c["name"].decode() for c in consumers if not c["pending"] and c["idle"] > DEAD_CONSUMER_MS]
            await run_scripts(self._server, [scripts.retire(stream, group=self._group, consumer=name) for name in dead])

    # --- errors of the server -----------------------------------------------------------------------------------

    async def _declare(self, streams: Sequence[str]) -> None:
        for stream in streams:
            try:
                await self._server.client.xgroup_create(stream, self._group, id="0-0", mkstream=True)
            except ResponseError as e:
                if "BUSYGROUP" not in str(e):
                    raise

    async def _recover(self, error: Exception, pause: float) -> None:
        if self._healthy:
            defect = None if isinstance(error, RedisError | OSError) else error
            log.log(logging.ERROR if defect else logging.WARNING, "queue %s: %s", self._group, error, exc_info=defect)
        self._healthy = False
        if "NOGROUP" in str(error):  # the stream was deleted, or the server restarted empty
            with suppress(RedisError, OSError):
                await self._declare(self._streams)
        else:
            beat()
            await asyncio.sleep(pause)


def _runs_of(item: QueueItem) -> list[str]:
    return [name.decode(errors="replace") for name in item.fields]


def _queue_item(stream: str, entry_id: bytes, deliveries: int, flat: list[bytes]) -> QueueItem:
    return QueueItem(stream, entry_id.decode(), dict(zip(flat[::2], flat[1::2], strict=True)), deliveries)
