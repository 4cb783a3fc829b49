"""Ids of traces and spans, and what decides whether a run is traced."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from tokenbus.client.publishing import with_trace_context
from tokenbus.core.request.bounds import is_traceparent
from tokenbus.events.requests import Generate, Message
from tokenbus_services.telemetry import run_trace, traceparent_of

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_run_continues_its_publishers_trace() -> None:
    trace = run_trace("r1", PARENT, ratio=0)
    assert f"{trace.trace_id:x}" == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert f"{trace.publisher_span:016x}" == "00f067aa0ba902b7"
    assert trace.sampled
    assert not run_trace("r1", PARENT[:-2] + "00", ratio=1).sampled


def test_every_service_finds_the_same_ids_for_a_run_by_itself() -> None:
    first, second = run_trace("r1", None, ratio=1), run_trace("r1", "", ratio=1)
    assert first == second
    assert first.attempt(2) == second.attempt(2)
    ids = {first.root, first.attempt(1), first.attempt(2), first.tool(0, 1), first.span("intake")}
    assert len(ids) == 5
    assert run_trace("r2", None, ratio=1).trace_id != first.trace_id


def test_the_ratio_is_the_share_of_runs_that_are_traced() -> None:
    sampled = sum(run_trace(f"run{n}", None, ratio=0.25).sampled for n in range(4000))
    assert 800 < sampled < 1200
    assert not run_trace("r", None, ratio=0).sampled
    assert all(run_trace(f"run{n}", None, ratio=1).sampled for n in range(100))


@pytest.mark.parametrize(
    "bad", ["", "00-xyz", PARENT + "\n", PARENT.replace("4bf", "4BF"), f"00-{'0' * 32}-{'1' * 16}-01"]
)
def test_what_is_no_context_begins_a_trace_of_its_own(bad: str) -> None:
    assert run_trace("r1", bad, ratio=1) == run_trace("r1", None, ratio=1)


def test_what_is_handed_on_is_a_context_again() -> None:
    trace = run_trace("r1", PARENT, ratio=1)
    handed = traceparent_of(trace, trace.tool(0, 3))
    assert is_traceparent(handed)
    assert run_trace("other", handed, ratio=1).trace_id == trace.trace_id


REQUEST = Generate(provider="p", model="m", messages=[Message(role="user", content="hi")])


def spanning(monkeypatch: pytest.MonkeyPatch, *, valid: bool) -> None:
    context = SimpleNamespace(is_valid=valid, trace_id=0xABC, span_id=0xDEF, trace_flags=1)
    module = ModuleType("opentelemetry.trace")
    module.get_current_span = lambda: SimpleNamespace(get_span_context=lambda: context)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", module)


def test_the_client_makes_its_current_span_the_runs_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    spanning(monkeypatch, valid=True)
    expected = f"00-{0xABC:032x}-{0xDEF:016x}-01"
    assert getattr(with_trace_context(REQUEST), "traceparent") == expected  # noqa: B009
    assert with_trace_context({"model": "m"}) == {"model": "m", "traceparent": expected}
    assert with_trace_context({"traceparent": PARENT}) == {"traceparent": PARENT}, "the request's own comes first"


def test_the_client_adds_nothing_without_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    spanning(monkeypatch, valid=False)
    assert with_trace_context(REQUEST) is REQUEST
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    assert with_trace_context(REQUEST) is REQUEST
    assert "opentelemetry.trace" not in sys.modules
