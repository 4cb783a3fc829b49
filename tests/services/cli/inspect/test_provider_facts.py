"""How the providers did lately, from what parsers and fetchers counted."""

from __future__ import annotations

from tokenbus.bus.activity import SLOT_MS, Activity, Failure, ProviderActivity
from tokenbus_services.cli.inspect import failing_models, silent_models

LIMITED = Failure(provider="p", model="m", kind="rate_limit", code="rate_limit_exceeded", status=429)
OVERLOADED = Failure(provider="p", model="m", kind="overloaded", code="overloaded", status=529)
NOW = 100
NOW_MS = NOW * SLOT_MS + 3_000


def slot(*, attempts: int = 0, errors: int = 0, model: str = "m", **fields: object) -> Activity:
    calls = {("p", model): ProviderActivity(attempts=attempts, errors=errors)} if attempts else {}
    return Activity(providers=calls, **fields)  # pyright: ignore[reportArgumentType]


def test_a_model_of_which_most_calls_fail_is_down_and_its_commonest_failure_is_named() -> None:
    slots = {
        NOW - 6: slot(attempts=50),
        NOW - 2: slot(attempts=4, errors=3, failures={LIMITED: 2, OVERLOADED: 1}),
        NOW: slot(attempts=4, errors=3, failures={LIMITED: 3}),
    }
    [found] = failing_models(slots, NOW_MS)
    assert (found.failure, found.failed, found.all_failed, found.attempts) == (LIMITED, 5, 6, 8)
    assert (found.since_ms, found.last_ms) == (2 * SLOT_MS + 3_000, 3_000)
    assert found.is_down


def test_a_few_failures_among_many_calls_are_no_outage() -> None:
    [found] = failing_models({NOW: slot(attempts=20, errors=2, failures={LIMITED: 2})}, NOW_MS)
    assert (found.is_down, found.is_over) == (False, False)


def test_calls_that_ended_well_afterwards_end_a_failure() -> None:
    slots = {NOW - 3: slot(attempts=9, errors=9, failures={LIMITED: 9}), NOW: slot(attempts=1)}
    [found] = failing_models(slots, NOW_MS)
    assert (found.is_over, found.is_down) == (True, False)


def test_a_misspelt_model_is_down_though_its_provider_answers_others() -> None:
    unknown = Failure(provider="p", model="typo", kind="not_found", code="model_not_found", status=404)
    both = {("p", "m"): ProviderActivity(attempts=90), ("p", "other"): ProviderActivity(attempts=3, errors=3)}
    slots = {NOW: Activity(providers=both, failures={unknown: 3}), NOW - 1: slot(attempts=90)}
    [found] = failing_models(slots, NOW_MS)
    assert (found.failure.model, found.attempts, found.is_down) == ("typo", 3, True)


def test_silent_calls_are_those_that_each_fetcher_reported_last() -> None:
    before = {("p", "m", "a"): 5, ("p", "m", "b"): 2, ("p", "m", "gone"): 9}
    slots = {
        NOW - 2: slot(silent={("p", "m", "gone"): 9}),
        NOW - 1: slot(silent=before | {("p", "m", "gone"): 0}, silent_since={("p", "m", "b"): NOW_MS - 70_000}),
        NOW: slot(silent={("p", "m", "a"): 1}, silent_since={("p", "m", "a"): NOW_MS - 40_000}),
    }
    [found] = silent_models(slots, NOW_MS)
    assert (found.calls, found.since_ms, found.answered) == (3, 70_000, 0)
    assert found.is_down
    slots[NOW - 1].providers = {("p", "m"): ProviderActivity(attempts=4, errors=1)}
    [found] = silent_models(slots, NOW_MS)
    assert (found.answered, found.is_down) == (3, False)


def test_one_slow_answer_is_no_outage() -> None:
    [found] = silent_models({NOW: slot(silent={("p", "m", "a"): 1})}, NOW_MS)
    assert not found.is_down
