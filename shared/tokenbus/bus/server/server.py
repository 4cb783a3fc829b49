"""The connection to the Redis or Valkey server: one object for a single server, a Sentinel group and a Cluster.

Nothing is tried again in secret: redis-py's own retries (10 by default) would send a lost XADD twice. A
command either has its reply or raises; who sends it knows whether it may be sent again.

Replies have the shape of protocol 2 whatever the server could do: a read of streams is a list of ``[name,
[(id, {field: value}), …]]`` in bytes, ``[]`` when nothing came in time.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self

import msgspec
from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    ClusterError,
    DataError,
    NoScriptError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import TimeoutError as NoReply

from tokenbus.bus.keys import WIRE_VERSION, Keys
from tokenbus.bus.liveness import beat
from tokenbus.bus.scripts.script import ScriptCall, script
from tokenbus.bus.server.clock import ServerClock
from tokenbus.bus.server.connection_fixes import prompt
from tokenbus.bus.server.fast_client import FastRedis
from tokenbus.bus.server.run_script import evaluate
from tokenbus.bus.server.url import ServerUrl, Topology, parse_url
from tokenbus.errors import DeploymentMismatch, ServerFull, ServerTooOld, ServerUnavailable, SettingsError

__all__ = ["Server", "ServerInfo", "ServerUrl", "Topology", "join_deployment", "parse_url", "translated"]

OLDEST = (6, 2)
CLOCK_KEY = "tokenbus"
"""Cluster: the master of this key's slot tells the time."""
CONNECT_TIMEOUT_S = 2.0
REPLY_TIMEOUT_S = 5.0
"""Longest wait for a reply. A blocking read asks the server for 2 s at most, so that this never ends it."""
MAX_CONNECTIONS = 10_000
"""Each blocking read holds one. High, for the server has its own bound; redis-py's default is 100."""


class ServerInfo(msgspec.Struct, frozen=True):
    """What runs at the other end; in a Cluster, of its oldest node."""

    name: str
    """``redis`` or ``valkey``."""
    version: tuple[int, ...]
    eviction: str
    """``maxmemory-policy``. Anything but ``noeviction`` lets the server drop entries that nobody has read."""

    @property
    def entries_read(self) -> bool:
        """Whether XGROUP takes ENTRIESREAD, which makes a group's lag exact (Redis 7 on)."""
        return self.version >= (7, 0)


class Server:
    """A lazy connection pool: made without IO, connects with the first command. Belongs to one event loop.

    Use as ``async with Server(url) as server``, or call `aclose`. Raises SettingsError for a bad url.
    """

    def __init__(self, url: str | ServerUrl) -> None:
        self.url = parse_url(url) if isinstance(url, str) else url
        self._sentinel: Sentinel | None = None
        self.clock = ServerClock(self._time_us)
        """The time that all workers share; `join_deployment` looks at it first."""
        self.client: Any = self._connect()
        """redis-py's client: of the server, of the Sentinel group's current master, or of the Cluster. Any, because its
        annotations are in part unknown and the two classes have no common type: a reply is checked where it is read."""

    @property
    def topology(self) -> Topology:
        """How many servers stand behind the url, and who knows them."""
        return self.url.topology

    def __repr__(self) -> str:
        return f"Server({self.url.safe!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections. A command after this opens new ones."""
        await self.clock.close()
        await self.client.aclose()
        if self._sentinel:
            await self._sentinel.aclose()

    async def check(self) -> ServerInfo:
        """What the server is. Raises ServerUnavailable, ServerTooOld, or SettingsError for a node of a Cluster that is
        addressed as a single server."""
        with translated(self):
            if self.topology == "cluster":
                replies: dict[str, dict[str, Any]] = await self.client.info(target_nodes=RedisCluster.PRIMARIES)
            else:
                replies = {self.url.safe: await self.client.info()}
        reply = min(replies.values(), key=lambda node: _version(node["redis_version"]))
        if _version(reply["redis_version"]) < OLDEST:  # a Valkey tells here with which Redis it is compatible
            raise ServerTooOld(self.url.safe, reply["redis_version"], ".".join(map(str, OLDEST)))
        if self.topology != "cluster" and reply.get("cluster_enabled"):
            raise SettingsError("redis_url", "scheme", "the server is a node of a cluster: use redis+cluster://")
        valkey: str | None = reply.get("valkey_version")
        return ServerInfo(
            "valkey" if valkey else "redis",
            _version(valkey or reply["redis_version"]),
            reply.get("maxmemory_policy", "noeviction"),
        )

    async def answers(self) -> bool:
        """Whether it takes commands now; of a Cluster, each master. Raises nothing of redis-py's."""
        try:
            if self.topology == "cluster":
                await self.client.ping(target_nodes=RedisCluster.PRIMARIES)
            else:
                await self.client.ping()
        except (RedisError, OSError):
            return False
        return True

    async def _time_us(self) -> int:
        """The server's Unix time; in a Cluster that of one node for all, until it is away for good."""
        node: dict[str, Any] = {}
        if self.topology == "cluster":
            try:
                await self.client.initialize()
                node["target_nodes"] = self.client.get_node_from_key(CLOCK_KEY)
            except RedisClusterException as e:
                raise ConnectionLost(str(e)) from e
        seconds, micros = await self.client.execute_command("TIME", **node)
        return int(seconds) * 1_000_000 + int(micros)

    def read_groups(self, keys: Sequence[str]) -> list[list[str]]:
        """The keys in groups of which each can be one read: all together, or in a Cluster one for each hash tag."""
        if self.topology != "cluster":
            return [list(keys)] if keys else []
        groups: defaultdict[str, list[str]] = defaultdict(list)
        for key in keys:
            groups[_hash_tag(key)].append(key)
        return list(groups.values())

    def _connect(self) -> Redis | RedisCluster:
        url = self.url
        pool: dict[str, Any] = {
            "protocol": 2,
            "decode_responses": False,
            "socket_timeout": REPLY_TIMEOUT_S,
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            "retry": Retry(NoBackoff(), 0),
            **({"ssl": True, **dict(url.tls_options)} if url.tls else {}),
        }
        login: dict[str, Any] = {
            "username": url.username,
            "password": url.password,
            "max_connections": MAX_CONNECTIONS,
        }
        if url.topology == "cluster":
            nodes = [ClusterNode(host, port) for host, port in url.nodes]
            return _prompt_cluster(_Cluster(startup_nodes=nodes, **pool, **login))
        if url.topology == "sentinel":
            group: Any = Sentinel(url.nodes, sentinel_kwargs=pool)
            self._sentinel = group
            return _prompt(group.master_for(url.master, redis_class=FastRedis, db=url.db, **pool, **login))
        if url.path is not None:
            return _prompt(FastRedis(unix_socket_path=url.path, db=url.db, **pool, **login))
        host, port = url.nodes[0]
        return _prompt(FastRedis(host=host, port=port, db=url.db, **pool, **login))


def _prompt(client: Any) -> Redis:
    pool = client.connection_pool
    pool.connection_class = prompt(pool.connection_class)
    return client


def _prompt_cluster(client: Any) -> RedisCluster:
    kind = prompt(client.connection_kwargs["connection_class"])
    client.connection_kwargs["connection_class"] = kind  # of the nodes that it will find
    for node in client.startup_nodes:
        node.connection_class = kind
    return client


class _Cluster(RedisCluster):
    """redis-py's Cluster client without three of its ways.

    It asks the server with COMMAND GETKEYS for the keys of every XREAD and XREADGROUP, a round trip each; here
    the node comes from the key behind STREAMS. The errors that it raises while the Cluster is out of shape are
    no RedisError; here they are a lost connection, which is what they mean. And after a command that a node did not
    answer, all others wait until it has asked, maybe that very node, who has which slots now; here they go on.
    """

    _asking: asyncio.Task[None] | None = None

    async def aclose(self) -> None:
        if self._asking and self._asking is not asyncio.current_task():
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
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

    async def _ask_for_slots(self, failed: str) -> None:
        """Of another node, if there is one. Where none answers, the next command that fails asks again."""
        with suppress(RedisError, RedisClusterException, OSError):
            await self.nodes_manager.initialize(last_failed_node_name=failed)


def _streams_at(command: Sequence[Any]) -> int:
    """The place of the first key. A group or consumer may be called STREAMS too: the search begins behind them."""
    start = 4 if command[0] == "XREADGROUP" else 1
    return next(i for i in range(start, len(command)) if command[i] in (b"STREAMS", "STREAMS")) + 1


def _hash_tag(key: str) -> str:
    """The part of a key that decides its Cluster slot (https://valkey.io/topics/cluster-spec/#hash-tags)."""
    match = re.search(r"\{([^}]*)\}", key)
    return match[1] if match and match[1] else key


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", text)[:3])


_WRAPPED = re.compile(r"-([A-Z]+) ")
"""Redis 6.2 wraps the error of a command inside a script in a text of its own: ``… -OOM command not allowed …``."""
_NOT_NOW = frozenset({"BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOREPLICAS", "READONLY", "UNBLOCKED"})
_NOT_YOU = frozenset({"NOAUTH", "NOPERM", "WRONGPASS"})
_YOUR_FAULT = frozenset(
    {"WRONGTYPE", "NOGROUP", "BUSYGROUP", "CROSSSLOT", "EXECABORT", "NOPROTO", "BUSYKEY", "INVALIDOBJ"}
)
_FAULT = re.compile(
    r"unknown (sub)?command|wrong number of arguments|syntax error|not an integer|not a valid float|no such key"
    r"|ID specified in XADD|Invalid stream ID|out of range|script: |user_script|running script|compiling script",
    re.IGNORECASE,
)
"""In what the server says of a command that began with ERR, or of one that failed inside of a script."""


@contextmanager
def translated(server: Server, key: str = "") -> Generator[None]:
    """Around calls of redis-py: turns its errors into ServerUnavailable, or ServerFull for an entry of ``key``.

    What is a fault of the call itself (a wrong type, a bad argument) goes through as it is.
    """
    try:
        yield
    except (RedisError, OSError) as e:
        if _code(e) == "OOM":
            raise ServerFull(key or server.url.safe, f"the server is out of memory: {e}") from e
        if not is_final(e):
            raise ServerUnavailable(server.url.safe, str(e) or type(e).__name__) from e
        raise


def may_pass(error: RedisError | OSError) -> bool:
    """Whether the server says that its state is at fault, so that the same command may be taken later."""
    return isinstance(error, (ClusterError, NoScriptError)) or _code(error) in _NOT_NOW | _NOT_YOU | {"OOM"}


def is_alien(error: object) -> bool:
    """Whether the server says that a key is of another type than it must be: somebody else wrote there."""
    return isinstance(error, ResponseError) and _code(error) == "WRONGTYPE"


def is_final(error: RedisError | OSError) -> bool:
    """Whether the server, or redis-py, has looked at this command and says what is wrong with it.

    All else may pass or not: a connection that broke, a reply that nobody knows, a proxy's own error.
    """
    if isinstance(error, DataError):
        return True
    if may_pass(error):  # it may come out of a script
        return False
    return _code(error) in _YOUR_FAULT or (isinstance(error, ResponseError) and bool(_FAULT.search(str(error))))


def _code(error: Exception) -> str:
    """The code with which the server's error reply began; redis-py cuts it off the codes that it knows."""
    if not isinstance(error, ResponseError):
        return ""
    if wrapped := _WRAPPED.search(str(error)):
        return wrapped[1]
    return getattr(error, "status_code", None) or str(error).partition(" ")[0]


_JOIN = script(
    "join",
    """
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('HSET', KEYS[1], 'partitions', ARGV[1], 'wire_version', ARGV[2])
end
return redis.call('HMGET', KEYS[1], 'partitions', 'wire_version')
""",
)


async def join_deployment(server: Server, keys: Keys) -> None:
    """Agree with all other processes on what must be the same: the first one writes it, each later one compares.

    Raises DeploymentMismatch, or ServerUnavailable and ServerFull.
    """
    ours = {"partitions": keys.partitions, "wire_version": WIRE_VERSION}
    with translated(server, keys.meta):
        await server.clock.look()
        reply: Any = await evaluate(server.client, ScriptCall(_JOIN, [keys.meta], list(ours.values())))
    for (name, value), found in zip(ours.items(), reply, strict=True):
        theirs = found.decode() if found is not None else "not set"
        if theirs != str(value):
            raise DeploymentMismatch(name, str(value), theirs)
