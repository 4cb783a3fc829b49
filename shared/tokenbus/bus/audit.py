"""Who changed what in a deployment: one entry for each action, also of commands. Never any content."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from tokenbus.bus.keys import DATA_FIELD, Keys
from tokenbus.bus.server.server import Server

AUDIT_ENTRIES = 10_000
"""So many of the newest entries are kept, about."""
PAGE = 100


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One action."""

    action: str
    """For example ``erase``, ``cancel``, ``keys.create``."""
    by: str
    """`USER@HOST` of a command; the id of a client's key; ``gateway`` without keys."""
    facts: dict[str, Any] = {}
    """What it was done to."""
    at_ms: int = 0
    """Unix time by the server's clock."""


async def audit(server: Server, keys: Keys, action: str, *, by: str, **facts: Any) -> None:
    """Add an entry. Raises redis-py's errors."""
    entry = msgspec.json.encode(AuditEntry(action=action, by=by, facts=facts))
    await server.client.xadd(keys.audit, {DATA_FIELD: entry}, maxlen=AUDIT_ENTRIES, approximate=True)


async def newest_audited(server: Server, keys: Keys, *, most: int) -> AsyncIterator[AuditEntry]:
    """Up to ``most`` entries, the newest first. Raises redis-py's errors."""
    end = "+"
    while most > 0 and (page := await server.client.xrevrange(keys.audit, max=end, count=min(most, PAGE))):
        for entry_id, fields in page:
            entry = msgspec.json.decode(fields[DATA_FIELD.encode()], type=AuditEntry)
            yield msgspec.structs.replace(entry, at_ms=int(entry_id.split(b"-")[0]))
        most -= len(page)
        end = f"({page[-1][0].decode()}"
