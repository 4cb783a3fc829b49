"""Recorder metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from tokenbus.bus.records import RecordEntry
from tokenbus_services.runtime.metrics.worker_metrics import DeadLetterMetrics


class RecordMetrics:
    """Counts records by the outcome of the run, and their raw bytes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.dead_letters = DeadLetterMetrics(registry)
        self._records = Counter("tokenbus_records", "Recorded runs, by outcome.", ["status"], registry=registry)
        self._bytes = Counter("tokenbus_record_raw_bytes", "Raw stream bytes in records.", registry=registry)

    def recorded(self, entry: RecordEntry) -> None:
        """Count a new record."""
        self._records.labels(entry.status).inc()
        self._bytes.inc(entry.raw_bytes)
