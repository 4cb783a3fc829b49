"""Fair order of a work queue: tenants take turns, however many entries one of them has waiting.

The order is start-time fair queueing (Goyal, Vin and Cheng, 1996). An entry's tag is the larger of its tenant's next
tag and the smallest waiting tag. The tenant's next tag is that plus the entry's cost. The smallest tag goes first.

Entries stay in their stream until they are finished. Beside the stream, in the same slot, are a sorted set (entry ids
by tag) and a hash (each tenant's next tag). Both are deleted with the last waiting entry. They are only an index: an
indexed entry is pending with `NOBODY`, like one that was handed back, and `reclaim` adds entries that are missing from
the index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tokenbus.bus.keys import TENANT_FIELD, order_keys
from tokenbus.bus.scripts.script import ALONE, ScriptCall, script
from tokenbus.bus.scripts.work_queue import HANDED_BACK_MS, NOBODY, OF_IDS, READ_BYTES

Entries = Literal["requests", "turns", "tools"]
"""What the stream's entries are, which determines how their tenant is found."""

SORTED_ENTRIES = 256
"""Maximum entries that one call sorts, and that it hands out: about 7 ms of the server's time."""
NEWEST_ENTRIES = 64
"""If more are unread than one call sorts, it looks for urgent entries among this many of the newest."""
COST_BYTES = 64 * 1024
"""This many bytes cost as much as one entry."""
URGENT_BYTES = 16 * 1024
"""Maximum size of an urgent request. A cancel has only an id and a reason, so a larger request is not a cancel."""
LOOKED_AT_BYTES = 256 * 1024
"""A tenant is looked for in this much of each end of a large request."""
_TENANT_CHARS = 256
SPARE_TENANTS = 1_000
"""Margin: with more tenants than twice the waiting entries plus this, tenants without waiting entries are removed, from
a random sample of them at each call.
"""

_ORDER = {
    "TENANT_FIELD": TENANT_FIELD,
    "TENANT_CHARS": _TENANT_CHARS,
    "URGENT_BYTES": URGENT_BYTES,
    "LOOKED_AT_BYTES": LOOKED_AT_BYTES,
    "NOBODY": NOBODY,
    "HANDED_BACK_MS": HANDED_BACK_MS,
    "COST_BYTES": COST_BYTES,
    "SPARE_TENANTS": SPARE_TENANTS,
}


def take(stream: str, entries: Entries, *, group: str, consumer: str, count: int) -> ScriptCall:
    """Put unread entries in order, then take the next ``count``.

    Reply: the number of waiting entries; 1 if more are unread, else 0; the urgent ones among the unread, which the
    consumer now holds too; the entries taken. Each entry is [id, 1, fields]. Entries stay unread if the server has no
    memory for a larger index.
    """
    return _take(stream, *order_keys(stream), entries=entries, group=group, consumer=consumer, count=count)


@script(weight=ALONE, **_ORDER, SORTED_ENTRIES=SORTED_ENTRIES, READ_BYTES=READ_BYTES, NEWEST_ENTRIES=NEWEST_ENTRIES)
def _take(
    stream: str, order: str, tenants: str, *, entries: Entries, group: str, consumer: str, count: int
) -> ScriptCall: ...


def reclaim(
    stream: str, entries: Entries, *, group: str, consumer: str, idle_ms: int, start: str, count: int
) -> ScriptCall:
    """Claim up to ``count`` entries that their worker has not kept alive for ``idle_ms``, and repair the index.

    ``start``: cursor of the repair. Reply: its next cursor, the number of waiting entries, and [id, deliveries, fields]
    of each claimed entry.
    """
    order, tenants = order_keys(stream)
    return _reclaim(
        stream,
        order,
        tenants,
        entries=entries,
        group=group,
        consumer=consumer,
        idle_ms=idle_ms,
        count=count,
        start=start,
    )


@script(weight=ALONE, **_ORDER, SORTED_ENTRIES=SORTED_ENTRIES, READ_BYTES=READ_BYTES)
def _reclaim(
    stream: str,
    order: str,
    tenants: str,
    *,
    entries: Entries,
    group: str,
    consumer: str,
    idle_ms: int,
    count: int,
    start: str,
) -> ScriptCall: ...


def put_back(
    stream: str, entries: Entries, *, group: str, consumer: str, ids: Sequence[str], in_front: bool = True
) -> ScriptCall:
    """Return the consumer's own entries to the queue, as if never delivered.

    ``in_front``: they have had their turn and go first; False: they go behind their tenants' other entries. They keep
    their ids, because the id names a request without a name of its own. Reply: how many were ours.
    """
    order, tenants = order_keys(stream)
    return _put_back(
        stream, order, tenants, entries=entries, group=group, consumer=consumer, in_front=int(in_front), ids=ids
    )


@script(weight=OF_IDS, **_ORDER)
def _put_back(
    stream: str,
    order: str,
    tenants: str,
    *,
    entries: Entries,
    group: str,
    consumer: str,
    in_front: int,
    ids: Sequence[str],
) -> ScriptCall: ...
