"""A worker's agreement with the deployment on partitions and wire version: made at startup and repeated.

A server that was flushed, or came back empty, has lost the agreement. Then a new process could set up another
deployment over the running one. So each worker repeats it.
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
"""How often the agreement is repeated."""


class Deployment:
    """Call `open`, then `close`."""

    def __init__(self, server: Server, keys: Keys, liveness: Liveness) -> None:
        self._server = server
        self._keys = keys
        self._liveness = liveness
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Join the deployment and start repeating it. Raises DeploymentMismatch, ServerUnavailable, ServerFull."""
        await join_deployment(self._server, self._keys)
        self._task = self._liveness.start(self._agree(), name="deployment")

    async def close(self) -> None:
        """Stop repeating it."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _agree(self) -> None:
        """Ends with DeploymentMismatch, and the worker with it, if another deployment was set up meanwhile."""
        while True:
            await rest(AGREE_S)
            try:
                await join_deployment(self._server, self._keys)
            except (ServerUnavailable, ServerFull, RedisError) as e:  # the tasks that use the server handle this
                log.debug("deployment_not_said", problem=str(e))
