"""How workers outlast a server that is away, restarting, failing over or full: they try again until it answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import RedisError

from tokenbus.bus.server import may_pass

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5
"""Short enough that a worker is back within a second of its server."""


async def outlast(attempt: Callable[[], Awaitable[T]], *, what: str, unless: Callable[[], bool] | None = None) -> T:
    """The result of ``attempt``, tried until the server has it. Only for what may be sent twice.

    Raises what redis-py raises where another try cannot help, for the call itself is at fault; and once ``unless`` says
    that nobody waits any more. The first error of each outage is logged with ``what``.
    """
    pause = FIRST_PAUSE_S
    while True:
        try:
            return await attempt()
        except (RedisError, OSError) as e:
            if not may_pass(e) or (unless and unless()):
                raise
            if pause == FIRST_PAUSE_S:
                log.warning("%s: trying again until the server takes it: %s", what, e)
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_S)
