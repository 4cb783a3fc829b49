"""Keep a worker's items alive, and its name among the members; remove consumers that died long ago."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

from redis.exceptions import RedisError

from tokenbus.bus import scripts
from tokenbus.bus.liveness import Defects, Liveness, rest
from tokenbus.bus.server.retry import FIRST_PAUSE_S
from tokenbus.bus.server.run_scripts import run_script, run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.bus.work_queue.consumer_group import ConsumerGroup
from tokenbus.bus.work_queue.items import ClaimedItems, QueueItem

log = logging.getLogger(__name__)

SWEEP_S = 60.0
DEAD_CONSUMER_MS = 600_000


class Heartbeats:
    """The heartbeats of one worker, one for each group of streams, because in a Cluster they lie on different nodes."""

    def __init__(
        self,
        server: Server,
        group: ConsumerGroup,
        claimed: ClaimedItems,
        *,
        idle_s: float,
        beat_s: float,
        members: str | None,
        on_claimed_away: Callable[[QueueItem], None],
        liveness: Liveness,
    ) -> None:
        self._server = server
        self._group = group
        self._claimed = claimed
        self._idle_s = idle_s
        self._beat_s = beat_s
        self._members = members
        self._on_claimed_away = on_claimed_away
        self._liveness = liveness
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def running(self) -> bool:
        """Whether some have been started."""
        return bool(self._tasks)

    def start(self, streams: list[str]) -> None:
        """Keep the items of these streams alive."""
        self._tasks.append(self._liveness.start(self._keep_alive(streams), name=f"heartbeat {self._group.name}"))

    def start_sign_on(self) -> None:
        """Keep the worker's name among the members."""
        beats = self._at_each_beat(self.sign_on)
        self._tasks.append(self._liveness.start(beats, name=f"sign-on {self._group.name}"))

    async def stop(self) -> None:
        """End the heartbeats."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def sign_on(self) -> None:
        """Write the worker's name among the members. Raises redis-py's errors."""
        if self._members:
            ttl_ms = round(self._idle_s * 1000)
            await run_script(self._server, scripts.present(self._members, member=self._group.consumer, ttl_ms=ttl_ms))

    async def sign_off(self) -> None:
        """Remove the worker's name. Raises redis-py's errors."""
        if self._members:
            await self._server.client.zrem(self._members, self._group.consumer)

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
                await self._group.recover(e, FIRST_PAUSE_S)
            except Exception as e:
                log.exception("heartbeat of %s", self._group.name)
                defects.count(e)

    async def _beat(self, streams: list[str]) -> None:
        by_stream: defaultdict[str, list[str]] = defaultdict(list)
        for stream, entry_id in self._claimed.places:
            if stream in streams:
                by_stream[stream].append(entry_id)
        calls = [
            scripts.heartbeat(stream, group=self._group.name, consumer=self._group.consumer, ids=ids)
            for stream, ids in by_stream.items()
        ]
        for stream, lost in zip(by_stream, await run_scripts(self._server, calls), strict=True):
            for entry_id in lost:
                if item := self._claimed.drop(stream, entry_id.decode()):
                    self._on_claimed_away(item)

    async def _sweep(self, streams: list[str]) -> None:
        """Remove consumers that died long ago and hold nothing, so that their number stays bounded."""
        group = self._group.name
        for stream in streams:
            consumers: Any = await self._server.client.xinfo_consumers(stream, group)
            dead = [c["name"].decode() for c in consumers if not c["pending"] and c["idle"] > DEAD_CONSUMER_MS]
            await run_scripts(self._server, [scripts.retire(stream, group=group, consumer=name) for name in dead])
