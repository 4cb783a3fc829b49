"""Metrics that every service shows on `/metrics`, besides FastStream's own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class StageMetrics:
    """Metrics of an ordered stage."""

    def __init__(self, registry: CollectorRegistry, stage: str) -> None:
        labels = {"stage": stage}
        self.entries = Counter(
            "tokenbus_entries", "Stream entries worked in and committed.", ["stage"], registry=registry
        ).labels(**labels)
        self.batch_s = Histogram(
            "tokenbus_batch_seconds",
            "From a read to its commit.",
            ["stage"],
            registry=registry,
            buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.0),
        ).labels(**labels)
        self.partitions = Gauge(
            "tokenbus_partitions", "Partitions owned by this worker.", ["stage"], registry=registry
        ).labels(**labels)
        self.blocked = Gauge(
            "tokenbus_partitions_blocked",
            "Partitions that this worker found with a shared key of the wrong type; `tokenbus doctor` names it.",
            ["stage"],
            registry=registry,
        ).labels(**labels)
        self.configured = Gauge(
            "tokenbus_partitions_configured", "Partitions of the deployment.", ["stage"], registry=registry
        ).labels(**labels)
