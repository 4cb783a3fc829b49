"""Scripts of the deployment's layout (bus/layout.py, bus/layout.py)."""

from __future__ import annotations

from collections.abc import Sequence

from tokenbus.bus.scripts.script import Arg, ScriptCall, script


@script()
def join(
    meta: str,
    *,
    partitions: int,
    wire_version: int,
    seen: str,
    epoch: int,
    numbers: str,
    ever: str,
    spread: int,
    durability: str = "",
) -> ScriptCall:
    """Agree on the layout: write it if the server has none, or one of an earlier epoch. ``seen``: field in which a
    worker confirms its epoch while a change is announced; empty: none. ``durability``: what clients are told of it;
    empty: nothing.

    Reply: the values of `layout.FIELDS`.
    """
    ...


@script()
def fence(parser_lease: str, *, epoch: int) -> ScriptCall:
    """Let no run be created in this partition by an earlier epoch."""
    ...


@script()
def change(meta: str, *, epoch: int, announced: str | int, fields: Sequence[Arg]) -> ScriptCall:
    """Change the layout if its epoch still is ``epoch`` (0: none), and raise that by one. Reply: 1, else 0.

    ``announced``: the number of partitions that is announced from now on; empty: none.
    """
    ...


@script()
def begin_added(lease: str) -> ScriptCall:
    """Let a group begin at the start of an added partition, unless it has an offset there."""
    ...
