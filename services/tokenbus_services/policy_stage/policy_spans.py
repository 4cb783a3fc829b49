"""The span of a run's policies: from its first draft to the end of the run, in the worker that owns it then."""

from __future__ import annotations

import time

from tokenbus_services.telemetry import RunTracer, Span


class PolicySpans:
    """Records the policy stage's spans."""

    def __init__(self, tracer: RunTracer) -> None:
        self._tracer = tracer

    def judged(self, run: str, traceparent: str, policies: tuple[str, ...], since_ms: int) -> None:
        """Record that a run under policies has ended."""
        if trace := self._tracer.trace(run, traceparent):
            self._tracer.record(
                trace,
                Span(
                    name="policies",
                    span_id=trace.span("policies"),
                    parent_id=trace.root,
                    begin_ms=since_ms,
                    end_ms=time.time_ns() // 1_000_000,
                    attributes={"tokenbus.run.id": run, "tokenbus.policies": policies},
                ),
            )
