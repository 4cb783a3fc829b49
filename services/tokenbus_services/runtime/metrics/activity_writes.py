"""When a worker adds what it counted to the deployment's activity."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
from redis.exceptions import RedisError

from tokenbus.bus.liveness import Defects, rest

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

WRITE_S = 5.0


async def write_regularly(write: Callable[[], Awaitable[None]]) -> None:
    """Call ``write`` every few seconds. A server that is away, or rights that are missing, cost only the counts."""
    defects = Defects()
    while True:
        await rest(WRITE_S)
        try:
            await write()
            defects.none()
        except Exception as e:
            log.debug("activity_not_written", error=str(e) or type(e).__name__)
            if not isinstance(e, RedisError | OSError):
                defects.count(e)
