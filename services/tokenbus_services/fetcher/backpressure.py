"""Which later stages are too far behind for more to be read from sockets.

Every append tells the lag of its partition. One that is too long is looked at again and again, until half of it is
worked off; so sockets are not opened and closed by turns.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from functools import partial
from typing import Literal

from redis.exceptions import RedisError

from tokenbus.bus.keys import Keys
from tokenbus.bus.run_record import read_attempt
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage_lag import read_lag
from tokenbus_services.runtime.task_failures import LoggedTasks

LAG_POLL_S = 0.02
SHORT_BYTES = 256 * 1024
"""What the normalizer and the parser together may have waiting in a partition while a heavy attempt writes there."""
SHORT_POLL_S = 0.005
SHORT_PATIENCE_S = 1.0
"""Longest wait for that. A partition that is busy with small runs slows a heavy one down, but never stops it."""

Later = Literal["normalizer", "policy"]
"""What all runs wait for, and what only those wait for that policies judge."""


class Backpressure:
    """The lags of one process."""

    def __init__(self, server: Server, keys: Keys, *, lag_bytes: int) -> None:
        """``lag_bytes``: more than this is too far behind."""
        self._server = server
        self._keys = keys
        self._most = lag_bytes
        self._events: dict[tuple[int, Later], asyncio.Event] = {}
        """By partition and stage that is too far behind: what waits for it."""
        self._look_at = 0.0
        self._looks = LoggedTasks("lag", most=2 * keys.partitions)
        self._looked_at: set[tuple[int, Later]] = set()
        self._waiting: dict[int, tuple[float, int]] = {}
        """By partition: when its lag of both stages was read, and the lag, with what was written since."""
        self._reading: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def any(self) -> bool:
        """Whether a stage is too far behind somewhere."""
        return bool(self._events)

    def set_lag(self, partition: int, stage: Later, lag: int) -> None:
        """So many bytes of this partition the stage has not worked in yet."""
        if lag > self._most:
            self._events.setdefault((partition, stage), asyncio.Event())

    def of(self, partition: int, stage: Later) -> asyncio.Event | None:
        """What is set once the stage has caught up; None: it is not too far behind."""
        return self._events.get((partition, stage))

    async def look(self) -> None:
        """Whether those that were behind have caught up; each `LAG_POLL_S` at the most. A server that is away is asked
        again."""
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
        """Look no more."""
        await self._looks.close()

    async def short(self, partition: int, adds: int) -> None:
        """Wait until both stages are nearly through with the partition, `SHORT_PATIENCE_S` at the most, before ``adds``
        bytes more are written there. Then what small runs write meanwhile waits behind little."""
        clock = asyncio.get_running_loop().time
        until = clock() + SHORT_PATIENCE_S
        while True:
            async with self._reading[partition]:  # one asks for all that wait
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
        """Whether the policy stage is too far behind to judge this run too. Never, if the attempt is not open any more.
        ``waits``: whether the run has waited for it already. Raises what redis-py raises."""
        partition = self._keys.partition_of(run)
        if await self._lag(partition, "policy") <= (self._most // 2 if waits else self._most):
            return False
        record = await read_attempt(self._server.client, self._keys.run(run), attempt)
        return record.is_open and not record.let_go

    async def _lag(self, partition: int, stage: Later | Literal["parser"]) -> int:
        return await read_lag(self._server.client, self._keys.lease(partition, stage))
