"""What a recorder shows of its records."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from tokenbus.bus.records import RecordEntry


class RecordMetrics:
    """Records by the way their run ended, and the raw bytes in them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._records = Counter(
            "tokenbus_records", "Runs that were recorded, by how they ended.", ["status"], registry=registry
        )
        self._bytes = Counter("tokenbus_record_raw_bytes", "Raw stream in these records.", registry=registry)

    def recorded(self, entry: RecordEntry) -> None:
        """A record was made."""
        self._records.labels(entry.status).inc()
        self._bytes.inc(entry.raw_bytes)
