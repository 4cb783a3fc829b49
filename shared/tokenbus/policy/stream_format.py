"""What a stream format must provide for policies to work on it: `StreamFormat`.

A `Reader` extracts what a chunk does to the blocks; a `Writer` makes a well-formed stream of what a policy sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from tokenbus.events.public import BlockKind
from tokenbus.policy.processor import ChunkAccess, Decision, NewText, NewToolCall

C = TypeVar("C")


class BlockBegan(msgspec.Struct, frozen=True):
    """A block begins."""

    number: int
    kind: BlockKind
    id: str = ""
    name: str = ""
    index: int = 0


class BlockGrew(msgspec.Struct, frozen=True):
    """A block's content grows; never by nothing."""

    number: int
    text: str


class CallNamed(msgspec.Struct, frozen=True):
    """More of a call's id or name is known."""

    number: int
    id: str
    name: str


class BlockEnded(msgspec.Struct, frozen=True):
    """A block ends, complete or cut off."""

    number: int
    cut: bool = False


class BlocksVoided(msgspec.Struct, frozen=True):
    """The blocks from this number on are discarded."""

    since: int


class StreamFinished(msgspec.Struct, frozen=True):
    """The stream states why it ends."""

    reason: str


Change = BlockBegan | BlockGrew | CallNamed | BlockEnded | BlocksVoided | StreamFinished


class Piece(msgspec.Struct, Generic[C], frozen=True):
    """A chunk, or a part of one, for one policy call: belongs to at most one block and completes at most one."""

    chunk: C
    changes: Sequence[Change]
    block: int | None = None
    """The number of the block that it is part of."""
    waits: bool = False
    """Whether it must not overtake output deferred with `later`."""


class Reader(Protocol[C]):
    """Reads one stream."""

    def read(self, chunk: C) -> Sequence[Piece[C]]:
        """Read the next chunk, split into parts if necessary. Raises Malformed if it is invalid."""
        ...


class Writer(Protocol[C]):
    """Writes one stream."""

    def before_chunk(self, chunk: C) -> None:
        """Note the chunk that the policy is called with next; new content is inserted at its position."""
        ...

    def defer(self) -> object:
        """Return a mark of the current position for `resume_deferred`; called when the policy defers work."""
        ...

    def resume_deferred(self, mark: object) -> None:
        """Write at this mark's position from now on, until the next `before_chunk`."""
        ...

    def decided(self, decision: Decision) -> None:
        """Note a decision about the chunk of the last `before_chunk` or `resume_deferred`."""
        ...

    def write(self, sent: C | NewText | NewToolCall) -> Sequence[C]:
        """Return the output for it: gapless indices, blocks begun before they grow, a matching finish reason."""
        ...

    def terminate(self, decision: Decision) -> Sequence[C]:
        """Return what must still be sent to end the stream by this decision."""
        ...


class StreamFormat(Protocol[C]):
    """A stream format."""

    @property
    def words(self) -> ChunkAccess[C]: ...

    def reader(self) -> Reader[C]: ...

    def writer(self) -> Writer[C]: ...
