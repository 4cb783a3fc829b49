"""Spans as received, the settings that select them, and an unavailable collector."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed: make setup")

from tests.collector import Collector, collector
from tests.waiting import eventually
from tokenbus.core.run.attempts import AttemptReport
from tokenbus.core.run.blocks.block_table import BlockTable
from tokenbus.core.run.state import RunState
from tokenbus.errors import SettingsError
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import Accepted, RunLimits
from tokenbus.events.public import BlockComplete, Completed, Timing
from tokenbus.events.requests import Generate
from tokenbus.events.usage import Usage
from tokenbus_services.parser.run_spans import RunSpans
from tokenbus_services.settings import DEFAULT_PROVIDERS, OtelSettings, ProviderSettings, Settings
from tokenbus_services.telemetry import RunTracer, Span, open_tracer, run_trace
from tokenbus_services.telemetry.tracer import is_enabled, ratio_of, request_options

PROVIDERS = {
    **DEFAULT_PROVIDERS,
    "groq": ProviderSettings(api="openai-chat", base_url="https://api.groq.example/openai"),
}
STATE = RunState(
    "r1",
    Accepted(
        provider="groq",
        model="llama",
        on_failure="fail",
        max_tool_depth=0,
        rules=RunLimits(),
        tools=[],
        options=request_options(Generate(provider="groq", model="llama", messages=[], temperature=0.5, top_k=7)),
    ),
    1_000_000,
    BlockTable(0, 1, 100, 0),
)
TEXT = BlockComplete(run="r1", seq=1, turn=0, attempt=1, block=0, kind="text", content="a secret garden")


@pytest.fixture
def received() -> Iterator[Collector]:
    with collector() as one:
        yield one


def tracer_to(received: Collector, registry: CollectorRegistry | None = None, **table: Any) -> RunTracer:
    settings = Settings(providers=PROVIDERS, otel=OtelSettings(endpoint=received.url, **table))
    made = open_tracer(settings, "parser", registry or CollectorRegistry(), {"OTEL_BSP_SCHEDULE_DELAY": "50"})
    assert made
    return made


def report(**changes: Any) -> AttemptReport:
    fields: dict[str, Any] = {
        "turn": 0,
        "attempt": 1,
        "provider": "groq",
        "model": "llama",
        "outcome": "ok",
        "finish": "stop",
        "usage": Usage(input=100, output=20, cache_read=40, reasoning=5),
        "handed_out_ms": 1_000_000,
        "called_ms": 1_000_500,
        "answered_ms": 1_000_750,
        "ended_ms": 1_002_000,
        "answered_model": "llama-3",
        "response_id": "resp-1",
        "request_id": "req-1",
    }
    return AttemptReport(**{**fields, **changes})


async def exported(received: Collector, *reports: AttemptReport, **table: Any) -> Any:
    """The attempt spans of a run, as they arrived."""
    tracer = tracer_to(received, **table)
    spans = RunSpans(tracer, Settings(providers=PROVIDERS))
    spans.block_complete(STATE, TEXT)
    for one in reports:
        spans.attempt_over(STATE, one)
    await tracer.close()
    return received.spans()


async def test_an_attempt_has_the_names_of_the_gen_ai_conventions(received: Collector) -> None:
    [span] = await exported(received, report())
    assert span.name == "chat llama"
    assert span.service == "tokenbus-parser"
    assert span.kind == 3, "client"
    assert (span.begin_ns, span.end_ns) == (1_000_500_000_000, 1_002_000_000_000)
    assert not span.failed
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "groq",
        "gen_ai.request.model": "llama",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 7,
        "server.address": "api.groq.example",
        "server.port": 443,
        "gen_ai.response.model": "llama-3",
        "gen_ai.response.id": "resp-1",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.time_to_first_chunk": 0.25,
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 40,
        "gen_ai.usage.reasoning.output_tokens": 5,
        "tokenbus.run.id": "r1",
        "tokenbus.request_id": "req-1",
    }
    assert {name: span.attributes.get(name) for name in expected} == expected


async def test_an_error_has_its_class_and_not_its_message(received: Collector) -> None:
    error = ErrorInfo(code="http_404", kind="not_found", message="no model 'a secret garden'", status=404)
    [span] = await exported(received, report(outcome="error", error=error, usage=None))
    assert span.failed
    assert span.attributes["error.type"] == "not_found"
    assert span.attributes["http.response.status_code"] == 404
    assert b"garden" not in received.raw


async def test_content_is_sent_only_if_it_is_asked_for(received: Collector) -> None:
    [span] = await exported(received, report())
    assert "gen_ai.output.messages" not in span.attributes
    assert b"garden" not in received.raw
    [span] = await exported(received, report(), content=True)
    assert "a secret garden" in span.attributes["gen_ai.output.messages"]


async def test_the_run_hangs_under_its_publisher_and_its_attempts_under_the_run(received: Collector) -> None:
    tracer = tracer_to(received)
    spans = RunSpans(tracer, Settings(providers=PROVIDERS))
    spans.attempt_over(STATE, report())
    spans.lifecycle(STATE, Completed(run="r1", seq=2, turn=0, attempt=1, finish="stop", timing=Timing(total_ms=3000)))
    await tracer.close()
    by_name = {span.name: span for span in received.spans()}
    root = by_name["run llama"]
    assert root.parent_id == ""
    assert by_name["chat llama"].parent_id == root.span_id
    assert root.end_ns - root.begin_ns == 3_000_000_000
    assert {"gen_ai.client.operation.duration", "gen_ai.client.token.usage"} <= received.metrics()


def one_span(n: int) -> Span:
    return Span(name=f"s{n}", span_id=n + 1, parent_id=0, begin_ms=1, end_ms=2, attributes={})


async def test_spans_that_a_collector_refuses_are_dropped_and_counted(received: Collector) -> None:
    received.refuses = True
    registry = CollectorRegistry()
    tracer = tracer_to(received, registry)
    trace = run_trace("r1", None, ratio=1)
    for n in range(3000):
        tracer.record(trace, one_span(n))

    def dropped(reason: str) -> float:
        return registry.get_sample_value("tokenbus_telemetry_dropped_total", {"reason": reason}) or 0

    assert dropped("queue_full") > 0
    received.refuses = False
    tracer.record(trace, one_span(9999))
    await tracer.close()


async def test_an_unavailable_collector_delays_no_worker() -> None:
    settings = Settings(otel=OtelSettings(endpoint="http://127.0.0.1:9"))
    registry = CollectorRegistry()
    tracer = open_tracer(settings, "parser", registry, {"OTEL_BSP_SCHEDULE_DELAY": "20"})
    assert tracer
    tracer.record(run_trace("r1", None, ratio=1), one_span(1))
    await tracer.close()


@pytest.mark.parametrize(
    ("table", "env", "enabled"),
    [
        (None, {}, False),
        (OtelSettings(), {}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        (OtelSettings(), {"OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_it_is_on_with_a_table_or_an_endpoint(table: OtelSettings | None, env: dict[str, str], enabled: bool) -> None:
    assert is_enabled(table, env) is enabled


@pytest.mark.parametrize(
    ("sample", "env", "ratio"),
    [
        (None, {}, 1.0),
        (0.1, {"OTEL_TRACES_SAMPLER": "always_off"}, 0.1),
        (None, {"OTEL_TRACES_SAMPLER": "always_off"}, 0.0),
        (None, {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"}, 0.25),
    ],
)
def test_the_settings_come_before_the_standard_variables(
    sample: float | None, env: dict[str, str], ratio: float
) -> None:
    assert ratio_of(OtelSettings(sample=sample), env) == ratio


def test_a_ratio_that_is_none_is_refused_by_name() -> None:
    env = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "half"}
    with pytest.raises(SettingsError, match="OTEL_TRACES_SAMPLER_ARG"):
        ratio_of(OtelSettings(), env)


def test_it_imports_nothing_while_it_is_off() -> None:
    """Except what redis-py imports by itself if the package is there: its metrics."""
    code = (
        "import sys, tokenbus_services.parser.app, tokenbus_services.fetcher.app, tokenbus_services.policy_stage.app\n"
        "ours = ('opentelemetry.exporter', 'opentelemetry.sdk.trace', 'tokenbus_services.telemetry.otlp_export')\n"
        "print([name for name in sys.modules if name.startswith(ours)])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


async def test_spans_arrive_within_seconds_while_the_worker_runs(received: Collector) -> None:
    tracer = tracer_to(received)
    tracer.record(run_trace("r1", None, ratio=1), one_span(1))
    await eventually(received.spans)
    await tracer.close()
