"""The consumer group of a worker's queues on the server: created if missing, and whether the server answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from redis.exceptions import RedisError, ResponseError

from tokenbus.bus.liveness import beat
from tokenbus.bus.server.server import Server

log = logging.getLogger(__name__)


class ConsumerGroup:
    """One group on several streams, with the name of this worker's consumer."""

    def __init__(self, server: Server, group: str, consumer: str, streams: Sequence[str]) -> None:
        self.name = group
        self.consumer = consumer
        self.streams = list(streams)
        self.healthy = False
        """Whether the last command reached the server."""
        self._server = server

    async def declare(self, streams: Sequence[str]) -> None:
        """Create the streams and the group on them if they are missing. Raises redis-py's errors."""
        for stream in streams:
            try:
                await self._server.client.xgroup_create(stream, self.name, id="0-0", mkstream=True)
            except ResponseError as e:
                if "BUSYGROUP" not in str(e):
                    raise

    async def recover(self, error: Exception, pause: float) -> None:
        """After an error of the server: create the group again if it is gone, else wait for ``pause`` seconds."""
        if self.healthy:
            defect = None if isinstance(error, RedisError | OSError) else error
            log.log(logging.ERROR if defect else logging.WARNING, "queue %s: %s", self.name, error, exc_info=defect)
        self.healthy = False
        if "NOGROUP" in str(error):  # the stream was deleted, or the server restarted empty
            with suppress(RedisError, OSError):
                await self.declare(self.streams)
                return
        beat()
        await asyncio.sleep(pause)
