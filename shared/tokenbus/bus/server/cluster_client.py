"""redis-py's Cluster client, with the node of a read taken from its key and errors that callers can handle."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from redis.asyncio import RedisCluster
from redis.asyncio.cluster import ClusterPipeline
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import RedisClusterException, RedisError
from redis.exceptions import TimeoutError as NoReply

from tokenbus.bus.liveness import beat, stop_task

_RedisPipeline: Any = ClusterPipeline  # parts of it are untyped


class ClusterClient(RedisCluster):
    """redis-py's Cluster client with three changes.

    - redis-py asks the server with COMMAND GETKEYS for the keys of every XREAD and XREADGROUP, one round trip each.
      Here the node comes from the key after STREAMS.
    - The errors that redis-py raises while the Cluster is degraded are not RedisError. Here they become
      ConnectionError.
    - After a node fails to answer, redis-py blocks all other commands while it reloads the slots, possibly from that
      very node. Here the other commands continue.
    """

    _asking: asyncio.Task[None] | None = None

    async def aclose(self) -> None:
        if self._asking is not asyncio.current_task():
            await stop_task(self._asking)
        await super().aclose()

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        beat()
        try:
            if args[0] in ("XREAD", "XREADGROUP") and "target_nodes" not in kwargs:
                await self.initialize()
                kwargs["target_nodes"] = self.get_node_from_key(args[_streams_at(args)])
            return await super().execute_command(*args, **kwargs)
        except RedisClusterException as e:
            raise ConnectionLost(str(e)) from e
        except (ConnectionLost, NoReply) as e:
            failed = getattr(e, "last_failed_node_name", None)
            if failed and self.nodes_manager.default_node:
                self._initialize = False
                if not self._asking or self._asking.done():
                    self._asking = asyncio.create_task(self._ask_for_slots(failed), name="slots of the Cluster")
            raise

    def pipeline(self, transaction: Any = None, shard_hint: Any = None) -> ClusterPipeline:
        return _Pipeline(self, transaction)

    async def _ask_for_slots(self, failed: str) -> None:
        """Reload the slots from another node, if there is one. If none answers, the next failing command tries
        again.
        """
        with suppress(RedisError, RedisClusterException, OSError):
            await self.nodes_manager.initialize(last_failed_node_name=failed)


class _Pipeline(_RedisPipeline):
    """redis-py's, with the same errors as a command alone."""

    async def execute(self, raise_on_error: bool = True, allow_redirections: bool = True) -> list[Any]:
        try:
            return await _RedisPipeline.execute(self, raise_on_error, allow_redirections)
        except RedisClusterException as e:
            raise ConnectionLost(str(e)) from e


def _streams_at(command: Sequence[Any]) -> int:
    """Index of the first key. A group or consumer may be named STREAMS too, so the search begins after them."""
    start = 4 if command[0] == "XREADGROUP" else 1
    return next(i for i in range(start, len(command)) if command[i] in (b"STREAMS", "STREAMS")) + 1
