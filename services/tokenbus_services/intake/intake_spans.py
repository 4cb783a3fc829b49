"""The span of a request on its way in: from its entry on the inbound stream to its run."""

from __future__ import annotations

from tokenbus.bus.server.clock import ServerClock
from tokenbus.bus.server.stream_reader import id_key
from tokenbus.events.requests import Generate
from tokenbus_services.telemetry import RunTracer, Span


class IntakeSpans:
    """Records intake's spans."""

    def __init__(self, tracer: RunTracer, clock: ServerClock) -> None:
        self._tracer = tracer
        self._clock = clock

    def accepted(self, run: str, request: Generate, entry_id: str) -> None:
        """Record that a request becomes a run."""
        if trace := self._tracer.trace(run, request.traceparent):
            self._tracer.record(
                trace,
                Span(
                    name="intake",
                    span_id=trace.span("intake"),
                    parent_id=trace.root,
                    begin_ms=self._clock.ms_of(id_key(entry_id)[0]),
                    end_ms=self._clock.now_ms(),
                    attributes={
                        "tokenbus.run.id": run,
                        "tokenbus.provider": request.provider,
                        "tokenbus.model": request.model,
                    },
                ),
            )
