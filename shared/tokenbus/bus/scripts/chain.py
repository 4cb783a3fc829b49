"""Chained flush: raw frames of one partition, with the commits of both stages on them, in one atomic step."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.bus.scripts.commit import LUA, Commit
from tokenbus.bus.scripts.runs.attempt_fence import RawPart
from tokenbus.bus.scripts.script import Arg, ScriptCall, script

MOST_UNREAD = 64
"""Maximum entries of other runs to apply together with a chained flush."""
MOST_PARTS = 500
"""Maximum runs in one chained flush: a server takes some 8 µs for each, besides the commits."""
MOST_LOAD = 1.25
"""Maximum `Commit.load` of both stages together: what the second one publishes is more than the first one hands on."""


class ChainedStage(msgspec.Struct, frozen=True):
    """One stage's side of a chained flush."""

    token: str
    begin: str
    """The committed offset."""
    seen: str
    """The last entry that was applied, besides those of this flush."""
    watermark: str
    """Empty: the entry that this flush writes."""
    entries: int
    size: int
    """Bytes of these entries' frames."""
    commit: Commit
    mirror: str


def chain(
    first: ChainedStage,
    second: ChainedStage,
    parts: Sequence[RawPart],
    *,
    flush: str,
    ttl_ms: int,
    entries_read: bool,
    topic_entries: int,
    policy_lease: str | None = None,
) -> ScriptCall:
    """Write raw frames as one entry, as `append_raw` does, and with it what both stages commit on it.

    ``flush``: unique name, so that a repetition after a lost reply is recognised. ``parts`` hold each run at most once.
    The commit of ``first`` appends to the input of ``second``; each offset moves to the last entry that this call
    appends to its stage's input.

    Reply: ``['ok', offset, offset]``, with the policy stage's lag in bytes if ``policy_lease`` is given; ``['already',
    offset, offset]``. All others write nothing: ``['fenced', token, token]``; ``['moved', offset, offset]`` or
    ``['gone']`` (a fail-over lost writes); ``['unread', entries, entries]``: what neither stage has applied;
    ``['refused', run]``: see `append_raw`; ``['misfit']``: a key has another type; ``['full']``.
    """
    generation = "7" if entries_read else "6"
    rest: list[Arg] = []
    for p in parts:
        rest += (p.run, p.attempt, p.n, 1 if p.final else 0, p.data, p.writer, p.job)
    rest += first.commit.operations
    rest += second.commit.operations
    lease_one, input_one, *_ = first.commit.keys
    lease_two, input_two, *_ = second.commit.keys
    return _chain(
        lease_one,
        input_one,
        lease_two,
        input_two,
        policy_lease or lease_one,
        [*(p.run_key for p in parts), *first.commit.keys, *second.commit.keys],
        token_one=first.token,
        token_two=second.token,
        begin_one=first.begin,
        seen_one=first.seen,
        begin_two=second.begin,
        seen_two=second.seen,
        ttl_ms=ttl_ms,
        watermark_one=first.watermark,
        watermark_two=second.watermark,
        count_one=first.entries,
        size_one=first.size,
        count_two=second.entries,
        size_two=second.size,
        mirror_one=generation + first.mirror,
        mirror_two=generation + second.mirror,
        topic_entries=topic_entries,
        flush=flush,
        policy_lag=1 if policy_lease else 0,
        kinds_one=first.commit.kinds,
        kinds_two=second.commit.kinds,
        runs=len(parts),
        operations_one=len(first.commit.operations),
        rest=rest,
    )


@script(**LUA, MOST_UNREAD=MOST_UNREAD)
def _chain(
    lease_one: str,
    input_one: str,
    lease_two: str,
    input_two: str,
    policy_lease: str,
    others: Sequence[str],
    *,
    token_one: str,
    token_two: str,
    begin_one: str,
    seen_one: str,
    begin_two: str,
    seen_two: str,
    ttl_ms: int,
    watermark_one: str,
    watermark_two: str,
    count_one: int,
    size_one: int,
    count_two: int,
    size_two: int,
    mirror_one: str,
    mirror_two: str,
    topic_entries: int,
    flush: str,
    policy_lag: int,
    kinds_one: str,
    kinds_two: str,
    runs: int,
    operations_one: int,
    rest: Sequence[Arg],
) -> ScriptCall: ...
