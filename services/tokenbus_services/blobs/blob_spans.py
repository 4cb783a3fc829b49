"""Spans of requests to the blob store, beneath the span that the client works for."""

from __future__ import annotations

import secrets
import time

from tokenbus_services.telemetry import RunTracer, Span, remote_trace


class BlobSpans:
    """Records the store's spans. Only requests that carry a trace context have one: the store knows no runs."""

    def __init__(self, tracer: RunTracer) -> None:
        self._tracer = tracer

    def served(self, traceparent: str, what: str, *, began_ms: int, status: int, blob_id: str, method: str) -> None:
        """Record a request that is over."""
        trace = remote_trace("blobs", traceparent)
        if trace is None or not trace.sampled:
            return
        self._tracer.record(
            trace,
            Span(
                name=f"blob {what}",
                span_id=trace.span(secrets.token_hex(8)),
                parent_id=trace.publisher_span,
                begin_ms=began_ms,
                end_ms=now_ms(),
                kind="server",
                attributes={
                    "http.request.method": method,
                    "http.response.status_code": status or None,
                    "tokenbus.blob.id": blob_id or None,
                },
                error=str(status) if status >= 500 else None,
            ),
        )


def now_ms() -> int:
    """Unix time of this host: the store has no connection to the server."""
    return time.time_ns() // 1_000_000
