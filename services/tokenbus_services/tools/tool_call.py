"""A tool call as the executor receives it, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from tokenbus.events.frames import GivenAnswer, ResultImage, ToolAsked
from tokenbus.tools import Report, ToolContext


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call made by a model and completed by the provider."""

    run: str
    turn: int
    block: int
    tool_id: str
    name: str
    arguments: str
    """The raw string, as the model wrote it; an empty string means ``{}``."""
    free_text: bool = False
    """``arguments`` is free text, which the tool gets as its argument ``input``."""
    timeout_s: float | None = None
    """The timeout from the request. It can shorten the tool's own timeout but not extend it."""
    traceparent: str | None = None
    """W3C trace context for the tool."""

    tenant: str = ""
    metadata: Mapping[str, object] = {}
    """Of the run."""
    answers: list[GivenAnswer] = []
    """To the questions that the call asked before, in order."""
    state: str = ""
    """What it left with its last question."""

    @property
    def key(self) -> str:
        """Idempotency key: the same for each delivery of this call, different for every other call."""
        return f"{self.run}/{self.turn}/{self.block}"


class ToolOutcome(msgspec.Struct, frozen=True):
    """What the model sees of a call, or what the call asks."""

    content: str
    is_error: bool = False
    blob_id: str | None = None
    """The blob with the whole result, if ``content`` is only its beginning or a note."""
    images: tuple[ResultImage, ...] = ()
    """Images that the model sees, and images that are only in a blob."""
    asked: ToolAsked | None = None
    """The question with which the call has ended; the model sees nothing of it yet."""

    @property
    def kind(self) -> str:
        """How the call ended, for metrics and logs."""
        return "asked" if self.asked else "error" if self.is_error else "ok"


class Text(msgspec.Struct, frozen=True, tag=True):
    """A complete text result of any size."""

    text: str
    media_type: str = "text/plain;charset=utf-8"


def context_of(call: ToolCall, deadline: float, report: Report) -> ToolContext:
    return ToolContext(
        run=call.run,
        turn=call.turn,
        tool_id=call.tool_id,
        key=call.key,
        deadline=deadline,
        report=report,
        tenant=call.tenant,
        metadata=call.metadata,
        traceparent=call.traceparent,
    )


class KeptTask(Protocol):
    """The task of one call that goes on at its server when its worker ends, where the next worker finds it. All methods
    wait until the bus's server is available.
    """

    async def find(self) -> str:
        """The task that the call has begun, in any worker; empty: none."""
        ...

    async def keep(self, task: str) -> bool:
        """Keep the task for the next worker. False: the call is over, and nobody wants its result."""
        ...

    async def is_wanted(self) -> bool:
        """Whether the call is still open: False once its run was cancelled or has ended."""
        ...
