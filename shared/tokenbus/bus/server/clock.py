"""The time of the server, which all workers share, whatever the clocks of their hosts say.

Stamps that one host writes and another reads (deadlines, the time of a retry, when a run was last heard) are of this
clock. Between two looks at the server it runs on the host's steady clock, so a host whose clock is set anew changes
nothing.

The server's own clock may jump, too, or another server may take over whose clock differs. A look that finds more than
`STEP_S` of a difference moves the time here slowly: it runs up to `SLEW` faster or slower than the steady clock until
it agrees again. So a duration that spans a jump is wrong by that part of it at the most, and a jump that is taken back
costs next to nothing. A process that starts after a jump takes the server's time as it is: until the others agree, what
it makes of their stamps is off by the rest of the jump.
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
STEP_S = 1.0
"""A smaller difference is taken over at once."""
SLEW = 0.1
"""Part of each second by which the time here is moved towards a server whose clock jumped."""


class ServerClock:
    """Tells the server's Unix time. Before its first `look` it tells the host's."""

    def __init__(self, ask: Callable[[], Awaitable[int]]) -> None:
        """``ask`` gives the server's Unix time in µs; it raises what redis-py raises."""
        self._ask = ask
        self._ahead_s: float | None = None
        """The time that is told, less the host's steady clock."""
        self._server_ahead_s = 0.0
        """The server's time, as the last look found it, less the host's steady clock."""
        self._moved_at = 0.0
        """When the time that is told was last moved towards the server's."""
        self._looked_at = -LOOK_S
        self._looking: asyncio.Task[None] | None = None

    def now_ms(self) -> int:
        """Milliseconds. Where it was not looked at for `LOOK_S`, that is done behind the scenes."""
        now = time.monotonic()
        if now - self._looked_at > LOOK_S and (self._looking is None or self._looking.done()):
            self._looked_at = now
            self._looking = asyncio.get_running_loop().create_task(self._look_again(), name="the server's time")
        if self._ahead_s is None:
            return time.time_ns() // 1_000_000
        if self._ahead_s != self._server_ahead_s:
            self._ahead_s = self._moved(self._ahead_s, now)
        return round((now + self._ahead_s) * 1000)

    def ms_of(self, server_ms: int) -> int:
        """A time that the server itself stamped (a stream entry's id, say) as `now_ms` would have told it."""
        return server_ms if self._ahead_s is None else server_ms - round((self._server_ahead_s - self._ahead_s) * 1000)

    def _moved(self, ahead_s: float, now: float) -> float:
        most = SLEW * (now - self._moved_at)
        self._moved_at = now
        return ahead_s + max(-most, min(most, self._server_ahead_s - ahead_s))

    async def look(self) -> None:
        """Ask the server. Raises what redis-py raises."""
        asked_at = time.monotonic()
        at_us = await self._ask()
        answered_at = self._looked_at = time.monotonic()
        if self._ahead_s is not None and answered_at - asked_at >= LONGEST_LOOK_S:
            return
        found = at_us / 1_000_000 - (asked_at + answered_at) / 2
        if self._ahead_s is not None:
            self._ahead_s = self._moved(self._ahead_s, answered_at)
            if abs(found - self._server_ahead_s) > STEP_S:
                log.warning("the server's clock jumped by %.1f s", found - self._server_ahead_s)
        self._server_ahead_s, self._moved_at = found, answered_at
        if self._ahead_s is None or abs(found - self._ahead_s) <= STEP_S:
            self._ahead_s = found

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
