"""Metrics by provider, model and tenant, and what bounds their labels."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tokenbus.core.run.attempts import AttemptReport
from tokenbus.core.run.blocks.block_table import BlockTable
from tokenbus.core.run.state import RunState
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import Accepted, RunLimits
from tokenbus.events.public import Completed, Timing
from tokenbus.events.usage import Usage
from tokenbus_services.parser.metrics import AttemptMetrics
from tokenbus_services.runtime.metrics import MAX_MODELS, MAX_UNHEARD, KnownModels
from tokenbus_services.settings import DEFAULT_PROVIDERS, GatewaySettings, LimitSettings, RateSettings, Settings
from tokenbus_services.settings.tables.gateway import PriceSettings

PRICES = {"openai-chat/gpt": PriceSettings(input=2.0, output=10.0, cache_read=0.5)}
SETTINGS = Settings(providers=DEFAULT_PROVIDERS, gateway=GatewaySettings(prices=PRICES))


def state(tenant: str = "") -> RunState:
    accepted = Accepted(
        provider="openai-chat",
        model="gpt",
        on_failure="fail",
        max_tool_depth=0,
        rules=RunLimits(),
        tools=[],
        metadata={"tenant": tenant},
    )
    return RunState("r", accepted, 0, BlockTable(0, 1, 100, 0))


def report(**changes: Any) -> AttemptReport:
    fields: dict[str, Any] = {
        "turn": 0,
        "attempt": 1,
        "provider": "openai-chat",
        "model": "gpt",
        "outcome": "ok",
        "handed_out_ms": 1000,
        "called_ms": 2000,
        "answered_ms": 2300,
        "visible_ms": 2500,
        "ended_ms": 4000,
    }
    return AttemptReport(**{**fields, **changes})


class Counted:
    def __init__(self, settings: Settings = SETTINGS) -> None:
        self._registry = CollectorRegistry()
        self.metrics = AttemptMetrics(self._registry, settings)

    def value(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(f"tokenbus_{name}", labels)


GPT = {"provider": "openai-chat", "model": "gpt"}


def test_an_attempt_counts_under_its_provider_and_model_with_times_from_its_call() -> None:
    counted = Counted()
    counted.metrics.attempt_over(state(), report())
    assert counted.value("provider_attempts_total", **GPT, outcome="ok") == 1
    assert counted.value("provider_first_byte_seconds_sum", **GPT) == pytest.approx(0.3)
    assert counted.value("provider_first_text_seconds_sum", **GPT) == pytest.approx(0.5)
    assert counted.value("provider_call_seconds_sum", **GPT) == pytest.approx(2.0)


def test_an_error_counts_under_its_class() -> None:
    counted = Counted()
    counted.metrics.attempt_over(state(), report())
    error = ErrorInfo(code="http_529", kind="overloaded", message="m")
    counted.metrics.attempt_over(state(), report(outcome="error", error=error))
    assert counted.value("provider_attempts_total", **GPT, outcome="overloaded") == 1


def test_tokens_count_by_kind_and_cost_as_the_gateway_prices_them() -> None:
    counted = Counted()
    usage = Usage(input=1_000_000, output=100_000, cache_read=400_000, reasoning=30_000)
    counted.metrics.attempt_over(state(), report(usage=usage))
    kinds = {"input": 600_000, "cache_read": 400_000, "output": 100_000, "reasoning": 30_000, "cache_write": 0}
    for kind, count in kinds.items():
        assert counted.value("provider_tokens_total", **GPT, kind=kind) == count
    assert counted.value("provider_cost_total", **GPT) == pytest.approx(0.6 * 2.0 + 0.4 * 0.5 + 0.1 * 10.0)


def test_tenants_are_distinguished_if_the_settings_name_some() -> None:
    limits = LimitSettings(tenants={"acme": RateSettings()})
    counted = Counted(Settings(providers=DEFAULT_PROVIDERS, limits=limits))
    for tenant in ("acme", "stranger", ""):
        counted.metrics.attempt_over(state(tenant), report(usage=Usage(input=10, output=1)))
        end = Completed(run="r", seq=0, turn=0, attempt=1, finish="stop", timing=Timing(total_ms=1))
        counted.metrics.lifecycle(state(tenant), end)
    for label in ("acme", "other", ""):
        assert counted.value("tenant_tokens_total", tenant=label, kind="input") == 10
        assert counted.value("tenant_runs_total", tenant=label, status="completed") == 1


def test_no_tenant_is_a_label_if_the_settings_name_none() -> None:
    counted = Counted()
    counted.metrics.attempt_over(state("acme"), report(usage=Usage(input=10)))
    assert counted.value("tenant_tokens_total", tenant="acme", kind="input") is None


def test_models_that_never_answered_are_named_and_few_of_them_are_labels() -> None:
    known = KnownModels(SETTINGS)
    assert known.label("openai-chat", "gtp", ok=False) == ("openai-chat", "gtp")
    labels = {known.label("openai-chat", f"gtp-{i}", ok=False) for i in range(MAX_UNHEARD + 50)}
    assert len(labels) == MAX_UNHEARD
    assert known.label("openai-chat", "another", ok=False) == ("openai-chat", "other")
    assert known.label("openai-chat", "gtp", ok=False) == ("openai-chat", "gtp")
    assert KnownModels(SETTINGS).label("openai-chat", "x" * 10_000, ok=False) == ("openai-chat", "other")
    assert known.label("openai-chat", "gpt", ok=True) == ("openai-chat", "gpt")
    assert known.label("openai-chat", "gpt", ok=False) == ("openai-chat", "gpt")
    assert known.label("gone", "gpt", ok=True) == ("other", "other")


def test_the_models_that_become_labels_by_answering_are_bounded_and_those_of_the_settings_are_not() -> None:
    gateway = GatewaySettings(models=("gemini/named",), aliases={"fast": ("gemini/small",)})
    known = KnownModels(Settings(providers=DEFAULT_PROVIDERS, gateway=gateway))
    labels = {known.label("gemini", f"m{i}", ok=True) for i in range(MAX_MODELS + 50)}
    assert len(labels) == MAX_MODELS + 1
    assert ("gemini", "other") in labels
    assert known.label("gemini", "named", ok=False) == ("gemini", "named")
    assert known.label("gemini", "small", ok=False) == ("gemini", "small")
