"""A stage's lag in one partition: the bytes that arrived there and that it has not worked in yet.

Both numbers stand in the lease hash of the stage's group (`Keys.lease`): whoever appends to its input counts
``arrived``, the stage's own commit counts ``done``. The scripts in `bus/scripts` have the names as literals.
"""

from __future__ import annotations

from typing import Any

LAG_FIELDS = ("arrived", "done")


def lag_of(arrived: bytes | None, done: bytes | None) -> int:
    """The lag from the values of `LAG_FIELDS`, in bytes. Never below 0, though a fail-over may lose what arrived."""
    return max(0, int(arrived or 0) - int(done or 0))


async def read_lag(client: Any, lease_key: str) -> int:
    """The lag of the group with this lease hash. Raises what redis-py raises."""
    return lag_of(*await client.hmget(lease_key, LAG_FIELDS))
