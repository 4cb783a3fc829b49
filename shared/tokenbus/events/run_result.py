"""What a run gave, as plain data: the errors of a run carry it, and `tokenbus.Response` is it for users."""

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
    """What a run gave, whole or up to where it is or ended. Blocks that a retry made void are not in it."""

    run: str
    status: Status
    text: str
    """The visible text: the blocks of a turn one after another, and a blank line between two turns."""
    last_text: str
    """The text of the last turn alone: what the model said in the end. Empty where that turn has none."""
    thinking: str
    """The thinking, block after block."""
    blocks: list[BlockComplete]
    """In order of their numbers; ``cut`` marks one that is only a beginning, as each block is that is still open."""
    finish: FinishReason | None
    """None while the run is open."""
    finish_raw: str | None
    stop_string: str | None
    """The stop string that ended the last turn, where one did and it is known which."""
    usage: Usage | None
    """Sum over the turns so far, and over failed attempts once the run ended; None if the provider reported nothing."""
    model: str | None
    """The model of the last answer, as its provider names it; None while that is not known."""
    response_id: str | None
    """The provider's id of the last answer: its support and its own lists go by it."""
    timing: Timing | None
    """None while the run is open."""
    error: ErrorInfo | None
    """Of a run that failed, and of an incomplete one where something is known."""
    reason: str | None
    """Why the run is incomplete or was cancelled."""
    events: int
    """How many of the run's events were folded in, void ones included."""
    heard_through: int | None = None
    """For a cancelled run: the last ``seq`` that the listener heard, from the cancel request."""
    provider_extra: list[dict[str, object]] = []
    """What the provider said beside its answer, and notes of the bus: of what was changed or left out on the way."""
    participant: str | None = None
    """The name under which the model spoke, where the request gave one."""

    @property
    def tool_calls(self) -> list[BlockComplete]:
        """The blocks that are tool calls; one with ``cut`` never ran."""
        return [block for block in self.blocks if block.kind == "tool_call"]

    @property
    def images(self) -> list[ImageRef]:
        """The images of the answer, in order; none of its drafts."""
        return [block.image for block in self.blocks if block.image and not block.image.draft]

    @property
    def messages(self) -> list[Message]:
        """What the run said, and what its tools gave, as further ``messages`` of the next request: to the same provider
        or to any other. Complete once the run has ended; what was cut off is not in it, but for text."""
        return messages_of(self.blocks, self.provider_extra, self.participant)
