"""What a policy sees of a stream: its blocks so far, and what the present chunk did to them.

The rules, the same for every kind of stream:

- A tool call's arguments are the raw string that the model wrote, never parsed and never mended.
- An empty string is no content: it neither begins a block nor completes one.
- A block is complete when the stream says so; where it cannot (OpenAI-style chunks), when another begins or at the
  finish reason. A block that a drop cut off is never complete.
- A chunk is a part of one block at most and completes one at most, and a finish reason stands alone. Where a chunk of
  the stream says more, it is handed over in parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from tokenbus.events.public import BlockKind


@dataclass(slots=True)
class StreamBlock(ABC):
    """A block, complete or still being written. One object for its whole life."""

    id: str
    """A tool call's id; for others a name that is distinct within the stream."""
    number: int
    """Its place among all blocks of the stream in the order in which they began; on the bus the event's ``block``."""
    is_complete: bool = False
    text: str = field(default="", repr=False)
    """All that came of it so far, as it came: `content` or `arguments`."""

    def grow(self, piece: str) -> None:
        """A piece of the content came."""
        # CPython extends a string in place while nothing else holds it, so that a block of n pieces costs n, also for a
        # policy that looks at it on every chunk.
        text, self.text = self.text, ""
        text += piece
        self.text = text

    @property
    @abstractmethod
    def kind(self) -> BlockKind:
        """The kind as the bus names it."""


@dataclass(slots=True)
class ContentStreamBlock(StreamBlock):
    """A text."""

    @property
    def kind(self) -> BlockKind:
        return "text"

    @property
    def content(self) -> str:
        """The text so far."""
        return self.text


@dataclass(slots=True)
class ToolCallStreamBlock(StreamBlock):
    """A tool call; ``id`` is the model's."""

    index: int = 0
    """Its place among the calls, as the stream counts them; on the bus from 0 through the run."""
    name: str = ""

    @property
    def kind(self) -> BlockKind:
        return "tool_call"

    @property
    def arguments(self) -> str:
        """The raw argument string so far, as the model wrote it: it need not be JSON, complete or not."""
        return self.text


@dataclass(slots=True)
class OtherStreamBlock(StreamBlock):
    """What only the bus has as blocks: thinking, a tool's result, an image."""

    other_kind: BlockKind = "thinking"

    @property
    def kind(self) -> BlockKind:
        return self.other_kind

    @property
    def content(self) -> str:
        """The content so far; an image has none."""
        return self.text


@dataclass(slots=True)
class StreamState:
    """A stream as it stands after the present chunk. The policy reads it; it is not the policy's to change."""

    blocks: list[StreamBlock] = field(default_factory=list[StreamBlock])
    """In the order in which they began. On the bus those of every turn; what a retry made void is taken out."""
    current_block: StreamBlock | None = None
    """The block that the present chunk began, continued or ended, else the one of the chunk before; None before the
    first block. A chunk that ends one block and begins another has the latter here, and the former in
    ``just_completed``."""
    chunk_block: StreamBlock | None = None
    """The block that the present chunk is a part of; None where it is of none, as usage and the finish reason are."""
    just_completed: StreamBlock | None = None
    """The block that the present chunk completed."""
    just_cut: StreamBlock | None = None
    """Bus: the block that the present chunk ended, although it was never complete."""
    finish_reason: str | None = None
    """As the stream says it; set by its chunk, and kept for the chunks that follow, such as usage. On the bus set by
    the run's terminal event, for a run may span several turns."""
