"""The server's clock, which all workers use instead of their hosts' clocks.

Timestamps that one host writes and another reads (deadlines, retry times, a run's last event) use this clock. Between
two queries it advances with the host's monotonic clock, so changes of a host's wall clock have no effect.

The server's clock may jump too, or another server with a different clock may take over. If a query finds a difference
of more than `STEP_S`, this clock is slewed: it runs up to `SLEW` faster or slower until it agrees again. A duration
that spans a jump is therefore wrong by at most the part slewed in it, and a jump that is reverted costs almost nothing.
A process that starts after a jump uses the server's time at once. Until the other processes agree, it reads their
timestamps with an error of the remaining difference.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from tokenbus.bus.liveness import stop_task

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""Maximum age of a query before the next one."""
LONGEST_LOOK_S = 1.0
"""A reply that took longer is too inaccurate and is ignored."""
STEP_S = 1.0
"""A smaller difference is corrected at once."""
SLEW = 0.1
"""Fraction of each second by which this clock moves towards a server clock that jumped."""


class ServerClock:
    """Estimates the server's Unix time. Returns the host's before the first `measure`."""

    def __init__(self, ask: Callable[[], Awaitable[int]]) -> None:
        """``ask`` returns the server's Unix time in µs; it raises redis-py's errors."""
        self._ask = ask
        self._ahead_s: float | None = None
        """This clock minus the host's monotonic clock."""
        self._server_ahead_s = 0.0
        """The server's clock at the last query minus the host's monotonic clock."""
        self._moved_at = 0.0
        """When this clock was last moved towards the server's."""
        self._looked_at = -LOOK_S
        self._looking: asyncio.Task[None] | None = None

    def now_ms(self) -> int:
        """Time in ms. Starts a query in the background if the last one is older than `LOOK_S`."""
        now = time.monotonic()
        if now - self._looked_at > LOOK_S and (self._looking is None or self._looking.done()):
            self._looked_at = now
            self._looking = asyncio.get_running_loop().create_task(self._remeasure(), name="the server's time")
        if self._ahead_s is None:
            return time.time_ns() // 1_000_000
        if self._ahead_s != self._server_ahead_s:
            self._ahead_s = self._moved(self._ahead_s, now)
        return round((now + self._ahead_s) * 1000)

    def ms_of(self, server_ms: int) -> int:
        """Convert a timestamp of the server itself (such as a stream entry's id) to the time scale of `now_ms`."""
        return server_ms if self._ahead_s is None else server_ms - round((self._server_ahead_s - self._ahead_s) * 1000)

    def _moved(self, ahead_s: float, now: float) -> float:
        most = SLEW * (now - self._moved_at)
        self._moved_at = now
        return ahead_s + max(-most, min(most, self._server_ahead_s - ahead_s))

    async def measure(self) -> None:
        """Query the server. Raises redis-py's errors."""
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
        """Stop the queries."""
        await stop_task(self._looking)

    async def _remeasure(self) -> None:
        try:
            await self.measure()
        except (RedisError, OSError) as e:  # the monotonic clock continues
            log.info("the server's time: %s", e)
