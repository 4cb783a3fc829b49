"""What a Python tool can use: the context of its call, and images for its result. See docs/guides/tools.md."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from tokenbus.events.waits import Door

__all__ = ["Answered", "Ask", "Image", "Report", "ToolContext"]


class Report(Protocol):
    """Reports a call's progress to the run's subscribers."""

    def __call__(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """``progress`` rises towards ``total``. Callable from any thread; returns at once and never fails the call."""
        ...


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a question."""

    decision: Literal["accept", "decline", "cancel"]
    """``decline``: the person does not want to answer. ``cancel``: the person left, or nobody answered in time."""
    content: Mapping[str, object] | None = None
    """The answer, which matches the question's schema; empty for a question with a page. None unless accepted."""
    by: str | None = None
    """Who answered, as the door knows it."""
    door: Door = "bus"
    """Over which door. ``deadline``: nobody answered in time."""


class Ask(Protocol):
    """Asks a question of a person, who answers over any door of the bus."""

    async def __call__(
        self,
        schema: Mapping[str, object] | None,
        text: str,
        *,
        url: str | None = None,
        timeout_s: float | None = None,
    ) -> Answered:
        """Return the answer to ``text``, which matches the JSON Schema ``schema`` of an object.

        ``url``: a page on which it is answered, instead of a schema. ``timeout_s``: how long it waits, up to 6 days;
        None: as the tool's settings say. After that it is a `cancel`.

        The call ends here until somebody answers. Then it runs again from its start, maybe days later in another
        worker, and this returns the answer. So what comes before a question must do no harm when it is done again, and
        must lead to the same question: another question than the one that was answered fails the call.
        """
        ...


async def _cannot_ask(
    schema: Mapping[str, object] | None, text: str, *, url: str | None = None, timeout_s: float | None = None
) -> Answered:
    raise RuntimeError("only a call of a run can ask")


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
    ask: Ask = _cannot_ask

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self.deadline - time.monotonic()


class Image(msgspec.Struct, frozen=True):
    """An image returned by a Python tool, alone or in a list with texts."""

    data: bytes
    media_type: str = "image/png"
