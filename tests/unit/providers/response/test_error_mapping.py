"""Errors by status, type and code: their class, whether to try again, and when."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.providers.reading import read
from tokenbus.errors import Malformed, TooLarge
from tokenbus.events.error_info import RETRYABLE
from tokenbus.events.normalized import Failed
from tokenbus.providers.response.error_mapping import MAX_RAW_CHARS, http_failure, provider_failure, wire_failure


def anthropic(kind: str) -> bytes:
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": "m"}, "request_id": "r"})


def openai(kind: str | None, code: str | int | None) -> bytes:
    return msgspec.json.encode({"error": {"message": "m", "type": kind, "param": None, "code": code}})


def gemini(status: str, *details: object) -> bytes:
    return msgspec.json.encode({"error": {"code": 400, "message": "m", "status": status, "details": details}})


@pytest.mark.parametrize(
    ("status", "body", "kind", "code"),
    [
        (400, anthropic("invalid_request_error"), "invalid_request", "invalid_request_error"),
        (401, anthropic("authentication_error"), "auth", "authentication_error"),
        (403, anthropic("permission_error"), "auth", "permission_error"),
        (404, anthropic("not_found_error"), "not_found", "not_found_error"),
        (413, anthropic("request_too_large"), "invalid_request", "request_too_large"),
        (429, anthropic("rate_limit_error"), "rate_limit", "rate_limit_error"),
        (500, anthropic("api_error"), "server", "api_error"),
        (504, anthropic("timeout_error"), "timeout", "timeout_error"),
        (529, anthropic("overloaded_error"), "overloaded", "overloaded_error"),
        (401, openai("invalid_request_error", "invalid_api_key"), "auth", "invalid_api_key"),
        (401, openai("invalid_request_error", None), "auth", "invalid_request_error"),
        (404, openai("invalid_request_error", "model_not_found"), "not_found", "model_not_found"),
        (400, openai("invalid_request_error", "context_length_exceeded"), "invalid_request", "context_length_exceeded"),
        (400, openai(None, "content_filter"), "content_filter", "content_filter"),
        (429, openai("tokens", "rate_limit_exceeded"), "rate_limit", "rate_limit_exceeded"),
        (429, openai("requests", None), "rate_limit", "requests"),
        (500, openai("server_error", None), "server", "server_error"),
        (503, openai("server_error", None), "overloaded", "server_error"),
        (529, gemini("INTERNAL"), "overloaded", "internal"),
        (422, b'{"detail":"bad"}', "invalid_request", "http_422"),
        (503, b"<html>upstream</html>", "overloaded", "http_503"),
        (502, b"", "server", "http_502"),
        (429, b'[{"error":{"code":429,"message":"m","status":"X"}}]', "rate_limit", "x"),
        (302, b"", "unknown", "http_302"),
        (429, gemini("RESOURCE_EXHAUSTED"), "rate_limit", "resource_exhausted"),
        (503, gemini("UNAVAILABLE"), "overloaded", "unavailable"),
        (400, gemini("INVALID_ARGUMENT", {"reason": "SOMETHING"}), "invalid_request", "invalid_argument"),
        (400, gemini("INVALID_ARGUMENT", {"reason": "API_KEY_INVALID"}), "auth", "invalid_argument"),
    ],
)
def test_the_class_of_an_error_comes_from_its_status_type_and_code(
    status: int, body: bytes, kind: str, code: str
) -> None:
    error = http_failure(status, body, {})
    assert (error.kind, error.code, error.status) == (kind, code, status)
    assert error.retryable == (kind in RETRYABLE)


def test_the_words_of_a_message_never_decide() -> None:
    misleading = msgspec.json.encode({"error": {"message": "rate limit, overloaded, timeout, invalid api key"}})
    assert http_failure(400, misleading, {}).kind == "invalid_request"
    assert provider_failure(msgspec.json.decode(misleading)).kind == "unknown"


def test_a_quota_that_is_used_up_is_not_tried_again() -> None:
    error = http_failure(429, openai("insufficient_quota", "insufficient_quota"), {"retry-after": "3"})
    assert error.kind == "rate_limit"
    assert not error.retryable
    assert error.retry_after_s is None


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "12"}, 12.0),
        ({"Retry-After": "0.5"}, 0.5),
        ({"retry-after-ms": "250", "retry-after": "1"}, 0.25),
        (
            {"retry-after": "Wed, 21 Oct 2026 07:28:30 GMT", "date": "Wed, 21 Oct 2026 07:28:00 GMT"},
            30.0,
        ),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT", "date": "Wed, 21 Oct 2026 07:28:30 GMT"}, 0.0),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:30 GMT"}, None),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:30 GMT", "date": "Wed, 21 Oct 2026 07:28:00"}, None),
        ({"retry-after": "soon", "date": "x"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "NaN"}, None),
        ({"retry-after": "1e308"}, 86_400.0),
        ({"retry-after-ms": "1e308"}, 86_400.0),
        (
            {"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT", "date": "Wed, 21 Oct 2026 07:28:00 GMT"},
            86_400.0,
        ),
        (
            {"retry-after": f"Wed, 21 Oct 2026 07:28:30 +{'9' * 30}", "date": "Wed, 21 Oct 2026 07:28:00 GMT"},
            None,
        ),
        ({}, None),
    ],
)
def test_the_wait_is_given_in_seconds_or_as_a_date_relative_to_the_answers_date(
    headers: dict[str, str], seconds: float | None
) -> None:
    assert http_failure(429, b"", headers).retry_after_s == seconds


@pytest.mark.parametrize(
    ("details", "seconds"),
    [
        ([{"retryDelay": "34.07s"}], 34.07),
        ([{"reason": "X"}, {"retryDelay": "9s"}], 9.0),
        ([{"retryDelay": "-9s"}], None),
        ([{"retryDelay": "soon"}, "odd"], None),
        ([], None),
    ],
)
def test_geminis_error_details_hold_the_time_to_wait(details: list[object], seconds: float | None) -> None:
    assert http_failure(429, gemini("RESOURCE_EXHAUSTED", *details), {}).retry_after_s == seconds
    assert http_failure(429, gemini("RESOURCE_EXHAUSTED", *details), {"retry-after": "1"}).retry_after_s == 1
    assert http_failure(400, gemini("INVALID_ARGUMENT", *details), {}).retry_after_s is None


def test_the_providers_own_retry_hint_decides() -> None:
    assert not http_failure(529, b"", {"x-should-retry": "false", "retry-after": "1"}).retryable
    assert http_failure(400, b"", {"x-should-retry": "true", "retry-after": "1"}).retry_after_s == 1
    assert provider_failure({"type": "overloaded_error"}, headers={"x-should-retry": "false"}).retryable


def test_a_refused_key_is_never_repeated() -> None:
    error = http_failure(
        401, b'{"error":{"message":"Incorrect API key provided: sk-abc","code":"invalid_api_key"}}', {}
    )
    assert b"sk-abc" not in msgspec.json.encode(error)
    assert error.code == "invalid_api_key"


def test_the_providers_own_object_is_kept_bounded() -> None:
    error = http_failure(400, msgspec.json.encode({"error": {"message": "m" * 10_000, "param": "p"}}), {})
    assert error.raw
    assert error.raw.startswith('{"message":"mmm')
    assert len(error.raw) == MAX_RAW_CHARS


def test_broken_bytes_are_of_class_protocol_and_limits_of_class_limit() -> None:
    broken = wire_failure(Malformed("event at $.x", "wrong"), b'{"x":\xff}')
    assert (broken.code, broken.kind, broken.where) == ("malformed", "protocol", "event at $.x")
    assert broken.raw == '{"x":\ufffd}'
    large = wire_failure(TooLarge("server-sent event", 11, 10))
    assert (large.code, large.kind, large.where, large.raw) == ("too_large", "limit", "server-sent event", None)
    assert not large.retryable


@pytest.mark.parametrize("framing", [b"%s", b"data: %s\n\n", b"error: %s\n"])
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_with_an_error_status_is_that_error_for_any_framing(framing: bytes, stream: bool) -> None:
    [failed] = read("anthropic", framing % anthropic("overloaded_error"), status=529, stream=stream)
    assert isinstance(failed, Failed)
    assert (failed.error.code, failed.error.status, failed.error.message) == ("overloaded_error", 529, "m")


def test_a_wait_that_gemini_names_is_bounded_too() -> None:
    detail = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "999999999s"}
    assert http_failure(429, gemini("RESOURCE_EXHAUSTED", detail), {}).retry_after_s == 86_400


@given(st.text(max_size=60), st.text(max_size=60))
def test_no_header_of_a_provider_breaks_the_reading_of_its_error(wait: str, date: str) -> None:
    error = http_failure(429, b"", {"retry-after": wait, "retry-after-ms": date, "date": date})
    assert error.retry_after_s is None or 0 <= error.retry_after_s <= 86_400
