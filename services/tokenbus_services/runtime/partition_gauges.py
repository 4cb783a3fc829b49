"""Gauges of the server's data for a worker's partitions, measured whenever `/metrics` is read.

Each partition has one owner per stage, so sums over all workers count nothing twice. The owner of partition 0 reports
what exists only once: the inbound stream and the dead-letter stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from tokenbus.bus.keys import InternalTopic, Keys
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage_lag import LAG_FIELDS, lag_of


class PartitionGauges:
    """Lag, open runs and queue lengths of one worker's partitions."""

    def __init__(
        self, registry: CollectorRegistry, keys: Keys, *, stage: str, queues: Sequence[InternalTopic] = ()
    ) -> None:
        """``queues``: the work queues that this stage fills. If given, it also reports open runs, `requests` and
        `dead`.
        """
        self._keys = keys
        self._stage = stage
        self._queue_topics = queues
        self._lag = Gauge(
            "tokenbus_lag_bytes",
            "Bytes of a partition's input that the stage has not worked in yet.",
            ["stage", "partition"],
            registry=registry,
        )
        self._gauges = [self._lag]
        if queues:
            self._open = Gauge(
                "tokenbus_open_runs", "Runs that have begun and not ended.", ["partition"], registry=registry
            )
            self._queues = Gauge(
                "tokenbus_queue_entries", "Entries of a work queue, waiting or in hand.", ["queue"], registry=registry
            )
            self._dead = Gauge("tokenbus_dead_entries", "Entries of the dead stream.", ["stream"], registry=registry)
            self._gauges += [self._open, self._queues, self._dead]

    async def measure(self, server: Server, owned: Sequence[int]) -> None:
        """Set all gauges. Raises redis-py's errors; the gauges are then absent rather than stale."""
        for gauge in self._gauges:
            gauge.clear()
        if not owned:
            return
        keys = self._keys
        pipe = server.client.pipeline(transaction=False)
        for p in owned:
            pipe.hmget(keys.lease(p, self._stage), [*LAG_FIELDS, "open"])
            for topic in self._queue_topics:
                pipe.xlen(keys.topic(p, topic))
        alone = self._queue_topics and 0 in owned
        if alone:
            pipe.xlen(keys.requests)
            pipe.xlen(keys.dead)
        replies: list[Any] = await pipe.execute()
        found = iter(replies)
        lengths = dict.fromkeys(self._queue_topics, 0)
        for p in owned:
            arrived, done, open_runs = next(found)
            self._lag.labels(self._stage, p).set(lag_of(arrived, done))
            for topic in self._queue_topics:
                lengths[topic] += next(found)
            if self._queue_topics:
                self._open.labels(p).set(int(open_runs or 0))
        for topic, length in lengths.items():
            self._queues.labels(topic).set(length)
        if alone:
            self._queues.labels("requests").set(next(found))
            self._dead.labels(keys.dead).set(next(found))
