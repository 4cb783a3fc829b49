"""A worker's agreement with all others on partitions and wire version: made when it starts, and kept up.

A server that was flushed, or came back empty, has forgotten it; then the first process to come could set up another
deployment over the one that runs. So each worker says it again and again.
"""

from __future__ import annotations

import asyncio

import structlog
from redis.exceptions import RedisError

from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import Liveness, rest
from tokenbus.bus.server.server import Server, join_deployment
from tokenbus.errors import ServerFull, ServerUnavailable

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

AGREE_S = 5.0
"""How often it is said again."""


class Deployment:
    """Call `open`, then `close`."""

    def __init__(self, server: Server, keys: Keys, liveness: Liveness) -> None:
        self._server = server
        self._keys = keys
        self._liveness = liveness
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Agree, and go on with that. Raises DeploymentMismatch, ServerUnavailable, ServerFull."""
        await join_deployment(self._server, self._keys)
        self._task = self._liveness.start(self._agree(), name="deployment")

    async def close(self) -> None:
        """Say it no more."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _agree(self) -> None:
        """Ends with DeploymentMismatch, and the worker with it, where others set up another deployment meanwhile."""
        while True:
            await rest(AGREE_S)
            try:
                await join_deployment(self._server, self._keys)
            except (ServerUnavailable, ServerFull, RedisError) as e:  # those who work know of it, and wait
                log.debug("deployment_not_said", problem=str(e))
