"""What a test may leave behind: no key that nothing bounds, no entry pending, no task."""

from __future__ import annotations

import asyncio
import re
from typing import Any, Literal

from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server

BOUNDED = re.compile(
    r"requests|meta|dead|audit(?::clients)?|members:.+"
    r"|\{.+:dead\}:rejected|\{.+:requests\}:(?:order|tenants)|\{\d+\}:(?:turns|tools):(?:order|tenants)"
    r"|\{gateway\}:(?:keys|spend:.+|console:secret)"
    r"|\{\d+\}:(?:turns|raw|events|drafts|tools|control|records|notices|decisions|visible|chunks|blocks|runs|sessions|lease:.+|state:.+|index:open)"
)
"""Keys that a deployment has once, bounded by trimming. Every other key must have a TTL."""


def check_tasks(known: set[asyncio.Task[Any]]) -> Literal[True]:
    """Raises AssertionError for a task that runs and is not known."""
    left = asyncio.all_tasks() - known - {asyncio.current_task()}
    assert not left, f"tasks still running: {left}"
    return True


async def check_keys(server: Server, keys: Keys, *, may_leave_pending: bool = False) -> None:
    """Raises AssertionError for a key that nothing bounds, and for entries that a group has taken and not finished."""
    client = server.client
    async for raw in client.scan_iter(match=f"{keys.prefix}:*", count=1000):
        key: str = raw.decode()
        bounded = BOUNDED.fullmatch(key.removeprefix(f"{keys.prefix}:"))
        assert bounded or await client.pttl(key) != -1, f"{key} has no TTL"  # -2: it expired by now
        if not may_leave_pending and await client.type(key) == b"stream":
            for group in await client.xinfo_groups(key):
                assert not group["pending"], f"{key}: {group['pending']} entries of group {group['name']} are pending"
