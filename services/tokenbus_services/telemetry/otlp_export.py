"""Sends spans and metrics by OTLP over HTTP, with OpenTelemetry's own packages. Imported only if it is enabled."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit
from uuid import uuid4

import structlog
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from tokenbus import __version__
from tokenbus.core.run.attempts import AttemptReport
from tokenbus_services.telemetry.trace_context import RunTrace, Span, Value

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

MAX_QUEUED = 2048
DELAY_MS = 1000
"""How long spans are gathered. A worker that is killed loses what it gathered."""
_SCOPE = InstrumentationScope("tokenbus", __version__)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_KINDS = {
    "internal": SpanKind.INTERNAL,
    "client": SpanKind.CLIENT,
    "consumer": SpanKind.CONSUMER,
    "server": SpanKind.SERVER,
}
_NS = 1_000_000
_DURATIONS = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92]
_TOKENS = [1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864]
"""Bucket boundaries that the conventions recommend."""


class OtlpExport:
    """Gathers spans and sends them from its own thread. An unavailable collector costs spans, never runs."""

    def __init__(
        self,
        service: str,
        *,
        endpoint: str | None = None,
        failed: Callable[[int], None] = lambda count: None,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        """``endpoint``: without the path; None for that of the environment. ``failed``: called with the number of
        spans that could not be sent.
        """
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # this module logs failures, once
        base = endpoint.rstrip("/") if endpoint else None
        self._resource = _resource(service, env)
        self._most = _whole(env, "OTEL_BSP_MAX_QUEUE_SIZE", MAX_QUEUED)
        self._pending = 0
        self._lock = threading.Lock()
        sender = OTLPSpanExporter(endpoint=base and f"{base}/v1/traces")
        self.shown_endpoint = _shown(base or env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or _base_of(env))
        """Where spans go, without credentials."""
        self._processor = BatchSpanProcessor(
            _Counted(sender, self._sent, failed),
            max_queue_size=self._most,
            schedule_delay_millis=_whole(env, "OTEL_BSP_SCHEDULE_DELAY", DELAY_MS),
            max_export_batch_size=min(self._most, _whole(env, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512)),
        )
        self._spans = env.get("OTEL_TRACES_EXPORTER", "otlp") != "none"
        self._metrics: _GenAiMetrics | None = None
        self._metrics_endpoint = base and f"{base}/v1/metrics"
        self._measured = env.get("OTEL_METRICS_EXPORTER", "otlp") != "none"

    def add(self, trace: RunTrace, span: Span) -> bool:
        """Queue a span; False if the queue is full."""
        if not self._spans:
            return True
        with self._lock:
            if self._pending >= self._most:
                return False
            self._pending += 1
        self._processor.on_end(readable(trace, span, self._resource))
        return True

    def measure(self, report: AttemptReport, attributes: Mapping[str, Value | None], tokens: Mapping[str, int]) -> None:
        """Record the metrics of one attempt."""
        if not self._measured:
            return
        if self._metrics is None:
            self._metrics = _GenAiMetrics(self._resource, self._metrics_endpoint)
        self._metrics.record(report, known(attributes), tokens)

    def close(self) -> None:
        """Send what remains. Takes as long as the collector does."""
        self._processor.shutdown()
        if self._metrics:
            self._metrics.close()

    def _sent(self, count: int) -> None:
        with self._lock:
            self._pending -= count


class _Counted(SpanExporter):
    """An exporter that counts what left the queue, and logs when failures begin and end."""

    def __init__(self, sender: SpanExporter, sent: Callable[[int], None], failed: Callable[[int], None]) -> None:
        self._sender = sender
        self._sent = sent
        self._failed = failed
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._sender.export(spans)
        except Exception as e:  # a proxy or a collector may answer anything
            log.debug("spans_not_sent", problem=f"{type(e).__name__}: {e}")
            result = SpanExportResult.FAILURE
        finally:
            self._sent(len(spans))
        ok = result is SpanExportResult.SUCCESS
        if not ok:
            self._failed(len(spans))
        if ok is self._failing:
            self._failing = not ok
            if ok:
                log.info("telemetry_recovered")
            else:
                log.warning("telemetry_not_sent", spans=len(spans))
        return result

    def shutdown(self) -> None:
        self._sender.shutdown()


class _GenAiMetrics:
    """The client metrics of the GenAI conventions."""

    def __init__(self, resource: Resource, endpoint: str | None) -> None:
        self._provider = MeterProvider(
            [PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=endpoint))],
            resource=resource,
            shutdown_on_exit=False,
        )
        meter = self._provider.get_meter("tokenbus", __version__)
        self._duration = meter.create_histogram(
            "gen_ai.client.operation.duration",
            unit="s",
            description="GenAI operation duration.",
            explicit_bucket_boundaries_advisory=_DURATIONS,
        )
        self._first = meter.create_histogram(
            "gen_ai.client.operation.time_to_first_chunk",
            unit="s",
            description="From the call to the first chunk of the answer.",
            explicit_bucket_boundaries_advisory=_DURATIONS,
        )
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            unit="{token}",
            description="Number of input and output tokens used.",
            explicit_bucket_boundaries_advisory=_TOKENS,
        )

    def record(self, report: AttemptReport, attributes: dict[str, Value], tokens: Mapping[str, int]) -> None:
        if report.called_ms:
            self._duration.record(max(0, report.ended_ms - report.called_ms) / 1000, attributes)
            if report.answered_ms:
                self._first.record(max(0, report.answered_ms - report.called_ms) / 1000, attributes)
        for kind, count in tokens.items():
            self._tokens.record(count, {**attributes, "gen_ai.token.type": kind})

    def close(self) -> None:
        self._provider.shutdown(1000)


def readable(trace: RunTrace, span: Span, resource: Resource) -> ReadableSpan:
    """The span in OpenTelemetry's form."""
    context = SpanContext(trace.trace_id, span.span_id, is_remote=False, trace_flags=_SAMPLED)
    parent = None
    if span.parent_id:
        parent = SpanContext(trace.trace_id, span.parent_id, is_remote=True, trace_flags=_SAMPLED)
    attributes = known(span.attributes)
    if span.error:
        attributes["error.type"] = span.error
    return ReadableSpan(
        name=span.name,
        context=context,
        parent=parent,
        resource=resource,
        attributes=attributes,
        events=[Event(name, timestamp=at_ms * _NS) for name, at_ms in span.events],
        kind=_KINDS[span.kind],
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
        start_time=span.begin_ms * _NS,
        end_time=max(span.begin_ms, span.end_ms) * _NS,
        instrumentation_scope=_SCOPE,
    )


def known(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    """Leave out fields without a value."""
    return {name: value for name, value in attributes.items() if value is not None}


class _ProcessResource(Resource):
    """The resource of all spans of this process. The encoder hashes it for each span, and `Resource` hashes itself by
    writing all its attributes as JSON.
    """

    def __init__(self, resource: Resource) -> None:
        super().__init__(resource.attributes, resource.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)


def _resource(service: str, env: Mapping[str, str]) -> Resource:
    ours: dict[str, str] = {
        "service.namespace": "tokenbus",
        "service.version": __version__,
        "service.instance.id": uuid4().hex,
    }
    if not env.get("OTEL_SERVICE_NAME") and "service.name=" not in env.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        ours["service.name"] = f"tokenbus-{service}"
    return _ProcessResource(Resource.create(ours))


def _base_of(env: Mapping[str, str]) -> str:
    return env.get("OTEL_EXPORTER_OTLP_ENDPOINT") or "http://localhost:4318"


def _shown(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")


def _whole(env: Mapping[str, str], name: str, default: int) -> int:
    given = env.get(name, "")
    return int(given) if given.isascii() and given.isdigit() and int(given) else default
