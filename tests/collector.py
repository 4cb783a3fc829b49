"""An OTLP receiver for tests: what an OpenTelemetry collector would get."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import pytest

pytest.importorskip("opentelemetry.proto", reason="opentelemetry-proto is not installed: make setup")

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Received(NamedTuple):
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    failed: bool
    events: list[str]


class Collector:
    """What came so far."""

    def __init__(self) -> None:
        self.url = ""
        self.refuses = False
        """Whether it answers 503."""
        self.headers: list[dict[str, str]] = []
        self._bodies: list[tuple[str, bytes]] = []

    def add(self, path: str, headers: dict[str, str], body: bytes) -> None:
        self.headers.append(headers)
        self._bodies.append((path, gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body))

    @property
    def raw(self) -> bytes:
        return b"".join(body for _, body in self._bodies)

    def spans(self, trace_id: str = "") -> list[Received]:
        """All spans, or those of one trace; each span id once."""
        found: dict[str, Received] = {}
        for path, body in list(self._bodies):
            if path == "/v1/traces":
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    service = values(resource.resource.attributes)["service.name"]
                    for scope in resource.scope_spans:
                        for span in scope.spans:
                            found[span.span_id.hex()] = Received(
                                service=service,
                                name=span.name,
                                trace_id=span.trace_id.hex(),
                                span_id=span.span_id.hex(),
                                parent_id=span.parent_span_id.hex(),
                                kind=span.kind,
                                begin_ns=span.start_time_unix_nano,
                                end_ns=span.end_time_unix_nano,
                                attributes=values(span.attributes),
                                failed=span.status.code == 2,
                                events=[event.name for event in span.events],
                            )
        return [span for span in found.values() if not trace_id or span.trace_id == trace_id]

    def metrics(self) -> set[str]:
        return {
            metric.name
            for path, body in list(self._bodies)
            if path == "/v1/metrics"
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@contextmanager
def collector() -> Iterator[Collector]:
    """A running receiver on a free port."""
    received = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections stay open, as a collector's do

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if not received.refuses:
                received.add(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
            self.send_response(503 if received.refuses else 200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    received.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def values(attributes: Any) -> dict[str, Any]:
    """Attributes as a plain dictionary."""
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
