"""Backpressure: pauses reading from sockets while later stages lag too far behind.

Every append reports its partition's lag. If the lag is too long, it is polled until half of the limit is left; this
hysteresis keeps sockets from pausing and resuming all the time.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from functools import partial
from typing import Literal

from redis.exceptions import RedisError

from tokenbus.bus.keys import Keys
from tokenbus.bus.leases import read_lag
from tokenbus.bus.run_record import read_attempt
from tokenbus.bus.server.server import Server
from tokenbus_services.runtime.task_failures import LoggedTasks

LAG_POLL_S = 0.02
SHORT_BYTES = 256 * 1024
"""Maximum lag of normalizer and parser together in a partition while a heavy attempt writes there."""
SHORT_POLL_S = 0.005
SHORT_PATIENCE_S = 1.0
"""Longest wait for that. A partition busy with small runs slows a heavy attempt down but never stops it."""

Later = Literal["normalizer", "policy"]
"""The normalizer holds back all runs, the policy stage only runs under policies."""


class Backpressure:
    """The stage lags that one process knows of."""

    def __init__(self, server: Server, keys: Keys, *, lag_bytes: int) -> None:
        """``lag_bytes``: the maximum lag of a stage."""
        self._server = server
        self._keys = keys
        self._most = lag_bytes
        self._events: dict[tuple[int, Later], asyncio.Event] = {}
        """By partition and lagging stage: set when the stage has caught up."""
        self._look_at = 0.0
        self._looks = LoggedTasks("lag", most=lambda: 2 * keys.partitions)
        self._looked_at: set[tuple[int, Later]] = set()
        self._waiting: dict[int, tuple[float, int]] = {}
        """By partition: when the lag of both stages was read, and that lag plus what was written since."""
        self._reading: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def any(self) -> bool:
        """Whether any stage lags too far behind."""
        return bool(self._events)

    def set_lag(self, partition: int, stage: Later, lag: int) -> None:
        """Report a stage's lag in a partition, in bytes."""
        if lag > self._most:
            self._events.setdefault((partition, stage), asyncio.Event())

    def of(self, partition: int, stage: Later) -> asyncio.Event | None:
        """Return an event that is set when the stage has caught up; None if it does not lag."""
        return self._events.get((partition, stage))

    async def look(self) -> None:
        """Check whether lagging stages have caught up, at most once per `LAG_POLL_S`. If the server is unavailable, a
        later call asks again.
        """
        now = asyncio.get_running_loop().time()
        if now < self._look_at:
            return
        self._look_at = now + LAG_POLL_S
        waiting = [key for key in self._events if key not in self._looked_at]
        await self._looks.run((partial(self._look, *key) for key in waiting), patience_s=LAG_POLL_S)

    async def _look(self, partition: int, stage: Later) -> None:
        self._looked_at.add((partition, stage))
        try:
            lag = await self._lag(partition, stage)
        except (RedisError, OSError):
            return
        finally:
            self._looked_at.discard((partition, stage))
        if lag <= self._most // 2:
            self._events.pop((partition, stage)).set()

    async def close(self) -> None:
        """Stop polling."""
        await self._looks.close()

    async def short(self, partition: int, adds: int) -> None:
        """Wait until both stages have nearly finished the partition, at most `SHORT_PATIENCE_S`, before writing
        ``adds`` bytes.

        Entries of small runs written meanwhile then wait behind little data.
        """
        clock = asyncio.get_running_loop().time
        until = clock() + SHORT_PATIENCE_S
        while True:
            async with self._reading[partition]:  # one task asks on behalf of all that wait
                read_at, lag = self._waiting.get(partition, (-SHORT_POLL_S, 0))
                if clock() >= read_at + SHORT_POLL_S:
                    try:
                        lag = await self._lag(partition, "normalizer") + await self._lag(partition, "parser")
                    except (RedisError, OSError):
                        lag = SHORT_BYTES + 1
                    read_at = clock()
                if lag <= SHORT_BYTES or clock() >= until:
                    self._waiting[partition] = read_at, lag + adds
                    return
                self._waiting[partition] = read_at, lag
            await asyncio.sleep(SHORT_POLL_S)

    async def holds_back(self, run: str, attempt: int, *, waits: bool) -> bool:
        """Whether the policy stage lags too far behind to judge this run too. False if the attempt is no longer open.

        ``waits``: whether the run has already waited for it. Raises redis-py's errors.
        """
        partition = self._keys.partition_of(run)
        if await self._lag(partition, "policy") <= (self._most // 2 if waits else self._most):
            return False
        record = await read_attempt(self._server.client, self._keys.run(run), attempt)
        return record.is_open and not record.bypassed

    async def _lag(self, partition: int, stage: Later | Literal["parser"]) -> int:
        return await read_lag(self._server.client, self._keys.lease(partition, stage))
