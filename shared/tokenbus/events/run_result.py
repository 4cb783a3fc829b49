"""A run's output as plain data. The errors of a run carry it; `tokenbus.Response` extends it for users."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.normalized import FinishReason
from tokenbus.events.public import BlockComplete, ImageRef, Timing
from tokenbus.events.requests import Message
from tokenbus.events.run_messages import messages_of
from tokenbus.events.usage import Usage

Status: TypeAlias = Literal["open", "completed", "incomplete", "failed", "cancelled"]


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """A run's output, complete or so far. Excludes blocks that a retry discarded."""

    run: str
    status: Status
    text: str
    """The visible text: the text blocks of each turn concatenated, and a blank line between two turns."""
    last_text: str
    """The text of the last turn alone; empty if that turn has none."""
    thinking: str
    """The thinking of all blocks, concatenated."""
    blocks: list[BlockComplete]
    """In order of their numbers. ``cut`` marks an incomplete block; a block that is still open has it too."""
    finish: FinishReason | None
    """None while the run is open."""
    finish_raw: str | None
    stop_string: str | None
    """The stop string that ended the last turn; None if none did, or if the provider does not report it."""
    usage: Usage | None
    """Sum over the turns so far, and over failed attempts once the run ended; None if the provider reported nothing."""
    model: str | None
    """The model of the last answer, as its provider names it; None if it is not known."""
    response_id: str | None
    """The provider's id of the last answer, for its support and its own logs."""
    timing: Timing | None
    """None while the run is open."""
    error: ErrorInfo | None
    """Set if the run failed, and if it is incomplete and the cause is known."""
    reason: str | None
    """Why the run is incomplete or was cancelled."""
    events: int
    """How many of the run's events were folded in, including those of discarded blocks."""
    heard_through: int | None = None
    """For a cancelled run: the last ``seq`` that the listener heard, from the cancel request."""
    heard: dict[int, int] | None = None
    """With ``heard_through``: the blocks of which the listener heard something, by number, and how many characters of
    each. Others are not part of `messages`. None: all was heard.
    """
    provider_extra: list[dict[str, object]] = []
    """Further data of the provider, and notes of the bus on what it changed or left out."""
    participant: str | None = None
    """The name under which the model spoke, if the request gave one."""

    @property
    def tool_calls(self) -> list[BlockComplete]:
        """The blocks that are tool calls. A call with ``cut`` never ran."""
        return [block for block in self.blocks if block.kind == "tool_call"]

    @property
    def images(self) -> list[ImageRef]:
        """The images of the answer, in order, without drafts."""
        return [block.image for block in self.blocks if block.image and not block.image.draft]

    @property
    def messages(self) -> list[Message]:
        """The run's output and its tools' results, as ``messages`` for the next request, to any provider.

        Complete once the run has ended. Of blocks that were cut off, only text is included. If a client said how far
        the listener heard (``heard_through``), what came after that is left out, and a text ends at the last
        character that was heard. The result of a call belongs to the call, also if it came later.
        """
        return messages_of(self.blocks, self.provider_extra, self.participant, self.heard)
