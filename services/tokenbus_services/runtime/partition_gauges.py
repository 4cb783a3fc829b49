"""Gauges of the server's data for a worker's partitions, measured whenever `/metrics` is read.

Each partition has one owner per stage, so sums over all workers count nothing twice. The owner of partition 0 reports
what exists only once: the inbound stream and the dead-letter stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Gauge

from tokenbus.bus.keys import InternalTopic, Keys
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage_lag import LAG_FIELDS, lag_of


class _QueueGauges:
    """Of the stage that fills the work queues."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.open = Gauge("tokenbus_open_runs", "Runs that have begun and not ended.", ["partition"], registry=registry)
        self.entries = Gauge(
            "tokenbus_queue_entries", "Entries of a work queue, waiting or in hand.", ["queue"], registry=registry
        )
        self.dead = Gauge("tokenbus_dead_entries", "Entries of the dead stream.", ["stream"], registry=registry)

    def clear(self) -> None:
        for gauge in (self.open, self.entries, self.dead):
            gauge.clear()


class _Stage(msgspec.Struct, frozen=True):
    name: str
    owned: Callable[[], Sequence[int]]
    fills: Sequence[InternalTopic]
    gauges: _QueueGauges | None


class PartitionGauges:
    """Lag, open runs and queue lengths of one worker's partitions. Call `add` for each stage."""

    def __init__(self, registry: CollectorRegistry, keys: Keys) -> None:
        self._registry = registry
        self._keys = keys
        self._stages: list[_Stage] = []
        self._lag = Gauge(
            "tokenbus_lag_bytes",
            "Bytes of a partition's input that the stage has not worked in yet.",
            ["stage", "partition"],
            registry=registry,
        )

    def add(self, stage: str, owned: Callable[[], Sequence[int]], *, fills: Sequence[InternalTopic] = ()) -> None:
        """``owned``: the partitions that the worker owns in this stage. ``fills``: the work queues that it writes to;
        if given, it also reports open runs, `requests` and `dead`.
        """
        self._stages.append(_Stage(stage, owned, fills, _QueueGauges(self._registry) if fills else None))

    async def measure(self, server: Server) -> None:
        """Set all gauges. Raises redis-py's errors; the gauges are then absent rather than stale."""
        self._lag.clear()
        for stage in self._stages:
            if stage.gauges:
                stage.gauges.clear()
        for stage in self._stages:
            if owned := stage.owned():
                await self._measure(server, stage, owned)

    async def _measure(self, server: Server, stage: _Stage, owned: Sequence[int]) -> None:
        keys = self._keys
        pipe = server.client.pipeline(transaction=False)
        for p in owned:
            pipe.hmget(keys.lease(p, stage.name), [*LAG_FIELDS, "open"])
            for topic in stage.fills:
                pipe.xlen(keys.topic(p, topic))
        alone = stage.gauges and 0 in owned
        if alone:
            pipe.xlen(keys.requests)
            pipe.xlen(keys.dead)
        replies: list[Any] = await pipe.execute()
        found = iter(replies)
        lengths = dict.fromkeys(stage.fills, 0)
        for p in owned:
            arrived, done, open_runs = next(found)
            self._lag.labels(stage.name, p).set(lag_of(arrived, done))
            for topic in stage.fills:
                lengths[topic] += next(found)
            if stage.gauges:
                stage.gauges.open.labels(p).set(int(open_runs or 0))
        if stage.gauges is None:
            return
        for topic, length in lengths.items():
            stage.gauges.entries.labels(topic).set(length)
        if alone:
            stage.gauges.entries.labels("requests").set(next(found))
            stage.gauges.dead.labels(keys.dead).set(next(found))
