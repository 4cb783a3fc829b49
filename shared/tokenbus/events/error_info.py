"""What went wrong with a run or a provider call, as data that travels on the bus."""

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

RETRYABLE: frozenset[ErrorClass] = frozenset({"rate_limit", "overloaded", "timeout", "network", "server"})
"""Classes where the same call may succeed later without any change."""


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"kind": "class"}):
    """One failure. ``code`` is the stable name for programs, ``kind`` (``class`` on the wire) its family."""

    code: str
    kind: ErrorClass
    message: str
    retryable: bool = False
    retry_after_s: float | None = None
    """What the provider asked for (Retry-After), in seconds."""
    status: int | None = None
    """HTTP status, where there was one."""
    where: str | None = None
    """The field, event or place at fault."""
    raw: str | None = None
    """The provider's own error object, cut to a bounded length."""
    request_id: str | None = None
    """The provider's id of the call, for its support and its logs: the `request-id` or `x-request-id` of its answer."""


def stream_cut(reason: str) -> ErrorInfo:
    """A provider's answer broke off, and nothing says why."""
    return ErrorInfo(code="stream_cut", kind="network", message=reason, retryable=True)
