"""Classifies failures by HTTP status and the provider's error type or code, never by its message text.

Failures of class ``auth`` get our own message and no provider object: some providers repeat the key in theirs.
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
"""Longer waits are capped at a day; a wait that long ends the run in any case."""

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
    # OpenAI and compatible APIs, `error.code` and `error.type`
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
    # OpenAI Responses, `error.code` of a failed response
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
    # Bedrock, exceptions of a stream: https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_ResponseStream.html
    "throttlingexception": "rate_limit",
    "serviceunavailableexception": "overloaded",
    "modelnotreadyexception": "overloaded",
    "modeltimeoutexception": "timeout",
    "internalserverexception": "server",
    "modelstreamerrorexception": "server",
    "validationexception": "invalid_request",
    # Gemini's Interactions API, `error.code`: https://ai.google.dev/gemini-api/docs/api-errors
    "invalid_request": "invalid_request",
    "parameter_unknown": "invalid_request",
    "authentication": "auth",
    "payment_required": "auth",
    "quota_exceeded": "rate_limit",
    "too_many_requests": "rate_limit",
    "gateway_timeout": "timeout",
    "safety": "content_filter",
    "recitation": "content_filter",
    "language": "content_filter",
    "prohibited_content": "content_filter",
    "spii": "content_filter",
    "blocklist": "content_filter",
    "image_safety": "content_filter",
    "image_prohibited_content": "content_filter",
    "image_recitation": "content_filter",
    "image_other": "content_filter",
    "content_blocked": "content_filter",
    "malformed_function_call": "server",
    "cancelled": "server",  # by the provider: if we hang up, we do not read the response
}
"""Keys are lower case. APIs share this table: no name has two meanings."""

_NOT_RETRYABLE = {"insufficient_quota", "exceeded_current_quota_error", "quota_exceeded"}
"""Retryable by status, but waiting does not help."""

_VAGUE = {"invalid_request_error", "api_error", "invalid_argument", "server_error", "internal_server_error", "internal"}
"""Types that OpenAI and Gemini use for nearly every error of a status class; other evidence takes precedence. For
example, OpenAI reports a 503 (overloaded) with the type `server_error`.
"""

_CLASS_OF_STATUS: dict[int, ErrorClass] = {
    401: "auth",
    402: "auth",
    403: "auth",
    404: "not_found",
    408: "timeout",
    409: "server",  # another request holds a lock: the official SDKs retry
    429: "rate_limit",
    498: "overloaded",  # Groq: flex capacity exceeded
    503: "overloaded",
    504: "timeout",
    524: "timeout",  # Cloudflare: the origin took too long
    529: "overloaded",  # Anthropic
}


REQUEST_ID_HEADERS = ("request-id", "x-request-id", "x-amzn-requestid", "apim-request-id")
"""Headers with the provider's or gateway's id of a call: Anthropic; OpenAI and most others; Bedrock; Azure."""
MAX_REQUEST_ID_CHARS = 256

_DURATION = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?s")


class _Described(msgspec.Struct):
    message: str = ""
    names: tuple[str, ...] = ()
    status: int | None = None
    retry_after_s: float | None = None
    raw: object = None


def class_of_status(status: int) -> ErrorClass:
    """Return the error class of an HTTP status."""
    if status in _CLASS_OF_STATUS:
        return _CLASS_OF_STATUS[status]
    if status >= 500:
        return "server"
    return "invalid_request" if status >= 400 else "unknown"


def request_id_of(headers: Mapping[str, str]) -> str | None:
    """Return the provider's id of a call from the answer's headers (lower-case names)."""
    found = next((described for name in REQUEST_ID_HEADERS if (described := headers.get(name, "").strip())), None)
    return found[:MAX_REQUEST_ID_CHARS] if found else None


def provider_failure(
    error: object, *, status: int | None = None, headers: Mapping[str, str] | None = None
) -> ErrorInfo:
    """Classify a provider's error, given as decoded JSON: ``{"error": {…}}`` or the inner object, of any API.

    ``status``: the HTTP status, if it was an error status; otherwise a numeric code in the object is used.
    """
    described = _describe(error)
    named_status = status if status is not None else described.status
    kind = _class_of(described.names, named_status)
    code = described.names[0] if described.names else f"http_{named_status}" if named_status else "provider_error"
    retryable = kind in RETRYABLE and not _NOT_RETRYABLE.intersection(described.names)
    lower_headers = {name.lower(): value for name, value in (headers or {}).items()}
    if status is not None and lower_headers.get("x-should-retry") in ("true", "false"):
        retryable = lower_headers["x-should-retry"] == "true"
    message, raw = described.message or f"the provider returned {code}", _json(described.raw)
    if kind == "auth":
        message, raw = f"the provider rejected the API key or its permissions ({code})", None
    wait_s = _retry_after_s(lower_headers)
    return ErrorInfo(
        code=code,
        kind=kind,
        message=message[:MAX_MESSAGE_CHARS],
        retryable=retryable,
        retry_after_s=(described.retry_after_s if wait_s is None else wait_s) if retryable else None,
        status=status,
        raw=raw[:MAX_RAW_CHARS] if raw else None,
        request_id=request_id_of(lower_headers),
    )


def http_failure(status: int, body: bytes, headers: Mapping[str, str]) -> ErrorInfo:
    """Classify an answer with an error status. The body is JSON, or is reported as text."""
    try:
        error: object = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        error = body.decode(errors="replace").strip()
    return provider_failure(error, status=status, headers=headers)


def wire_failure(error: WireError, raw: bytes = b"") -> ErrorInfo:
    """Classify bytes that violate the API (class protocol) or exceed one of our limits (class limit)."""
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
    """Extract message, names (code before type, lower case), status and wait time from an error object."""
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
    """Extract the reasons and the RetryInfo delay in seconds (``"retryDelay": "34.07s"``) from Gemini's error
    details."""
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
    """Seconds to wait, from ``retry-after-ms`` or ``retry-after``, capped at `MAX_RETRY_AFTER_S`.

    A date is measured from the answer's own ``date`` header, because this module has no clock. Unparsable values are
    ignored.
    """
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) / unit
        except ValueError:
            continue
        if 0 <= seconds < float("inf"):  # false for NaN as well
            return min(seconds, MAX_RETRY_AFTER_S)
    try:
        until = parsedate_to_datetime(headers["retry-after"])
        now = parsedate_to_datetime(headers["date"])
        return min(max(0.0, (until - now).total_seconds()), MAX_RETRY_AFTER_S)
    except (LookupError, ValueError, TypeError, ArithmeticError):  # ArithmeticError: an absurdly large time zone offset
        return None
