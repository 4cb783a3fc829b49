"""Child runs: runs that a tool call of another run begins. The id says whose: ``<parent>~<block of the call>``.

So the id follows from the call alone, and one call begins one run however often it is asked for. A run's id up to its
first such mark is that of the tree's root, which decides the partition of all of the tree.
"""

from __future__ import annotations

import re

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
