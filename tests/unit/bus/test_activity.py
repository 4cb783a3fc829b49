"""What a deployment did in a slot of time, as its parsers write it and the console reads it."""

from __future__ import annotations

from typing import Any

import pytest

from tokenbus.bus.activity import (
    ATTEMPTS,
    BOUNDS_MS,
    CHARACTERS,
    ENDED,
    ERRORS,
    FAILED,
    LIMITED,
    MAX_NAME_CHARS,
    activity_of,
    bucket_field,
    failure_of,
    open_field,
    percentile_ms,
    provider_field,
    silent_fields,
)
from tokenbus.events.error_info import ErrorInfo


def test_a_slot_is_read_as_it_was_written() -> None:
    written = {
        ENDED: 7,
        FAILED: 2,
        CHARACTERS: 900,
        open_field(0): 3,
        open_field(5): 4,
        provider_field("anthropic", "claude", ATTEMPTS): 9,
        provider_field("anthropic", "claude", ERRORS): 3,
        provider_field("anthropic", "claude", LIMITED): 1,
        bucket_field("anthropic", "claude", 120): 6,
        "a field of a newer version": 1,
        provider_field("anthropic", "claude", "fb999"): 1,
    }
    found = activity_of({name.encode(): b"%d" % count for name, count in written.items()})
    assert (found.ended, found.failed, found.characters, found.open) == (7, 2, 900, 7)
    [(name, calls)] = found.providers.items()
    assert name == ("anthropic", "claude")
    assert (calls.attempts, calls.errors, calls.limited, sum(calls.first_byte)) == (9, 3, 1, 6)
    assert percentile_ms(calls.first_byte, 0.5) in range(100, 151)


@pytest.mark.parametrize("ms", [0, 10, 11, 999, 1000, 59_999, 60_000, 10**9])
def test_a_time_is_counted_in_a_bucket_around_it(ms: int) -> None:
    found = activity_of({bucket_field("p", "m", ms).encode(): b"1"})
    [calls] = found.providers.values()
    bucket = calls.first_byte.index(1)
    assert bucket == len(BOUNDS_MS) or ms <= BOUNDS_MS[bucket]
    assert bucket == 0 or ms > BOUNDS_MS[bucket - 1]


def test_percentiles_are_between_the_bounds_of_their_buckets() -> None:
    counts = [0] * (len(BOUNDS_MS) + 1)
    assert percentile_ms(counts, 0.5) is None
    counts[0], counts[10] = 98, 2
    assert percentile_ms(counts, 0.5) in range(1, 11)
    assert percentile_ms(counts, 0.99) in range(BOUNDS_MS[9], BOUNDS_MS[10] + 1)


@pytest.mark.parametrize("status", [429, None])
def test_a_failure_is_read_as_it_was_written_for_all_names(status: int | None) -> None:
    error = ErrorInfo(code="x\x1fy" + "z" * 200, kind="rate_limit", message="secret", status=status)
    failure = failure_of("p", "m\n\x1f" + "n" * 200, error)
    assert failure
    assert (failure.model[:3], len(failure.model), failure.code[:3]) == ("m??", MAX_NAME_CHARS, "x?y")
    assert "secret" not in failure.field
    assert activity_of({failure.field.encode(): b"3"}).failures == {failure: 3}
    assert activity_of({failure.merged.field.encode(): b"1"}).failures == {failure.merged: 1}


@pytest.mark.parametrize(
    ("kind", "code"), [("invalid_request", "bad"), ("content_filter", "no"), ("timeout", "deadline")]
)
def test_an_error_of_one_request_is_no_failure_of_the_provider(kind: Any, code: str) -> None:
    assert failure_of("p", "m", ErrorInfo(code=code, kind=kind, message="")) is None


def test_silent_calls_are_read_by_fetcher() -> None:
    many, since = silent_fields("p", "m", "w")
    found = activity_of({many.encode(): b"2", since.encode(): b"1700"})
    assert (found.silent, found.silent_since) == ({("p", "m", "w"): 2}, {("p", "m", "w"): 1700})
