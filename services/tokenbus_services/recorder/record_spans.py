"""The span of a record: from the recorder's look at the run to the record's entry in the index."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from tokenbus.bus.server.clock import ServerClock
from tokenbus_services.recorder.record import Record
from tokenbus_services.telemetry import RunTracer, Span, traceparent_of, working_for


class RecordSpans:
    """Records the recorder's spans; without a tracer it does nothing."""

    def __init__(self, tracer: RunTracer | None, clock: ServerClock) -> None:
        self._tracer = tracer
        self._clock = clock

    @contextmanager
    def recording(self, kept: Record) -> Generator[None]:
        """Record a span of what is done meanwhile; requests to the blob store are beneath it."""
        trace = self._tracer and self._tracer.trace(kept.run, kept.request.get("traceparent"))
        if self._tracer is None or trace is None:
            yield
            return
        begin_ms, span_id, error = self._clock.now_ms(), trace.span("record"), None
        try:
            with working_for(traceparent_of(trace, span_id)):
                yield
        except Exception as e:
            error = type(e).__name__
            raise
        finally:
            self._tracer.record(
                trace,
                Span(
                    name="record",
                    span_id=span_id,
                    parent_id=trace.root,
                    begin_ms=begin_ms,
                    end_ms=self._clock.now_ms(),
                    attributes={
                        "tokenbus.run.id": kept.run,
                        "tokenbus.raw_bytes": len(kept.frames),
                        "tokenbus.truncated": kept.truncated,
                    },
                    error=error,
                ),
            )
