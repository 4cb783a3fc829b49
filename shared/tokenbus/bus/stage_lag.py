"""Lag of a stage in one partition: bytes that arrived there and that it has not processed yet.

Both counters are in the lease hash of the stage's group (`Keys.lease`): every writer to its input adds to ``arrived``,
the stage's own commit adds to ``done``. The scripts in `bus/scripts` contain the names as literals.
"""

from __future__ import annotations

from typing import Any

LAG_FIELDS = ("arrived", "done")


def lag_of(arrived: bytes | None, done: bytes | None) -> int:
    """The lag in bytes, from the values of `LAG_FIELDS`. Never below 0, although a fail-over may lose ``arrived``."""
    return max(0, int(arrived or 0) - int(done or 0))


async def read_lag(client: Any, lease_key: str) -> int:
    """The lag of the group with this lease hash. Raises redis-py's errors."""
    return lag_of(*await client.hmget(lease_key, LAG_FIELDS))
