"""The span of a request to the gateway, the parent of the run that it publishes."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec

from tokenbus_services.telemetry import RunTrace, RunTracer, Span


class RequestSpan(msgspec.Struct, frozen=True):
    trace: RunTrace | None
    """None: it is not sampled."""
    what: tuple[str, str]
    began_ms: int
    traceparent: str | None
    """What makes it the run's parent."""


class RequestSpans:
    """Records the gateway's spans. ``now_ms``: the workers' clock."""

    def __init__(self, tracer: RunTracer, now_ms: Callable[[], int]) -> None:
        self._tracer = tracer
        self._now_ms = now_ms

    def begin(self, run: str, traceparent: str | None) -> RequestSpan:
        """The span of a request that publishes or joins this run, or is this call, beneath the client's span."""
        # Several requests may ask for one run, so the run's id alone is not enough.
        what = ("gateway", secrets.token_hex(8))
        handed_on = self._tracer.handed_on(run, traceparent, *what)
        return RequestSpan(self._tracer.trace(run, traceparent), what, self._now_ms(), handed_on)

    def ended(
        self, span: RequestSpan, *, surface: str, method: str, status: int, run: str | None, end: str | None
    ) -> None:
        """Record it. ``end``: how the run ended, if the answer contained that."""
        if span.trace is None:
            return
        self._tracer.record(
            span.trace,
            Span(
                name=f"gateway {surface}",
                span_id=span.trace.span(*span.what),
                parent_id=span.trace.publisher_span,
                begin_ms=span.began_ms,
                end_ms=self._now_ms(),
                kind="server",
                attributes={
                    "http.request.method": method,
                    "http.response.status_code": status or None,
                    "tokenbus.run.id": run,
                    "tokenbus.surface": surface,
                    "tokenbus.status": end,
                },
                error=str(status) if status >= 500 else None,
            ),
        )
