"""Describes a failure of a run or a provider call, as data on the bus."""

from __future__ import annotations

from typing import Literal

import msgspec

ErrorClass = Literal[
    "auth",
    "rate_limit",
    "overloaded",
    "invalid_request",
    "not_found",
    "content_filter",
    "timeout",
    "network",
    "server",
    "protocol",
    "limit",
    "tool",
    "internal",
    "unknown",
]

IN_ANSWER = "answer"
"""``where`` of a connection that broke after the head of an answer had come."""
RETRYABLE: frozenset[ErrorClass] = frozenset({"rate_limit", "overloaded", "timeout", "network", "server"})
"""Classes for which the same call may succeed later without any change."""


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"kind": "class"}):
    """One failure. ``code`` is the stable name for programs; ``kind`` (``class`` on the wire) is its category."""

    code: str
    kind: ErrorClass
    message: str
    retryable: bool = False
    retry_after_s: float | None = None
    """The wait that the provider requested (Retry-After), in seconds."""
    status: int | None = None
    """HTTP status, if any."""
    where: str | None = None
    """The field, event or location at fault."""
    raw: str | None = None
    """The provider's own error object, truncated."""
    request_id: str | None = None
    """The provider's id of the call, for its support and logs: the `request-id` or `x-request-id` response header."""


def stream_cut(reason: str) -> ErrorInfo:
    """The error for a provider response that was cut off without an explanation."""
    return ErrorInfo(code="stream_cut", kind="network", message=reason, retryable=True)
