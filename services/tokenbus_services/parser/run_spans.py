"""Spans of a run and its attempts, made by the owner of its partition when they end.

Attributes follow OpenTelemetry's GenAI conventions. The run's own span has none of them, so that nothing counts twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar
from urllib.parse import urlsplit

from tokenbus.core.request.bounds import MAX_NAME_CHARS, tenant_of
from tokenbus.core.run.attempts import AttemptReport
from tokenbus.core.run.state import RunState
from tokenbus.events.public import BlockComplete, Incomplete, Restarted, Retrying, RunEnd, RunEvent, RunFailedEvent
from tokenbus.providers import registry
from tokenbus_services.pricing import token_counts
from tokenbus_services.settings import Settings
from tokenbus_services.settings.tables.providers import ProviderSettings
from tokenbus_services.telemetry import RunTracer, Span
from tokenbus_services.telemetry.trace_context import Value
from tokenbus_services.telemetry.tracer import named_options, operation_of, provider_of, shown_json

T = TypeVar("T")

MAX_RUNS = 10_000
"""Maximum runs whose answers and retries are kept for their spans."""


class RunSpans:
    """Records the spans that only the parser knows the end of."""

    def __init__(self, tracer: RunTracer, settings: Settings) -> None:
        self._tracer = tracer
        self._apis = {name: provider.api for name, provider in settings.providers.items()}
        self._servers = {name: _server(provider) for name, provider in settings.providers.items()}
        self._answers: dict[str, list[dict[str, object]]] = {}
        """By run, if content is wanted: the parts of the answer of the current attempt."""
        self._retries: dict[str, list[tuple[str, int]]] = {}

    def block_complete(self, state: RunState, event: BlockComplete) -> None:
        """Keep the block for the attempt's span, if content is wanted."""
        if self._tracer.content and (part := part_of(event)):
            _kept(self._answers, state.run).append(part)

    def attempt_over(self, state: RunState, report: AttemptReport) -> None:
        """Record the attempt's span and its metrics."""
        answer = self._answers.pop(state.run, None)
        api = self._apis.get(report.provider, "")
        about: dict[str, Value | None] = {
            "gen_ai.operation.name": operation_of(api),
            "gen_ai.provider.name": provider_of(report.provider, api),
            "gen_ai.request.model": report.model,
            "gen_ai.response.model": report.answered_model[:MAX_NAME_CHARS] or None,
        }
        error = report.result if report.outcome != "ok" else None
        counts = token_counts(report.usage, api)
        tokens = {"input": counts.input, "output": counts.output} if report.usage else {}
        self._tracer.measure(report, {**about, "error.type": error}, tokens)
        trace = self._tracer.trace(state.run, state.accepted.traceparent)
        if trace is None:
            return
        events: list[tuple[str, int]] = []
        if report.answered_ms:
            events.append(("tokenbus.first_byte", report.answered_ms))
        if report.visible_ms:
            events.append(("tokenbus.first_text", report.visible_ms))
        attributes: Mapping[str, Value | None] = {
            **about,
            **named_options(state.accepted.options),
            **self._servers.get(report.provider, {}),
            "gen_ai.response.id": report.response_id[:MAX_NAME_CHARS] or None,
            "gen_ai.response.finish_reasons": [report.finish] if report.finish else None,
            "gen_ai.response.time_to_first_chunk": _seconds(report.called_ms, report.answered_ms),
            "gen_ai.usage.input_tokens": tokens.get("input"),
            "gen_ai.usage.output_tokens": tokens.get("output"),
            "gen_ai.usage.reasoning.output_tokens": counts.reasoning or None,
            "gen_ai.usage.cache_read.input_tokens": counts.cache_read or None,
            "gen_ai.usage.cache_creation.input_tokens": counts.cache_write or None,
            "gen_ai.output.messages": shown_json([_message(answer, report.finish)]) if answer else None,
            "tokenbus.run.id": state.run,
            "tokenbus.provider": report.provider,
            "tokenbus.turn": report.turn,
            "tokenbus.attempt": report.attempt,
            "tokenbus.outcome": report.outcome,
            "tokenbus.error.code": report.error.code[:MAX_NAME_CHARS] if report.error else None,
            "tokenbus.request_id": report.request_id or None,
            "http.response.status_code": report.error.status if report.error else None,
        }
        self._tracer.record(
            trace,
            Span(
                name=f"{operation_of(api)} {report.model}",
                span_id=trace.attempt(report.attempt),
                parent_id=trace.root,
                begin_ms=report.began_ms,
                end_ms=report.ended_ms,
                kind="client",
                attributes=attributes,
                error=error,
                events=events,
            ),
        )

    def lifecycle(self, state: RunState, event: RunEvent) -> None:
        """Record the run's span at its end."""
        if isinstance(event, Retrying | Restarted):
            _kept(self._retries, state.run).append((f"tokenbus.retry {event.error.kind}", state.seen_ms))
            return
        if not isinstance(event, RunEnd):
            return
        self._answers.pop(state.run, None)
        retries = self._retries.pop(state.run, [])
        accepted = state.accepted
        trace = self._tracer.trace(state.run, accepted.traceparent)
        if trace is None:
            return
        error = event.error if isinstance(event, RunFailedEvent | Incomplete) else None
        status = str(event.__struct_config__.tag)
        attributes: Mapping[str, Value | None] = {
            "tokenbus.run.id": state.run,
            "tokenbus.status": status,
            "tokenbus.finish": event.finish,
            "tokenbus.provider": accepted.provider,
            "tokenbus.model": accepted.model,
            "tokenbus.tenant": tenant_of(accepted.metadata) or None,
            "tokenbus.turns": event.turn + 1,
            "tokenbus.attempts": event.attempt,
            "tokenbus.first_text_ms": event.timing.first_visible_ms,
            "tokenbus.error.code": error.code[:MAX_NAME_CHARS] if error else None,
        }
        self._tracer.record(
            trace,
            Span(
                name=f"run {accepted.model}".strip(),
                span_id=trace.root,
                parent_id=trace.publisher_span,
                begin_ms=state.accepted_ms,
                end_ms=state.accepted_ms + event.timing.total_ms,
                kind="consumer",
                attributes=attributes,
                error=error.kind if error else None,
                events=retries,
            ),
        )


def _server(provider: ProviderSettings) -> dict[str, Value | None]:
    """Where the settings say that the provider is."""
    url = urlsplit(provider.base_url or registry.get(provider.api).default_base_url)
    port = url.port or (443 if url.scheme == "https" else 80)
    return {"server.address": url.hostname, "server.port": port} if url.hostname else {}


def part_of(event: BlockComplete) -> dict[str, object] | None:
    """The block as a part of a message, in the conventions' form."""
    if event.kind == "text":
        return {"type": "text", "content": event.content or ""}
    if event.kind == "thinking":
        return {"type": "reasoning", "content": event.content or ""}
    if event.kind == "tool_call":
        arguments: object = event.arguments if event.input is None else event.input
        return {"type": "tool_call", "id": event.tool_id, "name": event.tool_name, "arguments": arguments}
    return None


def _message(parts: list[dict[str, object]], finish: str) -> dict[str, object]:
    return {"role": "assistant", "parts": parts, "finish_reason": finish}


def _kept(runs: dict[str, list[T]], run: str) -> list[T]:
    """What is kept for the run. The oldest run gives way: its partition is another worker's by now."""
    if run not in runs and len(runs) >= MAX_RUNS:
        del runs[next(iter(runs))]
    return runs.setdefault(run, [])


def _seconds(begin_ms: int, end_ms: int) -> float | None:
    return max(0, end_ms - begin_ms) / 1000 if begin_ms and end_ms else None
