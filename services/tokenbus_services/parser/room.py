"""Retention by bytes: forgets public events and ended runs before their time, oldest first, if a topic or a partition's
ended runs exceed a bound of their own (`byte_bounds`), or the server is nearly full.

Intake accepts no run while the server is full, and nothing else would free memory before `retention` does. Each parser
makes room in the partitions that it owns, so in a Cluster on each node, and no two parsers do it in one partition; dead
letters go too. It begins above a share of ``maxmemory``, or a number of bytes, and continues until a tenth
less is in use. Open runs, their
input, runs that wait for a recorder (those to be archived: for `archive.hold_s`), what ended in the last seconds, and
each stream's newest entry stay.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Counting
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter
from redis.exceptions import RedisError

from tokenbus.bus.keys import TOPICS, Keys
from tokenbus.bus.liveness import Liveness, rest, stop_task
from tokenbus.bus.scripts.retention import forget, memory
from tokenbus.bus.server.retry import Defects
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import id_key
from tokenbus_services.parser.byte_bounds import PartitionBytes
from tokenbus_services.runtime.deployment_snapshot import checked
from tokenbus_services.settings import Settings

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

LOOK_S = 0.25
"""A server that refuses writes for want of memory is full at the next look, whoever got the error."""
BOUNDS_S = 1.0
"""How often a partition's own bounds in bytes are looked at."""
LESS = 0.125
"""Room is made until this share of what may be in use is free: with the default share, a tenth of ``maxmemory``."""
SPARED_MS = 3_000
"""What is younger stays: its readers are reading it. An attempt waits longer for room before it ends `server_full`."""
PARTS = 8
"""Each step forgets the oldest of this many parts of the time that is left."""
STEP_RUNS, STEP_ENTRIES = 100, 10_000
"""Most that one command forgets."""
STEPS = 64
"""Steps of one look; the next one continues."""
SAID_S = 60.0
"""How often to report what was forgotten, or that there is nothing to forget."""
OTHERS_S = 15.0
"""A parser without anything to forget reports that only if the others have made no room for this long."""
DEAD_WITH = 0
"""The owner of this partition also looks after the dead stream."""


@dataclass(kw_only=True)
class _Place:
    """What can be forgotten together: a partition's topics and ended runs, or the dead stream."""

    keys: Keys
    memory_key: str
    """A key of the same node."""
    streams: Sequence[str]
    partition: int | None = None
    stay: int = 0
    """The first of its ended runs, by age, that were found to wait for their recorder."""


class RoomKeeper:
    """Watches the memory of the server for the partitions that this worker owns. Call `open`, then `close`."""

    def __init__(
        self, server: Server, settings: Settings, registry: CollectorRegistry, *, owned: Callable[[], Sequence[int]]
    ) -> None:
        self._server = server
        self._keys: Keys = settings.keys
        self._begin = settings.retention.full_share
        self._bytes = settings.retention.memory_bytes
        self._hold_ms = round(settings.archive.hold_s * 1000) if settings.archive else 0
        self._topic_bytes = settings.retention.topic_bytes
        self._ended_bytes = settings.retention.ended_bytes
        self._keep_ms = round(settings.retention.finished_run_s * 1000)
        self._bounds_at = 0.0
        self._partitions: dict[int, PartitionBytes] = {}
        """Of the partitions that this worker owns, if one of the two is bounded."""
        self._owned = owned
        self._forgotten = Counter(
            "tokenbus_forgotten_for_room",
            "Entries of topics, dead letters and ended runs deleted before their time: the server was nearly full.",
            ["what"],
            registry=registry,
        )
        self._trimmed = Counter(
            "tokenbus_trimmed_to_bytes",
            "Entries of topics and ended runs deleted before their time: topic_bytes or ended_bytes was reached.",
            ["what"],
            registry=registry,
        )
        for counter, what in product((self._forgotten, self._trimmed), ("entries", "runs")):
            counter.labels(what)  # from 0, so that an alert sees the first increase
        self._unsaid: Counting[str] = Counting()
        """What was forgotten since the last report."""
        self._say_at = 0.0
        self._full_since: dict[str, float] = {}
        """By node that is nearly full."""
        self._task: asyncio.Task[None] | None = None

    async def open(self, liveness: Liveness) -> None:
        """Begin to watch, unless the settings say never."""
        if self._begin < 1 or self._bytes or self._topic_bytes or self._ended_bytes:
            self._task = liveness.start(self._run(), name="room")

    async def close(self) -> None:
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
        places = [self._place(partition) for partition in self._owned()]
        if (self._topic_bytes or self._ended_bytes) and time.monotonic() >= self._bounds_at:
            self._bounds_at = time.monotonic() + BOUNDS_S
            await self._keep_bounds(places)
        if any(place.partition == DEAD_WITH for place in places):
            places.append(_Place(keys=self._keys, memory_key=self._keys.dead, streams=(self._keys.dead,)))
        nodes: defaultdict[str, list[_Place]] = defaultdict(list)
        for place in places:
            nodes[self._node_of(place)].append(place)
        for node, of_node in nodes.items():
            share = await self._share(of_node)
            if share <= 1:
                self._full_since.pop(node, None)
                continue
            since = self._full_since.setdefault(node, time.monotonic())
            await self._make_room(of_node, share, waited=time.monotonic() - since >= OTHERS_S)

    async def _keep_bounds(self, places: Sequence[_Place]) -> None:
        """Keep each partition's topics and ended runs within their bounds."""
        now_ms, here = self._server.clock.now_ms(), dict[int, PartitionBytes]()
        for place in places:
            if place.partition is None:
                continue
            kept = self._partitions.get(place.partition)
            here[place.partition] = kept = kept or PartitionBytes(
                self._server, place.keys, place.partition, place.streams
            )
            if self._topic_bytes:
                self._trimmed.labels("entries").inc(await kept.trim_topics(self._topic_bytes))
            if self._ended_bytes:
                times = {"now_ms": now_ms, "keep_ms": self._keep_ms, "hold_ms": self._hold_ms}
                self._trimmed.labels("runs").inc(await kept.trim_runs(self._ended_bytes, **times))
        self._partitions = here

    def _node_of(self, place: _Place) -> str:
        if self._server.topology != "cluster":
            return ""
        return self._server.client.get_node_from_key(place.memory_key).name

    def _place(self, partition: int) -> _Place:
        keys = self._keys.within(partition)
        streams = tuple(keys.topic(partition, topic) for topic in TOPICS)
        lease = keys.lease(partition, "parser")
        return _Place(keys=keys, memory_key=lease, streams=streams, partition=partition)

    async def _make_room(self, places: Sequence[_Place], before: float, *, waited: bool) -> None:
        """``waited``: whether other parsers have had the time to make room."""
        share, entries, runs = before, 0, 0
        for _ in range(STEPS):
            stay = sum(place.stay for place in places)
            found = [await self._step(place) for place in places]
            entries, runs = entries + sum(e for e, _ in found), runs + sum(r for _, r in found)
            share = await self._share(places)
            if share <= 1 - LESS or not (any(map(any, found)) or stay < sum(place.stay for place in places)):
                break
        self._forgotten.labels("entries").inc(entries)
        self._forgotten.labels("runs").inc(runs)
        self._unsaid.update(entries=entries, runs=runs)
        if time.monotonic() < self._say_at or not (waited or self._unsaid.total()):
            return
        self._say_at = time.monotonic() + SAID_S
        partitions = [place.partition for place in places if place.partition is not None]
        shares = {"partitions": partitions, "share_before": round(before, 3), "share": round(share, 3)}
        if self._unsaid.total():
            log.warning("room_made", **self._unsaid, **shares)
            self._unsaid.clear()
        else:
            hint = "open runs, runs that wait for a recorder, queues or other programs fill the server: raise maxmemory"
            log.error("room_not_found", hint=hint, **shares)

    async def _share(self, places: Sequence[_Place]) -> float:
        """What is in use, as a share of what may be before room is made; 0 without a bound."""
        share = self._begin if self._begin < 1 else 0
        return await run_script(self._server, memory(places[0].memory_key, share=share, most=self._bytes)) / 1000

    async def _step(self, place: _Place) -> tuple[int, int]:
        """Forget the oldest part of what a place keeps; how many entries and runs that were."""
        client, ended_runs = self._server.client, None
        if place.partition is not None:
            ended_runs = place.keys.ended_runs(place.partition)
        pipe = client.pipeline(transaction=False)
        for stream in place.streams:
            pipe.xrange(stream, count=1)
            pipe.xrevrange(stream, count=1)
        if ended_runs:
            pipe.zrange(ended_runs, place.stay, place.stay, withscores=True)
        ends: list[Any] = [checked(reply) for reply in await pipe.execute(raise_on_error=False)]
        ended: Any = ends.pop() if ended_runs else []
        # The newest entry stays: from an empty stream, a reader that begins there now cannot know later what it missed.
        streams = {
            stream: (first[0][0].decode(), last[0][0].decode())
            for stream, first, last in zip(place.streams, ends[::2], ends[1::2], strict=True)
            if first and last and first != last
        }
        ages = [id_key(first)[0] for first, _ in streams.values()] + [int(score) for _, score in ended]
        until = self._server.clock.now_ms() - SPARED_MS
        oldest = min(ages, default=until)
        if oldest >= until:
            return 0, 0
        before = min(oldest + max(1000, (until - oldest) // PARTS), until)
        pipe = client.pipeline(transaction=False)
        for stream, (_, last) in streams.items():
            pipe.xtrim(stream, minid=min(f"{before}-0", last, key=id_key), approximate=True, limit=STEP_ENTRIES)
        if ended_runs:
            pipe.zrangebyscore(ended_runs, "-inf", f"({before}", start=place.stay, num=STEP_RUNS)
        trimmed = [checked(reply) for reply in await pipe.execute(raise_on_error=False)]
        runs = [run.decode() for run in trimmed.pop()] if ended_runs else []
        gone = 0
        if runs:
            assert ended_runs
            names = [place.keys.kept_of(run) for run in runs]
            held_after = self._server.clock.now_ms() - self._hold_ms
            gone = await run_script(self._server, forget(ended_runs, names, runs=runs, held_after=held_after))
            place.stay += len(runs) - gone
        return sum(trimmed), gone
