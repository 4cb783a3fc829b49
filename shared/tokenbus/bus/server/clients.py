"""redis-py's clients with less work per command, and with errors that callers can handle."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterPipeline, PipelineCommand
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.exceptions import AskError, MovedError, RedisClusterException, RedisError, ResponseError
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import TimeoutError as NoReply

from tokenbus.bus.liveness import beat, stop_task

_Redis: Any = Redis  # parts of it are untyped
_RedisPipeline: Any = ClusterPipeline
_SentinelPool: Any = SentinelConnectionPool
_hiredis: Any = import_module("hiredis") if find_spec("hiredis") else None  # optional for the light client

_in_command: ContextVar[bool] = ContextVar("_in_command", default=False)
"""Whether redis-py itself is the caller of a Cluster client's methods."""

LARGE_BYTES = 32 * 1024
"""An argument of this size is sent as it is, not as part of one copy of the whole command."""


class FastRedis(_Redis):
    """redis-py's client that keeps used connections ready for the next command, for half the CPU of a worker that wakes
    up for a few chunks; pipelines and subscriptions work as usual.

    `Redis.execute_command` takes a lock and a pool connection, updates counters and metrics, prepares a retry, and
    returns the connection. None of that is needed here: a command is tried once (server.py), and a process has few
    connections. Measured with redis-py 8.1 and uvloop: 85 µs per command before, 45 µs now.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _Redis.__init__(self, *args, **kwargs)
        self._pooled: list[Any] = []
        """Pool connections that no command is using. The pool closes them with its own."""

    def separate_client(self) -> FastRedis:
        """A client on the same pool with its own connections, one per concurrent command."""
        return type(self)(connection_pool=self.connection_pool)

    async def release(self) -> None:
        """Return the idle connections to the pool."""
        pool: Any = self.connection_pool
        while self._pooled:
            await pool.release(self._pooled.pop())

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        pool: Any = self.connection_pool
        connection = self._pooled.pop() if self._pooled else await pool.get_connection()
        try:
            await pool.ensure_connection(connection)  # reconnects if the last command or the server closed it
            await connection.send_packed_command(_packed(connection, args), check_health=False)
            return await self.parse_response(connection, args[0], **options)
        finally:
            self._pooled.append(connection)

    async def execute_together(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Execute these in order on one connection, and return their replies; one that is an error is returned, too."""
        pool: Any = self.connection_pool
        connection = self._pooled.pop() if self._pooled else await pool.get_connection()
        try:
            await pool.ensure_connection(connection)
            for command in commands:
                await connection.send_packed_command(_packed(connection, command), check_health=False)
            return [await self._reply(connection, command[0]) for command in commands]
        finally:
            self._pooled.append(connection)

    async def _reply(self, connection: Any, name: str) -> Any:
        try:
            return await self.parse_response(connection, name)
        except ResponseError as e:
            return e


def _packed(connection: Any, args: tuple[Any, ...]) -> Any:
    """Encode the command. redis-py's own packing takes 0.4 µs per argument in Python, and a commit has hundreds."""
    if _hiredis is None:
        return connection.pack_command(*args)
    name, *rest = args
    words = (*name.split(), *rest)  # `XGROUP CREATE` is two words
    for word in rest:
        if type(word) is bytes and len(word) >= LARGE_BYTES:
            return _in_pieces(words)
    return _hiredis.pack_command(words)


def _in_pieces(words: tuple[Any, ...]) -> list[bytes]:
    """Encode a command with large arguments without copying these: two copies of 8 MB take longer than all other work
    on them.
    """
    pieces: list[bytes] = []
    small: list[bytes] = [b"*%d\r\n" % len(words)]
    for word in words:
        data = word if isinstance(word, bytes) else str(word).encode()
        small.append(b"$%d\r\n" % len(data))
        if len(data) < LARGE_BYTES:
            small += (data, b"\r\n")
        else:
            pieces += (b"".join(small), data)
            small = [b"\r\n"]
    pieces.append(b"".join(small))
    return pieces


class MasterPool(_SentinelPool):
    """redis-py's pool of connections to a Sentinel group's master, with one change.

    redis-py closes the connections that are idle when it learns of a new master. One that is in use then goes on to the
    old master. If that was only stopped, it takes writes, which are lost, and answers from a past that no server has
    any more, until Sentinel demotes it. Here each connection is compared before it is used.
    """

    async def ensure_connection(self, connection: Any) -> None:
        master = self.master_address
        if master and (connection.host, connection.port) != master:
            await connection.disconnect(nowait=True)
        await _SentinelPool.ensure_connection(self, connection)


class ClusterClient(RedisCluster):
    """redis-py's Cluster client with four changes.

    - redis-py asks the server with COMMAND GETKEYS for the keys of every XREAD and XREADGROUP, one round trip each.
      Here the node comes from the key after STREAMS.
    - The errors that redis-py raises while the Cluster is degraded are not RedisError. Here they become
      ConnectionError.
    - After a node fails to answer, redis-py blocks all other commands while it reloads the slots, possibly from that
      very node. Here the other commands continue.
    - A command that meets CLUSTERDOWN, and every fifth that meets MOVED, closes redis-py's client to have the slots
      reloaded, and cuts all other commands of the process. Here it only reloads them.
    """

    _asking: asyncio.Task[None] | None = None

    async def aclose(self) -> None:
        if _in_command.get():
            self._reload_slots()
            return
        await stop_task(self._asking)
        await super().aclose()

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        beat()
        outer = _in_command.set(True)
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
                self._reload_slots(failed)
            raise
        finally:
            _in_command.reset(outer)

    async def execute_together(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Execute these in order on one connection to the node of the first one's key, a script's; and return their
        replies; one that is an error is returned, too.
        """
        beat()
        try:
            await self.initialize()
            node: Any = self.get_node_from_key(commands[0][3])
        except RedisClusterException as e:
            raise ConnectionLost(str(e)) from e
        sent = [PipelineCommand(n, *command) for n, command in enumerate(commands)]
        try:
            await node.execute_pipeline(sent)
        except (ConnectionLost, NoReply):
            self._reload_slots(node.name)
            raise
        replies = [command.result for command in sent]
        for error in replies:
            if isinstance(error, MovedError | AskError):
                self._reload_slots()
                raise ConnectionLost(f"the slot is at another node: {error}") from error
            if isinstance(error, ConnectionLost | NoReply):
                self._reload_slots(node.name)
                raise error
        return replies

    def pipeline(self, transaction: Any = None, shard_hint: Any = None) -> ClusterPipeline:
        return _Pipeline(self, transaction)

    def _reload_slots(self, failed: str | None = None) -> None:
        if not self._asking or self._asking.done():
            self._asking = asyncio.create_task(self._ask_for_slots(failed), name="slots of the Cluster")

    async def _ask_for_slots(self, failed: str | None) -> None:
        """Reload the slots, from another node than ``failed`` if there is one. If none answers, the next failing
        command tries again.
        """
        with suppress(RedisError, RedisClusterException, OSError):
            await self.nodes_manager.initialize(last_failed_node_name=failed)


class _Pipeline(_RedisPipeline):
    """redis-py's, with the same errors as a command alone."""

    async def execute(self, raise_on_error: bool = True, allow_redirections: bool = True) -> list[Any]:
        outer = _in_command.set(True)
        try:
            return await _RedisPipeline.execute(self, raise_on_error, allow_redirections)
        except RedisClusterException as e:
            raise ConnectionLost(str(e)) from e
        finally:
            _in_command.reset(outer)


def _streams_at(command: Sequence[Any]) -> int:
    """Index of the first key. A group or consumer may be named STREAMS too, so the search begins after them."""
    start = 4 if command[0] == "XREADGROUP" else 1
    return next(i for i in range(start, len(command)) if command[i] in (b"STREAMS", "STREAMS")) + 1
