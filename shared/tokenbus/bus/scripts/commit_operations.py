"""The writes that a commit may contain.

A write is an operation: its letter, the number of the key it writes to, and its arguments, all in one flat list.
`Commit` builds that list; the scripts that commit (commit.lua, chain.lua) run it with pieces/operate.lua.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenbus.bus.scripts.runs.index import MOST_FORGOTTEN
from tokenbus.bus.scripts.script import Constant


class Operation(NamedTuple):
    """One write of a commit, encoded as its letter, the key it writes to, and its arguments."""

    letter: str
    arguments: int = 1
    """Number of arguments after the key."""
    counts_more: bool = False
    """The last argument is the number of further arguments."""
    keys: slice = slice(0, 0)
    """Which of the arguments after the key are keys too."""


PUBLISH = Operation("d", 3, counts_more=True, keys=slice(3, None))  # entry id, data; the topics
APPEND = Operation("x", counts_more=True)  # fields
PUBLISH_TO_TOPIC = Operation("t")  # data
COUNT = Operation("n")  # bytes
SET = Operation("h", counts_more=True)  # fields
DELETE = Operation("u")  # field
EXPIRE = Operation("e")  # milliseconds
CLOSE_ATTEMPT = Operation("c", 7, keys=slice(1, 4))  # attempt; raw, lease, control; run, lost, control frame
END_RUN = Operation("z", 6, keys=slice(0, 4))
# open runs, ended runs, those of the run's tenant (or the same again); run, milliseconds
ARRIVED = Operation("l")  # bytes
VOID = Operation("v", 2, keys=slice(0, 1))  # input; run
_NAMED = {
    "PUBLISH": PUBLISH,
    "APPEND": APPEND,
    "PUBLISH_TO_TOPIC": PUBLISH_TO_TOPIC,
    "COUNT": COUNT,
    "SET": SET,
    "DELETE": DELETE,
    "EXPIRE": EXPIRE,
    "CLOSE_ATTEMPT": CLOSE_ATTEMPT,
    "END_RUN": END_RUN,
    "ARRIVED": ARRIVED,
    "VOID": VOID,
}
OPERATIONS = {operation.letter: operation for operation in _NAMED.values()}
"""By letter."""

LUA: Mapping[str, Constant] = {
    **{name: operation.letter for name, operation in _NAMED.items() if operation is not ARRIVED},
    "MOST_FORGOTTEN": MOST_FORGOTTEN,
}
"""Constants of pieces/operate.lua, which takes every other letter for ARRIVED."""


def length_of(operation: Operation, ops: Sequence[Any], at: int) -> int:
    """Number of values of the operation at ``at``, including its letter and key."""
    length = 2 + operation.arguments
    return length + ops[at + length - 1] if operation.counts_more else length
