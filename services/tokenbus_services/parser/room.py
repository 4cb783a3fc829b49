"""Makes room on a server that is nearly full: forgets public events and ended runs before their time, oldest first.

Intake accepts no run while the server is full, and nothing else would free memory before `retention` does. Each parser
makes room in the partitions that it owns, so in a Cluster on each node, and no two parsers do it in one partition. It
begins above a share of ``maxmemory`` and continues until a tenth less is in use. Open runs, their input, and what ended
in the last seconds stay.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter
from redis.exceptions import RedisError

from tokenbus.bus.keys import TOPICS, Keys
from tokenbus.bus.liveness import Defects, Liveness, rest, stop_task
from tokenbus.bus.scripts.retention import forget, memory
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import Entry, id_key
from tokenbus_services.runtime.deployment_snapshot import checked
from tokenbus_services.settings import Settings

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

LOOK_S = 1.0
LESS = 0.1
"""Room is made until this share of ``maxmemory`` less is in use than at the beginning."""
SPARED_MS = 3_000
"""What is younger stays: its readers are reading it. An attempt waits longer for room before it ends `server_full`."""
PARTS = 8
"""Each step forgets the oldest of this many parts of the time that is left."""
STEP_RUNS, STEP_ENTRIES = 100, 10_000
"""Most that one command forgets."""
STEPS = 64
"""Steps of one look; the next one continues."""
SAID_S = 60.0
"""How often to report that there is nothing to forget."""


class RoomKeeper:
    """Watches the memory of the server for the partitions that this worker owns. Call `open`, then `close`."""

    def __init__(
        self, server: Server, settings: Settings, registry: CollectorRegistry, *, owned: Callable[[], Sequence[int]]
    ) -> None:
        self._server = server
        self._keys: Keys = settings.keys
        self._begin = settings.retention.full_share
        self._owned = owned
        self._forgotten = Counter(
            "tokenbus_forgotten_for_room",
            "Entries of topics, and ended runs, deleted before their time because the server was nearly full.",
            ["what"],
            registry=registry,
        )
        for what in ("entries", "runs"):
            self._forgotten.labels(what)  # from 0, so that an alert sees the first increase
        self._say_at = 0.0
        self._task: asyncio.Task[None] | None = None

    async def open(self, liveness: Liveness) -> None:
        """Begin to watch, unless the settings say never."""
        if self._begin < 1:
            self._task = liveness.start(self._run(), name="room")

    async def close(self) -> None:
        """Stop."""
        await stop_task(self._task)

    async def _run(self) -> None:
        defects = Defects()
        while True:
            await rest(LOOK_S)
            try:
                await self.look()
                defects.none()
            except (RedisError, OSError) as e:
                log.debug("room_not_made", problem=str(e) or type(e).__name__)
            except Exception as e:  # any error: the next look may succeed
                log.exception("room_not_made")
                defects.count(e)

    async def look(self) -> None:
        """Make room on each node that is nearly full. Raises redis-py's errors."""
        owned = list(self._owned())
        of_nodes = [[p] for p in owned] if self._server.topology == "cluster" else [owned] if owned else []
        for partitions in of_nodes:
            share = await self._share(partitions[0])
            if share > self._begin:
                await self._make_room(partitions, share)

    async def _make_room(self, partitions: Sequence[int], before: float) -> None:
        share, entries, runs = before, 0, 0
        for _ in range(STEPS):
            found = [await self._step(partition) for partition in partitions]
            entries, runs = entries + sum(e for e, _ in found), runs + sum(r for _, r in found)
            share = await self._share(partitions[0])
            if share <= self._begin - LESS or not any(e or r for e, r in found):
                break
        shares = {"share_before": round(before, 3), "share": round(share, 3)}
        if entries or runs:
            log.warning("room_made", partitions=list(partitions), entries=entries, runs=runs, **shares)
            self._forgotten.labels("entries").inc(entries)
            self._forgotten.labels("runs").inc(runs)
        elif time.monotonic() >= self._say_at:
            self._say_at = time.monotonic() + SAID_S
            hint = "open runs, queues or other programs fill the server: raise maxmemory"
            log.error("room_not_found", partitions=list(partitions), hint=hint, **shares)

    async def _share(self, partition: int) -> float:
        return await run_script(self._server, memory(self._keys.lease(partition, "parser"))) / 1000

    async def _step(self, partition: int) -> tuple[int, int]:
        """Forget the oldest part of what a partition keeps; how many entries and runs that were."""
        client, keys = self._server.client, self._keys.within(partition)
        topics = [keys.topic(partition, topic) for topic in TOPICS]
        pipe = client.pipeline(transaction=False)
        for topic in topics:
            pipe.xrange(topic, count=1)
        pipe.zrange(keys.ended_runs(partition), 0, 0, withscores=True)
        *firsts, ended = [checked(reply) for reply in await pipe.execute(raise_on_error=False)]
        ages = [_ms_of(first) for first in firsts] + [int(score) for _, score in ended]
        until = self._server.clock.now_ms() - SPARED_MS
        oldest = min((ms for ms in ages if ms is not None), default=until)
        if oldest >= until:
            return 0, 0
        before = oldest + max(1000, (until - oldest) // PARTS)
        before = min(before, until)
        pipe = client.pipeline(transaction=False)
        for topic in topics:
            pipe.xtrim(topic, minid=f"{before}-0", approximate=True, limit=STEP_ENTRIES)
        pipe.zrangebyscore(keys.ended_runs(partition), "-inf", f"({before}", start=0, num=STEP_RUNS)
        *trimmed, listed = [checked(reply) for reply in await pipe.execute(raise_on_error=False)]
        runs = [run.decode() for run in listed]
        gone = 0
        if runs:
            names = [(keys.run(run), keys.log(run)) for run in runs]
            gone = await run_script(self._server, forget(keys.ended_runs(partition), names, runs=runs))
        return sum(trimmed), max(gone, len(runs))


def _ms_of(first: list[Entry] | Any) -> int | None:
    return id_key(first[0][0].decode())[0] if first else None
