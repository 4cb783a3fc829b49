"""Metrics that every service shows on `/metrics`, besides FastStream's own."""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class OneStageMetrics(msgspec.Struct, frozen=True):
    """Metrics of one ordered stage."""

    entries: Counter
    batch_s: Histogram
    partitions: Gauge
    blocked: Gauge


class StageMetrics:
    """Metrics of the ordered stages in one process, by stage."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._entries = Counter(
            "tokenbus_entries", "Stream entries that were processed and committed.", ["stage"], registry=registry
        )
        self._batch_s = Histogram(
            "tokenbus_batch_seconds",
            "From a read to its commit.",
            ["stage"],
            registry=registry,
            buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.0),
        )
        self._partitions = Gauge(
            "tokenbus_partitions", "Partitions that this worker owns.", ["stage"], registry=registry
        )
        self._blocked = Gauge(
            "tokenbus_partitions_blocked",
            "Partitions that this worker found with a shared key of the wrong type; `tokenbus doctor` names it.",
            ["stage"],
            registry=registry,
        )

    def of(self, stage: str) -> OneStageMetrics:
        """The metrics of one stage."""
        return OneStageMetrics(
            entries=self._entries.labels(stage),
            batch_s=self._batch_s.labels(stage),
            partitions=self._partitions.labels(stage),
            blocked=self._blocked.labels(stage),
        )


class PassedOver:
    """Counts work that failed and that its task went on from; each failure is in the log."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._failures = Counter(
            "tokenbus_work_failures",
            "Failures of the worker's own tasks that were logged and skipped.",
            ["work"],
            registry=registry,
        )

    def count(self, work: str) -> None:
        """Count one failure of this work."""
        self._failures.labels(work=work).inc()


class DeadLetterMetrics:
    """Counts what this process adds to the dead stream. The stream's length cannot show that: it has a bound."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._written = Counter(
            "tokenbus_dead_letters",
            "Entries that this worker added to the dead stream: crashes and rejected requests.",
            ["kind"],
            registry=registry,
        )
        for kind in ("crashed", "rejected"):
            self._written.labels(kind)  # shown as 0, so that the first one is an increase

    def count(self, kind: str) -> None:
        """Count an entry that was written."""
        self._written.labels(kind).inc()
