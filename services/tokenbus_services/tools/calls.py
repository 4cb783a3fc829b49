"""One tool call as the executor takes it, and what it gives back."""

from __future__ import annotations

import time
from typing import Protocol

import msgspec

from tokenbus.events.frames import ResultImage


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that a model made; the provider completed it."""

    run: str
    turn: int
    block: int
    tool_id: str
    name: str
    arguments: str
    """The raw string, as the model wrote it; empty text means ``{}``."""
    timeout_s: float | None = None
    """What the request asks for. It can shorten the tool's own timeout, never lengthen it."""

    @property
    def key(self) -> str:
        """The same for each delivery of this call, and for no other call."""
        return f"{self.run}/{self.turn}/{self.block}"


class ToolOutcome(msgspec.Struct, frozen=True):
    """What the model sees of a call."""

    content: str
    is_error: bool = False
    blob_id: str | None = None
    """Where the whole result lies when ``content`` is only its beginning, or a note in its place."""
    images: tuple[ResultImage, ...] = ()
    """Those that the model is shown, and those that only lie in a blob."""


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


class Text(msgspec.Struct, frozen=True):
    """A result that is at hand, of any size."""

    text: str
    media_type: str = "text/plain;charset=utf-8"
