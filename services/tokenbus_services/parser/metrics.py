"""The parser's metrics of its runs. A batch that is processed twice, after a takeover, counts twice.

No label holds anything from a request: kinds, statuses and error classes are few and known.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from tokenbus.bus.activity import OTHER
from tokenbus.core.request.bounds import tenant_of
from tokenbus.core.run.attempts.attempt_report import AttemptReport
from tokenbus.core.run.state import RunState
from tokenbus.events.public import (
    BlockComplete,
    Chunk,
    PublicEvent,
    Restarted,
    Retrying,
    RunEnd,
    RunEvent,
    RunFailedEvent,
    Started,
    UsageReported,
)
from tokenbus_services.pricing import PriceTable, TokenCounts, token_counts
from tokenbus_services.runtime.metrics import KnownModels, known_tenants
from tokenbus_services.settings import Settings

_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class RunMetrics:
    """Counts public events."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.characters = 0
        """Of all chunks."""
        self._started = Counter("tokenbus_runs_started", "Runs that were accepted.", registry=registry)
        self._ended = Counter("tokenbus_runs_ended", "Runs that ended, by how.", ["status"], registry=registry)
        self._chunks = Counter("tokenbus_chunks", "Chunks written, by kind of block.", ["kind"], registry=registry)
        self._retries = Counter(
            "tokenbus_retries", "Attempts that failed and were followed by another.", ["error"], registry=registry
        )
        self._failures = Counter(
            "tokenbus_failures", "Runs that ended failed, by class of the error.", ["error"], registry=registry
        )
        self._tokens = Counter("tokenbus_tokens", "Tokens as providers counted them.", ["direction"], registry=registry)
        self._tools = Counter(
            "tokenbus_tool_results", "Tool results that runs received, by outcome.", ["outcome"], registry=registry
        )
        self._first_text = Histogram(
            "tokenbus_first_text_seconds",
            "From a run's acceptance to its first visible text.",
            registry=registry,
            buckets=_SECONDS,
        )
        self._whole = Histogram(
            "tokenbus_run_seconds", "From a run's acceptance to its end.", registry=registry, buckets=_SECONDS
        )

    def count(self, event: PublicEvent) -> None:
        """Count one written event."""
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
        self._models = KnownModels(settings)
        self._tenants = known_tenants(settings)
        self._apis = {name: provider.api for name, provider in settings.providers.items()}
        self._prices = PriceTable(settings.gateway.prices if settings.gateway else {})
        self._attempts = Counter(
            "tokenbus_provider_attempts",
            "Attempts that ended, by outcome; for an error its class.",
            ["provider", "model", "outcome"],
            registry=registry,
        )
        self._first_byte = Histogram(
            "tokenbus_provider_first_byte_seconds",
            "From a provider's call to the beginning of its answer.",
            ["provider", "model"],
            registry=registry,
            buckets=_ATTEMPT_SECONDS,
        )
        self._first_text = Histogram(
            "tokenbus_provider_first_text_seconds",
            "From a provider's call to its first visible text.",
            ["provider", "model"],
            registry=registry,
            buckets=_ATTEMPT_SECONDS,
        )
        self._whole = Histogram(
            "tokenbus_provider_call_seconds",
            "From a provider's call to its end.",
            ["provider", "model"],
            registry=registry,
            buckets=_ATTEMPT_SECONDS,
        )
        self._tokens = Counter(
            "tokenbus_provider_tokens",
            "Tokens that providers reported, by kind.",
            ["provider", "model", "kind"],
            registry=registry,
        )
        self._cost = Counter(
            "tokenbus_provider_cost",
            "Cost of these tokens by `gateway.prices`, in its currency.",
            ["provider", "model"],
            registry=registry,
        )
        self._tenant_runs = Counter(
            "tokenbus_tenant_runs", "Runs that ended, by configured tenant.", ["tenant", "status"], registry=registry
        )
        self._tenant_tokens = Counter(
            "tokenbus_tenant_tokens", "Tokens by configured tenant.", ["tenant", "kind"], registry=registry
        )
        self._tenant_cost = Counter("tokenbus_tenant_cost", "Cost by configured tenant.", ["tenant"], registry=registry)

    def attempt_over(self, state: RunState, report: AttemptReport) -> None:
        """Count one attempt."""
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
