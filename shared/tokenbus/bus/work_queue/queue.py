"""One worker's share of a group's work queues.

Each worker reads under its own consumer name. It claims its items again every ``beat_s`` to keep them alive, and claims
items that no worker has kept alive for ``idle_s``. The earlier worker of a claimed item may be a zombie that still
runs, so the effects of an item must be fenced (guarantee 4 of design.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis.exceptions import RedisError

from tokenbus.bus import scripts
from tokenbus.bus.liveness import rest
from tokenbus.bus.server.retry import FIRST_PAUSE_S, Defects
from tokenbus.bus.server.run_scripts import run_script, run_scripts
from tokenbus.bus.work_queue.consumer import Consumer, QueueItem
from tokenbus.bus.work_queue.reader import QueueReader

log = logging.getLogger(__name__)

SWEEP_S = 60.0
DEAD_CONSUMER_MS = 600_000


class WorkQueue(Consumer):
    """One worker's share of a group's work queues. Call `open`, `read` in a loop, `finish` each item, `close`."""

    _reading: Sequence[asyncio.Task[None]] = ()
    _beating: Sequence[asyncio.Task[None]] = ()
    """In a Cluster one for each group of streams, because they lie on different nodes."""

    async def open(self) -> None:
        """Create missing consumer groups and start reading. Raises redis-py's errors."""
        await self.declare(self.streams)
        await self._sign_on()
        self.healthy = True
        self._start(self.streams)
        sign_on = self._at_each_beat(self._sign_on)
        self._beating = [*self._beating, self.liveness.start(sign_on, name=f"sign-on {self.options.group}")]

    async def add(self, streams: Sequence[str]) -> None:
        """Read these streams too, if they are new. Raises redis-py's errors."""
        new = [stream for stream in streams if stream not in self.streams]
        if self._beating and not self.closing:
            await self.declare(new)
            self._start(new)
        self.streams += new

    def _start(self, streams: Sequence[str]) -> None:
        group, start = self.options.group, self.liveness.start
        for each in self.server.read_groups(list(streams)):
            reader = QueueReader(self, each)
            self._reading = [*self._reading, start(reader.run(), name=f"queue {group}")]
            self._beating = [*self._beating, start(self._keep_alive(each, reader), name=f"heartbeat {group}")]

    async def stop_reading(self) -> None:
        """Stop taking items; return those that `read` has not handed out and that no earlier worker had begun. Held
        items stay alive.
        """
        self.closing = True
        self._look_at_demand()
        await asyncio.gather(*self._reading, return_exceptions=True)
        waiting = self._pop_ready()
        self.release([item for item in waiting if item.begun])
        waiting = [item for item in waiting if not item.begun]
        try:
            await self._put_back(waiting, in_front=True)
        except (RedisError, OSError) as e:
            log.warning("queue %s: %d items left to be claimed: %s", self.options.group, len(waiting), e)

    async def close(self, *, used: Callable[[QueueItem], bool] = lambda item: False) -> None:
        """Stop completely. Held items that have not begun and are not ``used`` are returned; the others are left for
        another worker to claim.

        Removes the consumer if it holds nothing.
        """
        if not self.closing:
            await self.stop_reading()
        for task in self._beating:
            task.cancel()
        await asyncio.gather(*self._beating, return_exceptions=True)
        group, worker = self.options.group, self.options.worker
        try:
            unused = [item for item in self._items.values() if not self.has_begun(item) and not used(item)]
            await self._put_back(unused, in_front=True)
            await run_scripts(self.server, [scripts.retire(s, group=group, consumer=worker) for s in self.streams])
            if self.options.members:
                await self.server.client.zrem(self.options.members, worker)
        except (RedisError, OSError) as e:
            log.warning("queue %s: consumer not removed, a later sweep removes it: %s", group, e)

    # --- heartbeats ---------------------------------------------------------------------------------------------

    async def _sign_on(self) -> None:
        """Write the worker's name among the members. Raises redis-py's errors."""
        if self.options.members:
            ttl_ms = round(self.options.idle_s * 1000)
            call = scripts.present(self.options.members, member=self.options.worker, ttl_ms=ttl_ms)
            await run_script(self.server, call)

    async def _keep_alive(self, streams: list[str], reader: QueueReader) -> None:
        clock = asyncio.get_running_loop().time
        sweep_at = clock()

        async def keep() -> None:
            nonlocal sweep_at
            await self._beat(streams, reader)
            if clock() >= sweep_at:
                sweep_at = clock() + SWEEP_S
                await self._sweep(streams)

        await self._at_each_beat(keep)

    async def _at_each_beat(self, do: Callable[[], Awaitable[None]]) -> None:
        defects = Defects()
        while True:
            await rest(self.options.beat_s)
            if self.liveness.failed:
                return
            try:
                await do()
                defects.none()
            except (RedisError, OSError) as e:
                await self.recover(e, FIRST_PAUSE_S)
            except Exception as e:
                log.exception("heartbeat of %s", self.options.group)
                defects.count(e)

    async def _beat(self, streams: list[str], reader: QueueReader) -> None:
        """Keep the items of these streams alive."""
        by_stream: defaultdict[str, list[str]] = defaultdict(list)
        for stream, entry_id in [*self.places, *await reader.on_their_way()]:
            if stream in streams:
                by_stream[stream].append(entry_id)
        group, worker = self.options.group, self.options.worker
        pages = scripts.pages(by_stream)
        calls = [scripts.heartbeat(s, group=group, consumer=worker, ids=ids) for s, ids in pages]
        for (stream, _), lost in zip(pages, await run_scripts(self.server, calls), strict=True):
            for entry_id in lost:
                if item := self.drop(stream, entry_id.decode()):
                    self.options.on_claimed_away(item)

    async def _sweep(self, streams: list[str]) -> None:
        """Remove consumers that died long ago and hold nothing, so that their number stays bounded."""
        group = self.options.group
        for stream in streams:
            consumers: Any = await self.server.client.xinfo_consumers(stream, group)
            dead = [c["name"].decode() for c in consumers if not c["pending"] and c["idle"] > DEAD_CONSUMER_MS]
            await run_scripts(self.server, [scripts.retire(stream, group=group, consumer=name) for name in dead])
