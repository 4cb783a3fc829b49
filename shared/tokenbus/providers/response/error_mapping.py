"""What went wrong, from the HTTP status and the provider's own error type or code; never from its prose.

A message of class ``auth`` is ours, and the provider's object is left out: some providers repeat the key in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import cast

import msgspec

from tokenbus.errors import Malformed, TooLarge, WireError
from tokenbus.events.error_info import RETRYABLE, ErrorClass, ErrorInfo

MAX_RAW_CHARS = 4096
MAX_MESSAGE_CHARS = 2048
MAX_RETRY_AFTER_S = 86_400.0
"""What a provider asks for beyond a day is told as a day: a wait that long ends the run in any case."""

_CLASS_OF_NAME: dict[str, ErrorClass] = {
    # Anthropic Messages, `error.type`
    "invalid_request_error": "invalid_request",
    "request_too_large": "invalid_request",
    "authentication_error": "auth",
    "permission_error": "auth",
    "billing_error": "auth",
    "not_found_error": "not_found",
    "rate_limit_error": "rate_limit",
    "overloaded_error": "overloaded",
    "timeout_error": "timeout",
    "api_error": "server",
    # OpenAI and those who speak it, `error.code` and `error.type`
    "invalid_api_key": "auth",
    "incorrect_api_key": "auth",
    "permission_denied": "auth",
    "insufficient_permissions": "auth",
    "unsupported_country_region_territory": "auth",
    "model_not_found": "not_found",
    "deploymentnotfound": "not_found",
    "context_length_exceeded": "invalid_request",
    "string_above_max_length": "invalid_request",
    "tool_use_failed": "invalid_request",
    "json_validate_failed": "invalid_request",
    "content_filter": "content_filter",
    "content_policy_violation": "content_filter",
    "rate_limit_exceeded": "rate_limit",
    "rate_limit_reached_error": "rate_limit",
    "insufficient_quota": "rate_limit",
    "exceeded_current_quota_error": "rate_limit",
    "engine_overloaded_error": "overloaded",
    "service_unavailable": "overloaded",
    "service_unavailable_error": "overloaded",
    "server_error": "server",
    "internal_error": "server",
    "internal_server_error": "server",
    "internalservererror": "server",
    "timeout": "timeout",
    # OpenAI Responses, `error.code` of a response that failed
    "invalid_prompt": "invalid_request",
    "image_content_policy_violation": "content_filter",
    "vector_store_timeout": "timeout",
    # Gemini, `error.status` and the `reason` in its details: https://ai.google.dev/gemini-api/docs/troubleshooting
    "unauthenticated": "auth",
    "api_key_invalid": "auth",
    "not_found": "not_found",
    "invalid_argument": "invalid_request",
    "failed_precondition": "invalid_request",
    "out_of_range": "invalid_request",
    "unimplemented": "invalid_request",
    "resource_exhausted": "rate_limit",
    "unavailable": "overloaded",
    "deadline_exceeded": "timeout",
    "internal": "server",
    "aborted": "server",
    "cancelled": "server",  # by the provider: when we hang up, nobody reads it
}
"""In lower case. Names of further APIs are added here: none means two things."""

_HOPELESS = {"insufficient_quota", "exceeded_current_quota_error"}
"""Of a retryable class by status, but no waiting helps."""

_VAGUE = {"invalid_request_error", "api_error", "invalid_argument", "server_error", "internal_server_error", "internal"}
"""Types that OpenAI and Gemini give to nearly every error of a class of statuses: something else says more. A 503 of
OpenAI, say, means overloaded, and its type is `server_error`."""

_CLASS_OF_STATUS: dict[int, ErrorClass] = {
    401: "auth",
    402: "auth",
    403: "auth",
    404: "not_found",
    408: "timeout",
    409: "server",  # a lock that another request holds: the official SDKs try again
    429: "rate_limit",
    498: "overloaded",  # Groq: flex capacity exceeded
    503: "overloaded",
    504: "timeout",
    524: "timeout",  # Cloudflare: the origin took too long
    529: "overloaded",  # Anthropic
}


REQUEST_ID_HEADERS = ("request-id", "x-request-id", "x-amzn-requestid", "apim-request-id")
"""How providers and the gateways before them name a call: Anthropic; OpenAI and most others; Bedrock; Azure."""
MAX_REQUEST_ID_CHARS = 256

_DURATION = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?s")


class _Described(msgspec.Struct):
    message: str = ""
    names: tuple[str, ...] = ()
    status: int | None = None
    retry_after_s: float | None = None
    raw: object = None


def class_of_status(status: int) -> ErrorClass:
    """The class of an HTTP status."""
    if status in _CLASS_OF_STATUS:
        return _CLASS_OF_STATUS[status]
    if status >= 500:
        return "server"
    return "invalid_request" if status >= 400 else "unknown"


def request_id_of(headers: Mapping[str, str]) -> str | None:
    """The provider's id of a call, of the headers of its answer, whose names are in lower case."""
    found = next((said for name in REQUEST_ID_HEADERS if (said := headers.get(name, "").strip())), None)
    return found[:MAX_REQUEST_ID_CHARS] if found else None


def provider_failure(
    error: object, *, status: int | None = None, headers: Mapping[str, str] | None = None
) -> ErrorInfo:
    """The provider's error, as its decoded JSON: ``{"error": {…}}`` or what is inside of it, in any dialect.

    ``status`` is the HTTP status where it was one of an error; without, a numeric code inside stands for it.
    """
    said = _describe(error)
    named_status = status if status is not None else said.status
    kind = _class_of(said.names, named_status)
    code = said.names[0] if said.names else f"http_{named_status}" if named_status else "provider_error"
    retryable = kind in RETRYABLE and not _HOPELESS.intersection(said.names)
    asked = {name.lower(): value for name, value in (headers or {}).items()}
    if status is not None and asked.get("x-should-retry") in ("true", "false"):
        retryable = asked["x-should-retry"] == "true"
    message, raw = said.message or f"the provider answered {code}", _json(said.raw)
    if kind == "auth":
        message, raw = f"the provider refused the key or what it may do ({code})", None
    wait_s = _retry_after_s(asked)
    return ErrorInfo(
        code=code,
        kind=kind,
        message=message[:MAX_MESSAGE_CHARS],
        retryable=retryable,
        retry_after_s=(said.retry_after_s if wait_s is None else wait_s) if retryable else None,
        status=status,
        raw=raw[:MAX_RAW_CHARS] if raw else None,
        request_id=request_id_of(asked),
    )


def http_failure(status: int, body: bytes, headers: Mapping[str, str]) -> ErrorInfo:
    """An answer with the status of an error; its body is JSON, or is shown as text."""
    try:
        error: object = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        error = body.decode(errors="replace").strip()
    return provider_failure(error, status=status, headers=headers)


def wire_failure(error: WireError, raw: bytes = b"") -> ErrorInfo:
    """Bytes that broke a rule of the API (class protocol), or a bound of ours (class limit)."""
    where = error.where if isinstance(error, Malformed | TooLarge) else None
    return ErrorInfo(
        code=error.code,
        kind="limit" if isinstance(error, TooLarge) else "protocol",
        message=str(error)[:MAX_MESSAGE_CHARS],
        where=where,
        raw=raw[:MAX_RAW_CHARS].decode(errors="replace") or None,
    )


def _class_of(names: tuple[str, ...], status: int | None) -> ErrorClass:
    known = [name for name in names if name in _CLASS_OF_NAME]
    for name in known:
        if name not in _VAGUE:
            return _CLASS_OF_NAME[name]
    if status is not None:
        return class_of_status(status)
    return _CLASS_OF_NAME[known[0]] if known else "unknown"


def _describe(error: object) -> _Described:
    """Message, names (code before type, in lower case), status and wait of an error object."""
    if isinstance(error, list):
        items = cast("list[object]", error)
        return _describe(items[0]) if items else _Described()
    if not isinstance(error, dict):
        return _Described(message=error if isinstance(error, str) else "", raw=error)
    fields = cast("dict[str, object]", error)
    inner = fields.get("error")
    if isinstance(inner, dict | list):
        return _describe(cast(object, inner))
    names: list[str] = []
    status: int | None = None
    for name in ("code", "status", "type"):
        value = fields.get(name)
        if isinstance(value, str) and value.isascii() and value.isdigit():
            value = int(value[:4])
        if isinstance(value, str) and value and value != "error":
            names.append(value.lower()[:128])
        elif isinstance(value, int) and 400 <= value < 600 and status is None:
            status = value
    reasons, wait_s = _details(fields.get("details"))
    message = next((m for m in (fields.get("message"), fields.get("detail"), inner) if isinstance(m, str) and m), "")
    return _Described(message, (*names, *reasons), status, wait_s, fields)


def _details(details: object) -> tuple[list[str], float | None]:
    """Gemini's details of an error: the reasons in them, and its RetryInfo in seconds (``"retryDelay": "34.07s"``)."""
    reasons: list[str] = []
    wait_s: float | None = None
    for detail in cast("list[object]", details) if isinstance(details, list) else ():
        fields = cast("dict[str, object]", detail) if isinstance(detail, dict) else {}
        if isinstance(reason := fields.get("reason"), str) and reason:
            reasons.append(reason.lower()[:128])
        if isinstance(delay := fields.get("retryDelay"), str) and _DURATION.fullmatch(delay):
            wait_s = min(float(delay[:-1]), MAX_RETRY_AFTER_S)
    return reasons, wait_s


def _json(value: object) -> str | None:
    if value is None or value == "":
        return None
    try:
        return value if isinstance(value, str) else msgspec.json.encode(value).decode()
    except RecursionError:
        return None


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait, from ``retry-after-ms`` or ``retry-after``, within `MAX_RETRY_AFTER_S`.

    A date there counts from the answer's own ``date``: there is no clock here. What is no time at all is left out.
    """
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) / unit
        except ValueError:
            continue
        if 0 <= seconds < float("inf"):  # NaN is neither
            return min(seconds, MAX_RETRY_AFTER_S)
    try:
        until = parsedate_to_datetime(headers["retry-after"])
        now = parsedate_to_datetime(headers["date"])
        return min(max(0.0, (until - now).total_seconds()), MAX_RETRY_AFTER_S)
    except (LookupError, ValueError, TypeError, ArithmeticError):  # the last for a time zone that is a long number
        return None
