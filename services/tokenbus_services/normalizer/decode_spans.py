"""The span of an attempt's decoding: from its answer's head on the bus to its last event."""

from __future__ import annotations

from collections.abc import Callable

from tokenbus.core.attempt_decoder import AttemptReader
from tokenbus_services.telemetry import RunTracer, Span


class DecodeSpans:
    """Records the normalizer's spans. ``now_ms``: the workers' clock."""

    def __init__(self, tracer: RunTracer, now_ms: Callable[[], int]) -> None:
        self._tracer = tracer
        self._now_ms = now_ms

    def decoded(self, run: str, turn: int, reader: AttemptReader) -> None:
        """Record that an attempt is over, if it had an answer."""
        if not reader.opened_ms or (trace := self._tracer.trace(run, reader.traceparent)) is None:
            return
        self._tracer.record(
            trace,
            Span(
                name="decode",
                span_id=trace.span("decode", reader.attempt),
                parent_id=trace.attempt(reader.attempt),
                begin_ms=reader.opened_ms,
                end_ms=self._now_ms(),
                attributes={
                    "tokenbus.run.id": run,
                    "tokenbus.turn": turn,
                    "tokenbus.attempt": reader.attempt,
                    "tokenbus.frames": reader.frames,
                },
            ),
        )
