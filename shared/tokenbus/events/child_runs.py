"""Child runs: runs that a tool call of another run begins. The id says whose: ``<parent>~<block of the call>``.

So the id follows from the call alone, and one call begins one run however often it is asked for. A run's id up to its
first such mark is that of the tree's root, which decides the partition of all of the tree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

_MARK = "~"
_CHILD = re.compile(r"(.+)~([0-9]{1,9})")


def child_id(parent: str, block: int) -> str:
    """The id of the run that the call of this block begins."""
    return f"{parent}{_MARK}{block}"


def parent_call(run: str) -> tuple[str, int] | None:
    """The parent and the block of its call; None for a run that no call began."""
    found = _CHILD.fullmatch(run) if _MARK in run else None
    return (found[1], int(found[2])) if found else None


def root_of(run: str) -> str:
    """The run at the top of the tree; the run itself if no call began it."""
    while found := parent_call(run):
        run = found[0]
    return run


def depth_of(run: str) -> int:
    """How many runs are above this one: 0 for a run that no call began."""
    depth = 0
    while found := parent_call(run):
        run, depth = found[0], depth + 1
    return depth


def path_to(run: str, top: str) -> tuple[str, ...]:
    """The runs from ``top`` down to this one, both included; empty if it is not below it."""
    path = [run]
    while path[0] != top:
        if (found := parent_call(path[0])) is None:
            return ()
        path.insert(0, found[0])
    return tuple(path)


class TreeEntry(msgspec.Struct, frozen=True):
    """What one commit added to a tree. The entries of a tree's stream give all of its events one order: those of an
    entry follow those of the entries before it.
    """

    run: str
    first: str
    """Entry id of the run's first event in the commit; ``0-0`` in a tree's first entry, for all that the root had said
    before.
    """
    last: int
    """The seq of the last one; below the first one's if there is none."""
    begins: Sequence[int] = ()
    """Blocks of the calls that begin child runs in this commit."""

    def encode(self) -> bytes:
        """The value of the entry's only field, whose name is the run."""
        return " ".join([self.first, str(self.last), *map(str, self.begins)]).encode()

    @classmethod
    def decode(cls, fields: Mapping[bytes, bytes]) -> TreeEntry:
        """Read the entry. Raises ValueError."""
        ((run, value),) = fields.items()
        first, last, *begins = value.decode().split(" ")
        return cls(run.decode(), first, int(last), [int(block) for block in begins])
