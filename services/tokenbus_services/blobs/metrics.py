"""Blob store metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from tokenbus.errors import BlobQuotaExceeded, BlobStoreFull, BlobUnavailable


class BlobMetrics:
    """Counts the requests that the store failed, by the code of the error."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._failures = Counter(
            "tokenbus_blob_failures", "Requests that the blob store failed.", ["code"], registry=registry
        )
        for kind in (BlobUnavailable, BlobStoreFull, BlobQuotaExceeded):
            self._failures.labels(kind.code)  # at 0 from the start: a rate sees the first failure too

    def failed(self, error: BlobUnavailable) -> None:
        """Count a failure."""
        self._failures.labels(error.code).inc()
