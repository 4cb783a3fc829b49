"""Records spans of runs. None of it is on the way of a chunk: a span is recorded once, at its end."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Protocol

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter

from tokenbus.core.run.attempts import AttemptReport
from tokenbus.errors import SettingsError
from tokenbus.events.requests import Generate, Message
from tokenbus_services.settings import OtelSettings, Settings
from tokenbus_services.telemetry.trace_context import (
    MAX_CONTENT_CHARS,
    RunTrace,
    Span,
    Value,
    remote_trace,
    run_trace,
    traceparent_of,
    working_for,
)

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

CLOSE_S = 2.0
"""How long a worker that stops waits for the last spans to be sent."""
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_FIXED_RATIOS = {"always_on": 1.0, "always_off": 0.0}


class Exporter(Protocol):
    """Takes spans and measurements, sends them from its own thread, and never blocks."""

    def add(self, trace: RunTrace, span: Span) -> bool:
        """Queue a span; False if the queue is full."""
        ...

    def measure(self, report: AttemptReport, attributes: Mapping[str, Value | None], tokens: Mapping[str, int]) -> None:
        """Record the metrics of one attempt."""
        ...

    def close(self) -> None:
        """Send the rest."""
        ...


class RunTracer:
    """The spans of one process."""

    def __init__(self, exporter: Exporter, *, ratio: float, content: bool, dropped: Callable[[str], None]) -> None:
        """``ratio``: the share of traces that are sampled if the publisher does not say. ``dropped``: called with the
        reason for each span that is not sent.
        """
        self._exporter = exporter
        self._ratio = ratio
        self.content = content
        """Whether spans have the content of requests and answers."""
        self._dropped = dropped

    def trace(self, run: str, traceparent: str | None) -> RunTrace | None:
        """The run's trace; None if it is not sampled."""
        trace = run_trace(run, traceparent, ratio=self._ratio)
        return trace if trace.sampled else None

    def trace_of(self, what: str, traceparent: str) -> RunTrace | None:
        """The trace, begun by another service, that ``what`` belongs to; None if it is missing or not sampled."""
        trace = remote_trace(what, traceparent)
        return trace if trace and trace.sampled else None

    def handed_on(self, run: str, traceparent: str | None, *what: object) -> str | None:
        """The context that makes a span of the run, sampled or not, the parent of another service's."""
        trace = run_trace(run, traceparent, ratio=self._ratio)
        return traceparent_of(trace, trace.span(*what))

    def working(self, run: str, traceparent: str | None, *what: object) -> AbstractContextManager[None]:
        """What is done meanwhile is done for that span: requests to the blob store are beneath it."""
        trace = self.trace(run, traceparent)
        return working_for(traceparent_of(trace, trace.span(*what))) if trace else nullcontext()

    def record(self, trace: RunTrace, span: Span) -> None:
        """Record a span that has ended. Never raises, never blocks."""
        if not self._exporter.add(trace, span):
            self._dropped("queue_full")

    def measure(self, report: AttemptReport, attributes: Mapping[str, Value | None], tokens: Mapping[str, int]) -> None:
        """Record the metrics of one attempt, of a sampled trace or not."""
        self._exporter.measure(report, attributes, tokens)

    async def close(self) -> None:
        """Send what is recorded, if it can be sent soon."""
        closing = threading.Thread(target=self._exporter.close, name="last spans", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_S)


class _NoTracer(RunTracer):
    """OpenTelemetry is off: no trace is sampled, and publishers' contexts are handed on as they came."""

    def __init__(self) -> None:
        self.content = False

    def trace(self, run: str, traceparent: str | None) -> None:
        return None

    def trace_of(self, what: str, traceparent: str) -> None:
        return None

    def handed_on(self, run: str, traceparent: str | None, *what: object) -> str | None:
        return traceparent or None

    def record(self, trace: RunTrace, span: Span) -> None:
        """Do nothing."""

    def measure(self, report: AttemptReport, attributes: Mapping[str, Value | None], tokens: Mapping[str, int]) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


NO_TRACER: RunTracer = _NoTracer()


def open_tracer(
    settings: Settings, service: str, registry: CollectorRegistry, env: Mapping[str, str] = os.environ
) -> RunTracer:
    """The tracer of this process; one that does nothing if OpenTelemetry is off. Raises SettingsError if its packages
    are missing.

    It is on with a table `[otel]`, or with an endpoint in the environment.
    """
    drops = Counter(
        "tokenbus_telemetry_dropped",
        "Spans that were not sent, by reason: `queue_full`, `export_failed`.",
        ["reason"],
        registry=registry,
    )
    table = settings.otel
    if not is_enabled(table, env):
        return NO_TRACER
    if not all(map(_is_installed, _PACKAGES)):
        problem = "needs the extra `otel` of tokenbus (from a checkout: pip install '.[services,otel]')"
        if table is None:
            log.warning("otel_not_installed", problem=problem)
            return NO_TRACER
        raise SettingsError("settings", "otel", problem)
    from tokenbus_services.telemetry.otlp_export import OtlpExport

    table = table or OtelSettings()
    exporter = OtlpExport(
        service,
        endpoint=table.endpoint,
        failed=lambda count: drops.labels("export_failed").inc(count),
        env=env,
    )
    ratio = ratio_of(table, env)
    log.info("otel_enabled", endpoint=exporter.shown_endpoint, sample=ratio, content=table.content)
    return RunTracer(exporter, ratio=ratio, content=table.content, dropped=lambda reason: drops.labels(reason).inc())


def is_enabled(table: OtelSettings | None, env: Mapping[str, str]) -> bool:
    """Whether spans are wanted at all."""
    if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    return table is not None or any(env.get(name) for name in _ENDPOINTS)


def ratio_of(table: OtelSettings, env: Mapping[str, str]) -> float:
    """The share of traces to sample: the settings' or the environment's. Raises SettingsError."""
    if table.sample is not None:
        return table.sample
    sampler = env.get("OTEL_TRACES_SAMPLER", "").strip().lower().removeprefix("parentbased_")
    if sampler == "traceidratio":
        given = env.get("OTEL_TRACES_SAMPLER_ARG", "1").strip()
        try:
            ratio = float(given)
        except ValueError:
            ratio = -1.0
        if not 0 <= ratio <= 1:
            raise SettingsError("environment", "OTEL_TRACES_SAMPLER_ARG", f"{given!r} is not 0 to 1")
        return ratio
    return _FIXED_RATIOS.get(sampler, 1.0)


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


# Names of OpenTelemetry's GenAI conventions (opentelemetry-semantic-conventions 0.66b2). Pure.

_BY_API = {"anthropic": "anthropic", "gemini": "gcp.gemini", "gemini-interactions": "gcp.gemini"}
_BY_NAME = {
    "cohere": "cohere",
    "deepseek": "deepseek",
    "groq": "groq",
    "mistral": "mistral_ai",
    "perplexity": "perplexity",
    "xai": "x_ai",
}
"""Vendors that speak another's API, by their usual name in the settings."""


def provider_of(name: str, api: str) -> str:
    """The conventions' name of a configured provider; its own name for an API that they do not know."""
    vendor = _BY_NAME.get(name.lower()) or _BY_API.get(api)
    return vendor or ("openai" if api.startswith("openai-") else name)


def operation_of(api: str) -> str:
    """The conventions' name of a provider call."""
    return "generate_content" if api in ("gemini", "openai-images") else "chat"


OPTIONS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")


def request_options(request: Generate) -> dict[str, int | float]:
    """The options of a request that spans name, as far as it sets them."""
    return {name: value for name in OPTIONS if (value := getattr(request, name)) is not None}


def named_options(options: Mapping[str, int | float]) -> dict[str, Value | None]:
    """Options by the conventions' names."""
    return {f"gen_ai.request.{name}": value for name, value in options.items()}


def request_attributes(request: Generate, *, content: bool, history: Sequence[Message] = ()) -> dict[str, Value | None]:
    attributes: dict[str, Value | None] = {
        "gen_ai.request.model": request.model,
        "gen_ai.request.stream": request.stream,
        **named_options(request_options(request)),
    }
    if content:
        attributes["gen_ai.input.messages"] = shown_json([*request.messages, *history])
        attributes["gen_ai.system_instructions"] = shown_json(request.system) if request.system else None
    return attributes


def shown_json(value: object) -> str:
    """The value as JSON, cut to `MAX_CONTENT_CHARS`."""
    return msgspec.json.encode(value).decode(errors="replace")[:MAX_CONTENT_CHARS]
