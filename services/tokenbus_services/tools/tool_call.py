"""One tool call as the executor takes it, and what it gives back."""

from __future__ import annotations

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


class Text(msgspec.Struct, frozen=True):
    """A result that is at hand, of any size."""

    text: str
    media_type: str = "text/plain;charset=utf-8"
