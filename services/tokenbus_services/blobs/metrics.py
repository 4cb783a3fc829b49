"""Blob store metrics."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter

from tokenbus.errors import BlobQuotaExceeded, BlobStoreFull, BlobUnavailable


class BlobMetrics:
    """Counts the requests that the store failed, by the code of the error, and remembers the last one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._failures = Counter(
            "tokenbus_blob_failures", "Requests that the blob store failed.", ["code"], registry=registry
        )
        self._last: tuple[str, float] | None = None
        for kind in (BlobUnavailable, BlobStoreFull, BlobQuotaExceeded):
            self._failures.labels(kind.code)  # at 0 from the start: a rate sees the first failure too

    def failed(self, error: BlobUnavailable) -> None:
        """Count a failure."""
        self._failures.labels(error.code).inc()
        self._last = error.code, time.monotonic()

    def health(self) -> dict[str, Any]:
        """The last failure, for `/health`; nothing if there was none."""
        if self._last is None:
            return {}
        code, at = self._last
        return {"last_failure": {"code": code, "ago_s": round(time.monotonic() - at)}}
