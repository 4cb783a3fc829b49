"""A fetcher's metrics of admission and uploads, besides FastStream's. No label holds a name from a request."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from tokenbus.bus.scripts.limits import Kind


class UploadMetrics:
    """Blobs uploaded as provider files."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._made = Counter("tokenbus_uploads", "Blobs uploaded to a provider's file store.", registry=registry)
        self._bytes = Counter("tokenbus_upload_bytes", "Their bytes.", registry=registry)
        self.failed = Counter(
            "tokenbus_uploads_failed", "Uploads that failed; their media went inside the request.", registry=registry
        )
        self.lost = Counter(
            "tokenbus_files_lost", "Files that the provider no longer had when a request named them.", registry=registry
        )

    def made(self, size: int) -> None:
        """Count one upload of ``size`` bytes."""
        self._made.inc()
        self._bytes.inc(size)


class AdmissionMetrics:
    """Calls granted, and calls refused by kind of limit."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.granted = Counter("tokenbus_calls_granted", "Provider calls that got leave.", registry=registry)
        self._refused = Counter(
            "tokenbus_calls_refused",
            "How often a limit delayed a call, by what it limits: model, provider or tenant.",
            ["limit"],
            registry=registry,
        )

    def refused(self, kind: Kind) -> None:
        """Count a refusal by this kind of limit."""
        self._refused.labels(limit=kind).inc()
