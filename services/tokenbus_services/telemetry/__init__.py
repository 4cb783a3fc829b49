"""Traces and metrics for OpenTelemetry. Only `otlp_export` imports its packages, and only if it is enabled."""

from __future__ import annotations

from tokenbus_services.telemetry.trace_context import (
    RunTrace,
    Span,
    remote_trace,
    run_trace,
    traceparent_of,
    worked_for,
    working_for,
)
from tokenbus_services.telemetry.tracer import NO_TRACER, RunTracer, open_tracer

__all__ = [
    "NO_TRACER",
    "RunTrace",
    "RunTracer",
    "Span",
    "open_tracer",
    "remote_trace",
    "run_trace",
    "traceparent_of",
    "worked_for",
    "working_for",
]
