"""Who changed what in a deployment, and over which door: one entry for each action. Never any content.

What clients of the gateway do is in a stream of its own, so that many cancels of theirs displace no erasure by an
operator.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenbus.bus.keys import DATA_FIELD, Keys
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import id_key

AUDIT_ENTRIES = 10_000
"""So many of the newest entries of each stream are kept, about."""
OPERATORS = frozenset({"cli", "console", "admin"})
"""Doors of those who run the deployment."""
PAGE = 1000


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One action."""

    action: str
    """For example ``erase``, ``cancel``, ``keys.create``."""
    by: str
    """`USER@HOST` of a command; the id of a client's key; ``gateway`` without keys; ``admin token``."""
    door: str
    """``cli``, ``console``, ``admin``, or the gateway's surface."""
    facts: dict[str, Any] = {}
    """What it was done to."""
    at_ms: int = 0
    """Unix time by the server's clock."""


async def audit(server: Server, keys: Keys, action: str, *, by: str, door: str, **facts: Any) -> None:
    """Add an entry, without facts that are None. Raises redis-py's errors."""
    known = {name: value for name, value in facts.items() if value is not None}
    entry = msgspec.json.encode(AuditEntry(action=action, by=by, door=door, facts=known))
    stream = keys.audit if door in OPERATORS else keys.audit_clients
    await server.client.xadd(stream, {DATA_FIELD: entry}, maxlen=AUDIT_ENTRIES, approximate=True)


async def newest_audited(server: Server, keys: Keys, *, most: int) -> list[AuditEntry]:
    """Up to ``most`` entries of both streams, the newest first. Raises redis-py's errors."""
    found: list[tuple[tuple[int, int], bytes]] = []
    for stream in (keys.audit, keys.audit_clients):
        left, end = most, "+"
        while left > 0 and (page := await server.client.xrevrange(stream, max=end, count=min(left, PAGE))):
            found += [(id_key(entry_id.decode()), fields[DATA_FIELD.encode()]) for entry_id, fields in page]
            left -= len(page)
            end = f"({page[-1][0].decode()}"
    found.sort(key=lambda each: each[0], reverse=True)
    return [
        msgspec.structs.replace(msgspec.json.decode(data, type=AuditEntry), at_ms=at[0]) for at, data in found[:most]
    ]
