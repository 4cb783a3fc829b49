"""Spans of what the fetcher does for an attempt: the wait before the call, and the call itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import httpx

from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.requests import Generate, Message
from tokenbus_services.fetcher.writing.attempt_writer import AttemptWriter
from tokenbus_services.telemetry import RunTracer, Span
from tokenbus_services.telemetry.trace_context import Value
from tokenbus_services.telemetry.tracer import request_attributes


class CallFacts:
    """What is noted about one call on its way. ``now_ms``: the workers' clock."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self.called_ms = now_ms()
        self.url: httpx.URL | None = None
        self.status: int | None = None
        self.answered_ms = 0
        self.ended_ms = 0
        self.error: str | None = None

    def answered(self, response: httpx.Response) -> None:
        """The answer's head arrived."""
        self.url, self.status, self.answered_ms = response.request.url, response.status_code, self._now_ms()

    def ended(self, error: ErrorInfo | None) -> None:
        self.ended_ms = self._now_ms()
        refused = self.status if self.status is not None and self.status >= 400 else None
        self.error = error.kind if error else str(refused) if refused else None


class CallSpans:
    """Records the fetcher's spans."""

    def __init__(self, tracer: RunTracer) -> None:
        self._tracer = tracer

    def waited(self, request: Generate, of: AttemptWriter, *, since_ms: int, until_ms: int) -> None:
        """Record how long an attempt waited for its worker, its delay, its policies and its limits."""
        if trace := self._tracer.trace(of.run, request.traceparent):
            self._tracer.record(
                trace,
                Span(
                    name="wait",
                    span_id=trace.span("wait", of.attempt),
                    parent_id=trace.root,
                    begin_ms=since_ms,
                    end_ms=until_ms,
                    attributes=_about(of),
                ),
            )

    def called(
        self, request: Generate, history: Sequence[Message], of: AttemptWriter, *, n: int, facts: CallFacts
    ) -> None:
        """Record one call. ``n`` counts the calls of the attempt."""
        if trace := self._tracer.trace(of.run, request.traceparent):
            url = facts.url
            self._tracer.record(
                trace,
                Span(
                    name="POST",
                    span_id=trace.span("call", of.attempt, n),
                    parent_id=trace.attempt(of.attempt),
                    begin_ms=facts.called_ms,
                    end_ms=facts.ended_ms,
                    kind="client",
                    attributes={
                        "http.request.method": "POST",
                        "http.response.status_code": facts.status,
                        "server.address": url.host if url else None,
                        "server.port": (url.port or (443 if url.scheme == "https" else 80)) if url else None,
                        **request_attributes(request, content=self._tracer.content, history=history),
                        **_about(of),
                    },
                    error=facts.error,
                    events=[("first byte", facts.answered_ms)] if facts.answered_ms else (),
                ),
            )


def _about(of: AttemptWriter) -> dict[str, Value | None]:
    return {"tokenbus.run.id": of.run, "tokenbus.turn": of.turn, "tokenbus.attempt": of.attempt}
