"""The time of the server, which all workers share, whatever the clocks of their hosts say.

Stamps that one host writes and another reads (deadlines, the time of a retry, when a run was last heard) are of this
clock. Between two looks at the server it runs on the host's steady clock, so a host whose clock is set anew changes
nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""A time that is older than this is looked at again."""
LONGEST_LOOK_S = 1.0
"""A reply that took longer says too little; the clock stays as it was."""


class ServerClock:
    """Tells the server's Unix time. Before its first `look` it tells the host's."""

    def __init__(self, ask: Callable[[], Awaitable[int]]) -> None:
        """``ask`` gives the server's Unix time in µs; it raises what redis-py raises."""
        self._ask = ask
        self._ahead_s: float | None = None
        """The server's time less the host's steady clock."""
        self._looked_at = -LOOK_S
        self._looking: asyncio.Task[None] | None = None

    def now_ms(self) -> int:
        """Milliseconds. Where it was not looked at for `LOOK_S`, that is done behind the scenes."""
        now = time.monotonic()
        if now - self._looked_at > LOOK_S and (self._looking is None or self._looking.done()):
            self._looked_at = now
            self._looking = asyncio.get_running_loop().create_task(self._look_again(), name="the server's time")
        return time.time_ns() // 1_000_000 if self._ahead_s is None else round((now + self._ahead_s) * 1000)

    async def look(self) -> None:
        """Ask the server. Raises what redis-py raises."""
        asked_at = time.monotonic()
        at_us = await self._ask()
        answered_at = self._looked_at = time.monotonic()
        if self._ahead_s is None or answered_at - asked_at < LONGEST_LOOK_S:
            self._ahead_s = at_us / 1_000_000 - (asked_at + answered_at) / 2

    async def close(self) -> None:
        """Look no more."""
        if self._looking:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look_again(self) -> None:
        try:
            await self.look()
        except (RedisError, OSError) as e:  # the steady clock runs on
            log.info("the server's time: %s", e)
