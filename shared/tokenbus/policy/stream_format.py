"""What a kind of stream must be able to say, so that policies work on it: `Dialect`.

A `Reader` says what a chunk does to the blocks, a `Writer` makes a sound stream of what a policy sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from tokenbus.events.public import BlockKind
from tokenbus.policy.processor import ChunkAccess, Decision, NewText, NewToolCall

C = TypeVar("C")


class Began(msgspec.Struct, frozen=True):
    """A block begins."""

    number: int
    kind: BlockKind
    id: str = ""
    name: str = ""
    index: int = 0


class Grew(msgspec.Struct, frozen=True):
    """A piece of a block's content, never empty."""

    number: int
    text: str


class Named(msgspec.Struct, frozen=True):
    """More of a call's id or name became known."""

    number: int
    id: str
    name: str


class Ended(msgspec.Struct, frozen=True):
    """A block ends, complete or cut off."""

    number: int
    cut: bool = False


class Voided(msgspec.Struct, frozen=True):
    """The blocks from this number on never were."""

    since: int


class Finished(msgspec.Struct, frozen=True):
    """The stream says why it ends."""

    reason: str


Change = Began | Grew | Named | Ended | Voided | Finished


class Piece(msgspec.Struct, Generic[C], frozen=True):
    """A chunk, or the part of one that a policy is called with: of one block at most, and completing one at most."""

    chunk: C
    changes: Sequence[Change]
    block: int | None = None
    """The number of the block that it is a part of."""
    waits: bool = False
    """Whether it must not overtake what a policy put off with `later`."""


class Reader(Protocol[C]):
    """Of one stream."""

    def read(self, chunk: C) -> Sequence[Piece[C]]:
        """What the next chunk says, in parts where it must be. Raises Malformed for what cannot be."""
        ...


class Writer(Protocol[C]):
    """Of one stream."""

    def before_chunk(self, chunk: C) -> None:
        """The chunk that the policy is about to be called with: where in the stream new things would stand."""
        ...

    def defer(self) -> object:
        """The policy puts something off, called as it was `heard` to be: a mark for `resume_deferred`."""
        ...

    def resume_deferred(self, mark: object) -> None:
        """What is written from now on is what was put off under this mark, until another chunk is `heard`."""
        ...

    def decided(self, decision: Decision) -> None:
        """The policy decided this, about what was `heard` or `resume_deferred` last."""
        ...

    def write(self, sent: C | NewText | NewToolCall) -> Sequence[C]:
        """What goes out for it: indices gapless, blocks begun before they grow, the finish reason as the rest wants."""
        ...

    def terminate(self, decision: Decision) -> Sequence[C]:
        """What must still go out for the stream to end here, by this decision."""
        ...


class StreamFormat(Protocol[C]):
    """A kind of stream."""

    @property
    def words(self) -> ChunkAccess[C]: ...

    def reader(self) -> Reader[C]: ...

    def writer(self) -> Writer[C]: ...
