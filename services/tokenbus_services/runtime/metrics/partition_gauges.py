"""Lag of a worker's partitions, measured whenever `/metrics` is read.

Each partition has one owner per stage, so sums over all workers count nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage_lag import LAG_FIELDS, lag_of


class PartitionGauges:
    """Lag of one worker's partitions. Call `add` for each stage."""

    def __init__(self, registry: CollectorRegistry, keys: Keys) -> None:
        self._keys = keys
        self._stages: list[tuple[str, Callable[[], Sequence[int]]]] = []
        self._lag = Gauge(
            "tokenbus_lag_bytes",
            "Bytes of a partition's input that the stage has not processed yet.",
            ["stage", "partition"],
            registry=registry,
        )

    def add(self, stage: str, owned: Callable[[], Sequence[int]]) -> None:
        """``owned``: the partitions that the worker owns in this stage."""
        self._stages.append((stage, owned))

    async def measure(self, server: Server) -> None:
        """Set all gauges. Raises redis-py's errors; the gauges are then absent rather than stale."""
        self._lag.clear()
        pipe = server.client.pipeline(transaction=False)
        pairs = [(stage, p) for stage, owned in self._stages for p in owned()]
        for stage, p in pairs:
            pipe.hmget(self._keys.lease(p, stage), LAG_FIELDS)
        replies: list[Any] = await pipe.execute() if pairs else []
        for (stage, p), reply in zip(pairs, replies, strict=True):
            self._lag.labels(stage, p).set(lag_of(*reply))
