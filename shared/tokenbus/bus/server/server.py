"""Connection to the Redis or Valkey server: one object for a single server, a Sentinel group or a Cluster.

Nothing is retried implicitly: redis-py's own retries (10 by default) could send a lost XADD twice. A command returns
its reply or raises; only the caller knows whether it can be repeated.

Replies always have the shape of protocol 2: a stream read is a list of ``[name, [(id, {field:
value}), …]]`` in bytes, ``[]`` if nothing arrived in time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import (
    RedisClusterException,
    RedisError,
)

from tokenbus.bus.server.clients import ClusterClient, FastRedis, MasterPool
from tokenbus.bus.server.clock import ServerClock
from tokenbus.bus.server.connection_fixes import prompt
from tokenbus.bus.server.durability import Durability, NotReplicated
from tokenbus.bus.server.error_replies import code_of, is_final
from tokenbus.bus.server.url import ServerUrl, Topology, parse_url, password_in
from tokenbus.errors import ServerFull, ServerTooOld, ServerUnavailable, SettingsError, WriteNotReplicated
from tokenbus.secret_env import read_secret

__all__ = ["Server", "ServerInfo", "ServerUrl", "Topology", "parse_url", "translated"]

OLDEST = (6, 2)
CLOCK_KEY = "tokenbus"
"""Cluster: the master of this key's slot provides the time."""
CONNECT_TIMEOUT_S = 2.0
REPLY_TIMEOUT_S = 5.0
"""Maximum wait for a reply. A blocking read asks the server for at most 2 s, so it never reaches this."""
MAX_CONNECTIONS = 10_000
"""Each blocking read holds one connection. High, because the server has its own limit; redis-py's default is 100."""


class ServerInfo(msgspec.Struct, frozen=True):
    """Properties of the server; in a Cluster, of the oldest node."""

    name: str
    """``redis`` or ``valkey``."""
    version: tuple[int, ...]
    eviction: str
    """``maxmemory-policy``. Anything but ``noeviction`` lets the server drop unread entries."""

    @property
    def entries_read(self) -> bool:
        """Whether XGROUP supports ENTRIESREAD, which makes a group's lag exact (Redis 7 and later)."""
        return self.version >= (7, 0)


class Server:
    """Lazy connection pool: created without IO, connects with the first command. Belongs to one event loop.

    Use as ``async with Server(url) as server``, or call `aclose`. Raises SettingsError for an invalid url.
    """

    def __init__(self, url: str | ServerUrl) -> None:
        self.url = parse_url(url) if isinstance(url, str) else url
        self._sentinel: Sentinel | None = None
        self.durability = Durability()
        """What durable script calls wait for."""
        self.clock = ServerClock(self._time_us)
        """Clock shared by all workers; `join_deployment` (bus/layout.py) queries it first."""
        self.on_dead_letter: Callable[[str], None] | None = None
        """Called with ``crashed`` or ``rejected`` for each dead letter written, so that a worker can count them."""
        self.client: Any = self._connect()
        """redis-py's client of the server, of the Sentinel group's current master, or of the Cluster. Typed Any,
        because redis-py is only partly annotated and the two classes have no common type. Replies are checked where
        they are read.
        """

    @property
    def topology(self) -> Topology:
        """Kind of deployment behind the url: single server, Sentinel or Cluster."""
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
        """Close all connections. A later command opens new ones."""
        await self.clock.close()
        await self.client.aclose()
        if self._sentinel:
            await self._sentinel.aclose()

    async def check(self) -> ServerInfo:
        """Return the server's properties.

        Raises ServerUnavailable, ServerTooOld, or SettingsError for a Cluster node that is addressed as a single
        server.
        """
        with translated(self):
            if self.topology == "cluster":
                replies: dict[str, dict[str, Any]] = await self.client.info(target_nodes=RedisCluster.PRIMARIES)
            else:
                replies = {self.url.safe: await self.client.info()}
        reply = min(replies.values(), key=lambda node: _version(node["redis_version"]))
        if _version(reply["redis_version"]) < OLDEST:  # Valkey reports the compatible Redis version here
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
        """Whether the server (in a Cluster, every master) accepts commands now. Does not raise redis-py's errors."""
        try:
            if self.topology == "cluster":
                await self.client.ping(target_nodes=RedisCluster.PRIMARIES)
            else:
                await self.client.ping()
        except (RedisError, OSError):
            return False
        return True

    async def _time_us(self) -> int:
        """The server's Unix time in µs; in a Cluster that of one node, until that node is removed."""
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
        """Group the keys by read command: all together, or in a Cluster one group per hash tag."""
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
            **_login(url),
            "max_connections": MAX_CONNECTIONS,
        }
        if url.topology == "cluster":
            nodes = [ClusterNode(host, port) for host, port in url.nodes]
            return _prompt_cluster(ClusterClient(startup_nodes=nodes, **pool, **login))
        if url.topology == "sentinel":
            group: Any = Sentinel(url.nodes, sentinel_kwargs=pool)
            for sentinel in group.sentinels:  # each command that needs a connection to the master may ask them
                _prompt(sentinel)
            self._sentinel = group
            how: dict[str, Any] = {"redis_class": FastRedis, "connection_pool_class": MasterPool}
            return _prompt(group.master_for(url.master, db=url.db, **how, **pool, **login))
        if url.path is not None:
            return _prompt(FastRedis(unix_socket_path=url.path, db=url.db, **pool, **login))
        host, port = url.nodes[0]
        return _prompt(FastRedis(host=host, port=port, db=url.db, **pool, **login))


def _login(url: ServerUrl) -> dict[str, Any]:
    if url.password_file:
        return {"credential_provider": _FilePassword(url)}
    return {"username": url.username, "password": url.password}


class _FilePassword(CredentialProvider):
    """Reads the password's file for each new connection, so that a changed password needs no restart."""

    def __init__(self, url: ServerUrl) -> None:
        self._username = url.username
        self._password = url.password
        self._path = Path(url.password_file or "")

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """The user, if there is one, and the password. While the file cannot be read, the last password."""
        with suppress(SettingsError):
            self._password = password_in(read_secret("password_file", self._path)) or self._password
        password = self._password or ""
        return (self._username, password) if self._username else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


def _prompt(client: Any) -> Redis:
    pool = client.connection_pool
    pool.connection_class = prompt(pool.connection_class)
    return client


def _prompt_cluster(client: Any) -> RedisCluster:
    kind = prompt(client.connection_kwargs["connection_class"])
    client.connection_kwargs["connection_class"] = kind  # for nodes found later
    for node in client.startup_nodes:
        node.connection_class = kind
    return client


def _hash_tag(key: str) -> str:
    """The part of a key that determines its Cluster slot (https://valkey.io/topics/cluster-spec/#hash-tags)."""
    match = re.search(r"\{([^}]*)\}", key)
    return match[1] if match and match[1] else key


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", text)[:3])


@contextmanager
def translated(server: Server, key: str = "") -> Generator[None]:
    """Wrap calls of redis-py: converts its errors to ServerUnavailable, or ServerFull for an entry of ``key``.

    Faults of the call itself (a wrong type, a bad argument) pass through unchanged.
    """
    try:
        yield
    except (RedisError, OSError) as e:
        if isinstance(e, NotReplicated):
            raise WriteNotReplicated(server.url.safe, str(e)) from e
        if code_of(e) == "OOM":
            raise ServerFull(key or server.url.safe, f"the server is out of memory: {e}") from e
        if not is_final(e):
            raise ServerUnavailable(server.url.safe, _problem(e)) from e
        raise


def _problem(error: Exception) -> str:
    text = str(error) or type(error).__name__
    if not isinstance(error, MasterNotFoundError):
        return text
    # redis-py's text has each sentinel's client in full, a page long, before what was wrong with it.
    problem, _, details = text.partition(" : ")
    return ": ".join((problem, *dict.fromkeys(re.findall(r"> - (.+?)(?=, <|$)", details))))
