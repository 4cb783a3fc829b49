"""What a policy sees of a stream: its blocks so far, and what the current chunk did to them.

The rules, the same for every stream format:

- A tool call's arguments are the raw string from the model, never parsed and never repaired.
- An empty string is not content: it neither begins nor completes a block.
- A block is complete when the stream says so. If the format cannot (OpenAI-style chunks): when another block begins, or
  at the finish reason. A block cut off by a lost connection is never complete.
- A chunk belongs to at most one block and completes at most one, and a finish reason stands alone. A chunk that does
  more is split into parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from tokenbus.events.public import BlockKind


@dataclass(slots=True)
class StreamBlock(ABC):
    """A block, complete or still being written. The object stays the same for the block's whole life."""

    id: str
    """A tool call's id; for other blocks a name unique within the stream."""
    number: int
    """Its position among all blocks of the stream, in order of their beginning; on the bus the event's ``block``."""
    is_complete: bool = False
    text: str = field(default="", repr=False)
    """Everything received so far: `content` or `arguments`."""

    def grow(self, piece: str) -> None:
        """Append a piece of content."""
        # CPython extends a string in place if nothing else references it. So a block of n pieces costs O(n), even if a
        # policy reads it on every chunk.
        text, self.text = self.text, ""
        text += piece
        self.text = text

    @property
    @abstractmethod
    def kind(self) -> BlockKind:
        """The kind, as named on the bus."""


@dataclass(slots=True)
class ContentStreamBlock(StreamBlock):
    """A text block."""

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
    """Its index among the calls, as the stream counts them; on the bus counted from 0 through the run."""
    name: str = ""

    @property
    def kind(self) -> BlockKind:
        return "tool_call"

    @property
    def arguments(self) -> str:
        """The raw argument string so far, as the model wrote it. Not necessarily JSON, complete or not."""
        return self.text


@dataclass(slots=True)
class ServerToolStreamBlock(StreamBlock):
    """An item of the provider's own: a tool that it runs itself, the tool's result (with the same ``id``), or other
    content. Withholding it does not stop the tool.
    """

    name: str = ""
    """The tool's; empty if the item is none."""

    @property
    def kind(self) -> BlockKind:
        return "server_tool"

    @property
    def content(self) -> str:
        """The item so far, as the provider's JSON."""
        return self.text


@dataclass(slots=True)
class OtherStreamBlock(StreamBlock):
    """Block kinds that only the bus has: thinking, a tool's result, an image."""

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
    """The stream after the current chunk. Read-only for the policy."""

    blocks: list[StreamBlock] = field(default_factory=list[StreamBlock])
    """In order of their beginning. On the bus: those of every turn, without blocks that a retry discarded."""
    current_block: StreamBlock | None = None
    """The block that the current chunk began, continued or ended; otherwise that of the chunk before. None before
    the first block. If a chunk ends one block and begins another, this is the new block and ``just_completed`` the
    old one.
    """
    chunk_block: StreamBlock | None = None
    """The block that the current chunk is part of; None for chunks outside of blocks, like usage and the finish
    reason.
    """
    just_completed: StreamBlock | None = None
    """The block that the current chunk completed."""
    just_cut: StreamBlock | None = None
    """Bus only: the block that the current chunk ended although it is not complete."""
    finish_reason: str | None = None
    """As given by the stream; stays set for later chunks, such as usage. On the bus set by the run's terminal event,
    because a run may span several turns.
    """
