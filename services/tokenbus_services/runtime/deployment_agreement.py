"""A worker's agreement with the deployment on partitions and wire version: made at startup and repeated.

A server that was flushed, or came back empty, has lost the agreement. Then a new process could set up another
deployment over the running one. So each worker repeats it. In this way it also detects a change of the number of
partitions (tokenbus/bus/layout.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog
from redis.exceptions import RedisError

from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import Layout, fence, join_deployment
from tokenbus.bus.liveness import Liveness, rest, stop_task
from tokenbus.bus.server.server import Server
from tokenbus.errors import ServerFull, ServerUnavailable

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

AGREE_S = 1.0
"""How often the agreement is repeated."""

OnGrown = Callable[[Keys], Awaitable[None]]
"""Serves the partitions that were added too."""


class DeploymentAgreement:
    """Call `open`, then `close`."""

    def __init__(self, server: Server, keys: Keys, liveness: Liveness, *, worker: str = "") -> None:
        """``worker``: name of this worker in the members of its groups; empty if it is in none."""
        self._server = server
        self._keys = keys
        self._liveness = liveness
        self._worker = worker
        self._on_grown: list[OnGrown] = []
        self._fences = False
        self._task: asyncio.Task[None] | None = None

    def on_grown(self, serve: OnGrown) -> None:
        """Call this when partitions are added, also when the worker starts with fewer in its settings. May be awaited
        again with the same.
        """
        self._on_grown.append(serve)

    def fence(self) -> None:
        """Let no worker create runs by an earlier number, before this one creates some by a new one."""
        self._fences = True

    async def open(self) -> None:
        """Join the deployment and start repeating it. Raises DeploymentMismatch, ServerUnavailable, ServerFull."""
        configured = self._keys.numbers[0]
        layout = await join_deployment(self._server, self._keys)
        await self._follow(layout)
        if layout.placing != configured:
            log.warning("partitions_setting_outdated", settings=configured, deployment=layout.placing)
        self._task = self._liveness.start(self._agree(), name="deployment")

    async def close(self) -> None:
        """Stop repeating it."""
        await stop_task(self._task)

    async def _agree(self) -> None:
        """Ends with DeploymentMismatch, and the worker with it, if another deployment was set up meanwhile."""
        while True:
            await rest(AGREE_S)
            try:
                await self._follow(await join_deployment(self._server, self._keys, worker=self._worker))
            except (ServerUnavailable, ServerFull, RedisError, OSError) as e:  # the tasks that use the server handle it
                log.debug("deployment_not_confirmed", problem=str(e))

    async def _follow(self, layout: Layout) -> None:
        keys = self._keys
        if layout.epoch > keys.epoch:
            # The partitions first: from here on runs may be in them. Then what they are served by.
            keys.widen(layout.numbers, layout.spread)
            for serve in self._on_grown:
                await serve(keys)
            if self._fences:
                await fence(self._server, keys, layout)
            keys.apply(layout.numbers, layout.spread, layout.epoch, layout.ever)
            log.info("partitions_changed", new_runs=layout.placing, served=layout.spread, epoch=layout.epoch)
        keys.numbers_read_at = time.monotonic()
