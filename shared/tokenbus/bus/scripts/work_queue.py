"""Work queues: each entry has one owner, and only the owner can keep, finish or return it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenbus.bus.scripts.script import ALONE, ScriptCall, script

MOST_IDS = 300
"""Most entries of one call that names them."""
OF_IDS = 12
"""Weight of such a call's values."""


@script(weight=OF_IDS)
def heartbeat(stream: str, *, group: str, consumer: str, ids: Sequence[str]) -> ScriptCall:
    """Claim the consumer's own entries again, which resets their idle time. Reply: the ids that are no longer ours.

    Without the ownership check, a zombie that wakes up would take its entry back from the new owner.
    """
    ...


READ_BYTES = 2**20
"""A script that hands out entries stops after this many bytes, and leaves the rest to the next call."""
_CLAIM_STEPS = 300


@script(weight=ALONE, MOST_STEPS=_CLAIM_STEPS, READ_BYTES=READ_BYTES)
def claim(stream: str, *, group: str, consumer: str, idle_ms: int, start: str, count: int) -> ScriptCall:
    """Claim up to ``count`` entries that have been idle for ``idle_ms``, scanning from ``start``.

    Reply: the next cursor (``0-0``: start again), and [id, deliveries, fields] of each entry.
    """
    ...


BEGUN = 1000
"""Added to an entry's number of deliveries while work on it has begun. An entry is given up long before so many."""


def mark(stream: str, *, group: str, consumer: str, entry: str, begun: bool) -> ScriptCall:
    """Record whether work on one of the consumer's entries has begun: 1, or 0 if it is no longer ours.

    An entry marked as not begun is claimed from a dead worker as if never delivered. An entry marked as begun is
    claimed with more than `BEGUN` deliveries.
    """
    return _mark(stream, group=group, consumer=consumer, entry=entry, deliveries=BEGUN + 1 if begun else 0)


@script()
def _mark(stream: str, *, group: str, consumer: str, entry: str, deliveries: int) -> ScriptCall: ...


@script(weight=OF_IDS)
def finish(stream: str, *, group: str, consumer: str, ids: Sequence[str]) -> ScriptCall:
    """Acknowledge and delete the consumer's own entries; a work queue holds only unfinished ones. Reply: how many were
    ours.

    Without the ownership check, a zombie would delete an entry that its new owner has not finished.
    """
    ...


HANDED_BACK_MS = 86_400_000
"""Idle time of an entry that was handed back; no live worker goes this long without a heartbeat."""
NOBODY = "-"
"""Name of the consumer that holds returned entries."""


@script(weight=OF_IDS, NOBODY=NOBODY, HANDED_BACK_MS=HANDED_BACK_MS)
def hand_back(stream: str, *, group: str, consumer: str, ids: Sequence[str]) -> ScriptCall:
    """Return the consumer's own entries for the next claim, as if never delivered. Reply: how many were ours.

    They keep their place and their id, because the id names a request without a name of its own.
    """
    ...


@script(weight=OF_IDS)
def requeue(stream: str, *, group: str, consumer: str, ids: Sequence[str]) -> ScriptCall:
    """Move the consumer's own entries to the end, with new ids, as if never delivered. Reply: how many were ours."""
    ...


@script()
def retire(stream: str, *, group: str, consumer: str) -> ScriptCall:
    """Remove a consumer that holds nothing: 1, else 0.

    Without the check, entries would be lost if the server assigned them to the consumer and the reply never arrived.
    """
    ...


def pages(ids: Mapping[str, Sequence[str]]) -> list[tuple[str, Sequence[str]]]:
    """Divide each stream's entry ids into as many as one call may name."""
    return [(stream, many[i : i + MOST_IDS]) for stream, many in ids.items() for i in range(0, len(many), MOST_IDS)]
