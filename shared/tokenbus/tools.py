"""What a Python tool may use: the context of its call, and images for its result. See docs/guides/tools.md."""

from __future__ import annotations

import time
from typing import Protocol

import msgspec

__all__ = ["Image", "Report", "ToolContext"]


class Report(Protocol):
    """Tells subscribers of the run how far the call is."""

    def __call__(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """``progress`` rises towards ``total``. From any thread; returns at once, and never fails the call."""
        ...


class ToolContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a Python tool may know of its call, by a parameter named ``context``."""

    run: str
    turn: int
    tool_id: str
    key: str
    """The same when a call is delivered again after its worker was lost: for doing a thing only once."""
    deadline: float
    """When the call times out, on the clock of `time.monotonic`."""
    report: Report

    @property
    def remaining_s(self) -> float:
        """Seconds until then; negative after it."""
        return self.deadline - time.monotonic()


class Image(msgspec.Struct, frozen=True):
    """An image that a Python tool returns, alone or in a list with texts."""

    data: bytes
    media_type: str = "image/png"
