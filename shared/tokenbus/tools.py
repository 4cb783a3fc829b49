"""What a Python tool can use: the context of its call, and images for its result. See docs/guides/tools.md."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

import msgspec

__all__ = ["Image", "Report", "ToolContext"]


class Report(Protocol):
    """Reports a call's progress to the run's subscribers."""

    def __call__(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """``progress`` rises towards ``total``. Callable from any thread; returns at once and never fails the call."""
        ...


class ToolContext(msgspec.Struct, frozen=True, kw_only=True):
    """Information about a tool call, passed to a Python tool's ``context`` parameter."""

    run: str
    turn: int
    tool_id: str
    key: str
    """The same if the call is delivered again after its worker was lost. Use it as an idempotency key."""
    deadline: float
    """When the call times out, on the clock of `time.monotonic`."""
    report: Report
    tenant: str = ""
    """The run's tenant, `metadata.tenant`; empty if it has none. The gateway sets it by the client's key."""
    metadata: Mapping[str, object] = {}
    """The run's metadata, as its request has it."""
    traceparent: str | None = None
    """W3C trace context, to continue the run's trace; None: it is not traced."""

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self.deadline - time.monotonic()


class Image(msgspec.Struct, frozen=True):
    """An image returned by a Python tool, alone or in a list with texts."""

    data: bytes
    media_type: str = "image/png"
