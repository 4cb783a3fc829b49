"""The parser's metrics and log lines of its runs. A batch that is processed twice, after a takeover, counts twice.

No label holds anything from a request: kinds, statuses and error classes are few and known.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram

from tokenbus.bus.activity import OTHER
from tokenbus.core.request.bounds import MAX_NAME_CHARS, tenant_of
from tokenbus.core.run.attempts import AttemptReport
from tokenbus.core.run.state import RunState
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.public import (
    BlockComplete,
    Chunk,
    Incomplete,
    PublicEvent,
    Restarted,
    Retrying,
    RunEnd,
    RunEvent,
    RunFailedEvent,
    Started,
    UsageReported,
)
from tokenbus.events.usage import Usage
from tokenbus_services.pricing import PriceTable, TokenCounts, token_counts
from tokenbus_services.runtime.mcp_tool_cache import hint
from tokenbus_services.runtime.metrics import KnownModels, known_tenants
from tokenbus_services.settings import Settings

_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class RunMetrics:
    """Counts public events."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.characters = 0
        """Of all chunks."""
        self._started = counter("tokenbus_runs_started", "Runs that were accepted.")
        self._ended = counter("tokenbus_runs_ended", "Runs that ended, by how.", ["status"])
        self._chunks = counter("tokenbus_chunks", "Chunks written, by kind of block.", ["kind"])
        self._retries = counter("tokenbus_retries", "Attempts that failed and were followed by another.", ["error"])
        self._failures = counter("tokenbus_failures", "Runs that ended failed, by class of the error.", ["error"])
        self._tokens = counter("tokenbus_tokens", "Tokens as providers counted them.", ["direction"])
        self._tools = counter("tokenbus_tool_results", "Tool results that runs received, by outcome.", ["outcome"])
        self._first_text = histogram(
            "tokenbus_first_text_seconds", "From a run's acceptance to its first visible text.", buckets=_SECONDS
        )
        self._whole = histogram("tokenbus_run_seconds", "From a run's acceptance to its end.", buckets=_SECONDS)

    def count(self, event: PublicEvent) -> None:
        match event:
            case Chunk():
                self.characters += len(event.text)
                self._chunks.labels(event.kind).inc()
            case BlockComplete(kind="tool_result"):
                self._tools.labels("error" if event.is_error else "ok").inc()
            case Started():
                self._started.inc()
            case Retrying() | Restarted():
                self._retries.labels(event.error.kind).inc()
            case UsageReported():
                self._tokens.labels("input").inc(event.usage.input or 0)
                self._tokens.labels("output").inc(event.usage.output or 0)
            case RunEnd():
                self._end(event)
            case _:
                pass

    def _end(self, event: RunEnd) -> None:
        self._ended.labels(str(event.__struct_config__.tag)).inc()
        if isinstance(event, RunFailedEvent):
            self._failures.labels(event.error.kind).inc()
        if event.timing.first_visible_ms is not None:
            self._first_text.observe(event.timing.first_visible_ms / 1000)
        self._whole.observe(event.timing.total_ms / 1000)


# The parser's metrics of attempts, by provider and model. A batch that is processed twice, after a takeover, counts
# twice.
#
# Labels are bounded: see `label_names`.

_ATTEMPT_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_NANO = 1e-9


class AttemptMetrics:
    """Counts attempts that ended, and what they used."""

    def __init__(self, registry: CollectorRegistry, settings: Settings) -> None:
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self._models = KnownModels(settings)
        self._tenants = known_tenants(settings)
        self._apis = {name: provider.api for name, provider in settings.providers.items()}
        self._prices = PriceTable(settings.gateway.prices if settings.gateway else {})
        self._attempts = counter(
            "tokenbus_provider_attempts",
            "Attempts that ended, by outcome; for an error its class.",
            ["provider", "model", "outcome"],
        )
        self._first_byte = histogram(
            "tokenbus_provider_first_byte_seconds",
            "From a provider's call to the beginning of its answer.",
            ["provider", "model"],
            buckets=_ATTEMPT_SECONDS,
        )
        self._first_text = histogram(
            "tokenbus_provider_first_text_seconds",
            "From a provider's call to its first visible text.",
            ["provider", "model"],
            buckets=_ATTEMPT_SECONDS,
        )
        self._whole = histogram(
            "tokenbus_provider_call_seconds",
            "From a provider's call to its end.",
            ["provider", "model"],
            buckets=_ATTEMPT_SECONDS,
        )
        self._tokens = counter(
            "tokenbus_provider_tokens", "Tokens that providers reported, by kind.", ["provider", "model", "kind"]
        )
        self._cost = counter(
            "tokenbus_provider_cost",
            "Cost of these tokens by `gateway.prices`, in its currency.",
            ["provider", "model"],
        )
        self._tenant_runs = counter(
            "tokenbus_tenant_runs", "Runs that ended, by configured tenant.", ["tenant", "status"]
        )
        self._tenant_tokens = counter("tokenbus_tenant_tokens", "Tokens by configured tenant.", ["tenant", "kind"])
        self._tenant_cost = counter("tokenbus_tenant_cost", "Cost by configured tenant.", ["tenant"])

    def attempt_over(self, state: RunState, report: AttemptReport) -> None:
        provider, model = self._models.label(report.provider, report.model, ok=report.outcome == "ok")
        self._attempts.labels(provider, model, report.result).inc()
        if report.called_ms:
            if report.answered_ms:
                self._first_byte.labels(provider, model).observe(_seconds(report.called_ms, report.answered_ms))
            if report.visible_ms:
                self._first_text.labels(provider, model).observe(_seconds(report.called_ms, report.visible_ms))
            self._whole.labels(provider, model).observe(_seconds(report.called_ms, report.ended_ms))
        if report.usage is None:
            return
        counts = token_counts(report.usage, self._apis.get(report.provider, ""))
        cost = self._cost_of(report, counts)
        self._cost.labels(provider, model).inc(cost)
        for kind, count in kinds_of(counts):
            self._tokens.labels(provider, model, kind).inc(count)
        if self._tenants:
            tenant = self._tenant(state)
            self._tenant_cost.labels(tenant).inc(cost)
            for kind, count in kinds_of(counts):
                self._tenant_tokens.labels(tenant, kind).inc(count)

    def lifecycle(self, state: RunState, event: RunEvent) -> None:
        """Count one run, if this is its end."""
        if self._tenants and isinstance(event, RunEnd):
            self._tenant_runs.labels(self._tenant(state), str(event.__struct_config__.tag)).inc()

    def _tenant(self, state: RunState) -> str:
        name = tenant_of(state.accepted.metadata)
        return name if name in self._tenants or not name else OTHER

    def _cost_of(self, report: AttemptReport, counts: TokenCounts) -> float:
        names = [f"{report.provider}/{model}" for model in (report.answered_model, report.model) if model]
        fresh, read, write, output = self._prices.nano_per_token(self._prices.name_for(names))
        return _NANO * (
            counts.fresh * fresh + counts.cache_read * read + counts.cache_write * write + counts.output * output
        )


def kinds_of(counts: TokenCounts) -> list[tuple[str, int]]:
    """The counts by kind. Only `reasoning` is a part of another kind, `output`."""
    return [
        ("input", counts.fresh),
        ("cache_read", counts.cache_read),
        ("cache_write", counts.cache_write),
        ("output", counts.output),
        ("reasoning", counts.reasoning),
    ]


def _seconds(begin_ms: int, end_ms: int) -> float:
    return max(0, end_ms - begin_ms) / 1000


# No line has content: neither text nor what a provider wrote in its error, which may quote the request.


log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_COUNTS = ("input", "output", "reasoning", "cache_read", "cache_write")


class RunLog:
    """Writes the lines of all runs of this worker."""

    def attempt_over(self, state: RunState, report: AttemptReport) -> None:
        """Log the end of an attempt; an error as a warning."""
        fields: dict[str, object] = {
            "run": state.run,
            "turn": report.turn,
            "attempt": report.attempt,
            "provider": report.provider,
            "model": report.model,
            "outcome": report.outcome,
            "finish": report.finish or None,
            "request_id": report.request_id or None,
            "response_id": report.response_id[:MAX_NAME_CHARS] or None,
            "waited_ms": report.called_ms and max(0, report.called_ms - report.handed_out_ms),
            "first_byte_ms": report.answered_ms and max(0, report.answered_ms - report.began_ms),
            "first_text_ms": report.visible_ms and max(0, report.visible_ms - report.began_ms),
            "ms": max(0, report.ended_ms - report.began_ms),
            **tokens(report.usage),
        }
        if report.answered_model != report.model:
            fields["answered_model"] = report.answered_model[:MAX_NAME_CHARS] or None
        if error := report.error:
            fields |= described(error)
            fields["hint"] = hint(report.provider, error)
        write = log.warning if report.outcome == "error" else log.info
        write("attempt_ended", **without_blanks(fields))

    def lifecycle(self, state: RunState, event: RunEvent) -> None:
        """Log a start, a retry or an end."""
        match event:
            case Started():
                tenant = tenant_of(state.accepted.metadata) or None
                fields = {"run": event.run, "provider": event.provider, "model": event.model, "tenant": tenant}
                log.info("run_started", **without_blanks(fields))
            case Retrying() | Restarted():
                fallback = event.fallback if isinstance(event, Retrying) else None
                fields = {
                    "run": event.run,
                    "turn": event.turn,
                    "attempt": event.attempt,
                    "next_attempt": event.next_attempt,
                    "delay_ms": event.delay_ms,
                    "restarts": isinstance(event, Restarted) or None,
                    "fallback": fallback and f"{fallback.provider}/{fallback.model}",
                    **described(event.error),
                }
                log.info("attempt_retried", **without_blanks(fields))
            case RunEnd():
                error = event.error if isinstance(event, RunFailedEvent | Incomplete) else None
                fields = {
                    "run": event.run,
                    "finish": event.finish,
                    "turns": event.turn + 1,
                    "attempts": event.attempt,
                    "first_text_ms": event.timing.first_visible_ms,
                    "ms": event.timing.total_ms,
                    **tokens(event.usage),
                    **(described(error) if error else {}),
                    "status": str(event.__struct_config__.tag),  # the run's, not that of the provider's response
                    "http_status": error and error.status,
                }
                log.info("run_ended", **without_blanks(fields))
            case _:
                pass


def described(error: ErrorInfo) -> dict[str, object]:
    """The error without its message, which may quote the request."""
    where = error.where if error.code in ("key_missing", "key_unusable") else None
    return {"class": error.kind, "code": error.code[:MAX_NAME_CHARS], "status": error.status, "where": where}


def tokens(usage: Usage | None) -> dict[str, object]:
    """The token counts, as the provider reported them."""
    return {f"{name}_tokens": getattr(usage, name) for name in _COUNTS} if usage else {}


def without_blanks(fields: Mapping[str, object]) -> dict[str, object]:
    """Leave out fields without a value."""
    return {name: value for name, value in fields.items() if value is not None}
