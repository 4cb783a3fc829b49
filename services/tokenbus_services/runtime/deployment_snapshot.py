"""A deployment at one moment: stages, queues, workers, gateways, lag and dead letters, read from the server.

Everything that shows a deployment reads it here: `top`, `doctor`, the console and the metrics. A read is one pipeline,
whose length depends on the partitions and never on the runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import msgspec
from redis.exceptions import ResponseError

from tokenbus.bus.keys import Keys, PublicTopic, order_keys
from tokenbus.bus.leases import LAG_FIELDS, lag_of
from tokenbus.bus.server.server import Server
from tokenbus.bus.topology import ALIVE_MS, CHAINED, INTAKE, POLICY, QUEUES, STAGES, Queue

Replies: TypeAlias = Iterator[Any]
_Queue: TypeAlias = tuple[str, list[tuple[int | None, str]]]
"""A group of work queues, and its streams by partition."""
REPLICAS = "tokenbus_server_replicas"
_GAUGES = {
    "used_memory": "tokenbus_server_memory_bytes",
    "maxmemory": "tokenbus_server_memory_limit_bytes",
    "used_memory_rss": "tokenbus_server_memory_resident_bytes",
    "mem_fragmentation_ratio": "tokenbus_server_memory_fragmentation",
    "evicted_keys": "tokenbus_server_evicted_keys",
    "aof_current_size": "tokenbus_server_aof_bytes",
    "aof_rewrite_in_progress": "tokenbus_server_aof_rewriting",
    "aof_delayed_fsync": "tokenbus_server_aof_delayed_fsyncs",
    "connected_slaves": REPLICAS,
}
"""By field of INFO: the metric."""
_DISK_STATES = ("aof_last_write_status", "aof_last_bgrewrite_status", "rdb_last_bgsave_status")
_LEASE_FIELDS = ("owner", "until", *LAG_FIELDS, "entries", "open", "away")


class _Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable facts with keyword fields."""


class PartitionFacts(_Facts, frozen=True, kw_only=True):
    """One partition of an ordered stage."""

    owner: str | None = None
    """The worker that owns the lease; None if no worker does."""
    lag_bytes: int = 0
    lag_entries: int | None = None
    """None if the server does not know."""
    entries: int = 0
    """Entries processed since the partition began."""
    done_bytes: int = 0
    """Bytes of frames processed; may be reset after a fail-over."""
    open: int = 0
    """Runs that the parser has open or has put away, or attempts that the normalizer reads."""


class GroupFacts(_Facts, frozen=True, kw_only=True):
    name: str
    ages_ms: dict[str, int] = {}
    """By worker that is alive: the time since its last heartbeat."""

    @property
    def workers(self) -> list[str]:
        """The names of the workers that are alive."""
        return sorted(self.ages_ms)


class StageFacts(GroupFacts, frozen=True, kw_only=True):
    partitions: list[PartitionFacts]

    @property
    def lag_bytes(self) -> int:
        """Sum over all partitions."""
        return sum(p.lag_bytes for p in self.partitions)

    @property
    def lag_entries(self) -> int | None:
        """Sum over all partitions; None if the server does not know."""
        known = [p.lag_entries for p in self.partitions if p.lag_entries is not None]
        return sum(known) if known else None

    @property
    def owned(self) -> int:
        """Number of partitions with an owner."""
        return sum(p.owner is not None for p in self.partitions)

    @property
    def open(self) -> int:
        """Sum over all partitions."""
        return sum(p.open for p in self.partitions)


class StreamFacts(_Facts, frozen=True, kw_only=True):
    """One stream of a work queue."""

    partition: int | None = None
    """None for the inbound stream."""
    waiting: int = 0
    """Entries that no worker has taken."""
    held: int = 0
    """Entries that workers are processing."""
    added: int | None = None
    """Entries ever added; None if it was not asked, or the server does not count them (Redis 6.2)."""


class QueueFacts(GroupFacts, frozen=True, kw_only=True):
    streams: list[StreamFacts] = []

    @property
    def waiting(self) -> int:
        """Sum over all streams."""
        return sum(s.waiting for s in self.streams)

    @property
    def held(self) -> int:
        """Sum over all streams."""
        return sum(s.held for s in self.streams)

    @property
    def added(self) -> int | None:
        """Sum over all streams; None if one of them is unknown."""
        return _sum([s.added for s in self.streams])


class NodeFacts(_Facts, frozen=True, kw_only=True):
    """One server, or one master of a Cluster."""

    name: str
    memory_bytes: int
    memory_limit: int
    """0: no limit except the machine's."""
    commands_per_s: int
    clients: int
    now_ms: int
    """Unix time by its clock."""
    disk: Mapping[str, str] = {}
    """By field of INFO: how the last write of that kind ended, ``ok`` if well. A hosted server may not say."""
    gauges: Mapping[str, float] = {}
    """By name of a metric: what INFO says about memory, the append-only file and replicas, as far as it does."""

    @property
    def disk_fault(self) -> str | None:
        """The server's report on its last write to disk, if that failed."""
        return next((f"{state} {word}" for state, word in self.disk.items() if word != "ok"), None)


class DeploymentSnapshot(_Facts, frozen=True, kw_only=True):
    """The whole deployment at one moment."""

    at_ms: int
    """Unix time by the server's clock."""
    stages: list[StageFacts]
    queues: list[QueueFacts]
    chunks: int | None = None
    """Chunks ever written to a public topic; None if it was not asked, or the server does not count (Redis 6.2)."""
    dead: int = 0
    """Dead letters, with rejected requests."""
    rejected: int = 0
    gateways: list[str] = []

    @property
    def pipelines(self) -> list[str]:
        """The workers that are fetcher, normalizer and parser in one process."""
        groups = [set(group.workers) for group in (*self.stages, *self.queues) if group.name in CHAINED]
        return sorted(groups[0].intersection(*groups)) if len(groups) == len(CHAINED) else []

    @property
    def open_runs(self) -> int:
        """Runs that were accepted and have not ended, as far as the parser has read."""
        return next(stage.open for stage in self.stages if stage.name == "parser")


class DeploymentReader:
    def __init__(
        self,
        server: Server,
        keys: Keys,
        *,
        further: Sequence[Queue],
        judged: bool,
        workers: bool = True,
        added: bool = False,
        topic: PublicTopic | None = None,
    ) -> None:
        """``further``: its queues besides those that each deployment has. ``judged``: it has policies. ``workers``:
        read who is alive, what they process, and lag in entries, for which a service's user needs more rights.
        ``added``: read what was ever added to queues, and to ``topic`` as chunks.
        """
        self._server = server
        self._keys = keys
        self._stages = (*STAGES, POLICY) if judged else STAGES
        self._queue_topics = (*QUEUES, *further)
        self._workers = workers
        self._added = added
        self._topic: PublicTopic | None = topic

    async def read(self) -> DeploymentSnapshot:
        """Read one. Raises redis-py's errors, also for a missing permission."""
        partitions = range(self._keys.partitions)  # the number may change meanwhile
        queues = [*self._queues(partitions)]
        pipe = self._server.client.pipeline(transaction=False)
        self._ask(pipe, partitions, queues)
        replies: list[Any] = await pipe.execute(raise_on_error=False)
        return self._snapshot(iter(replies), partitions, queues)

    def _queues(self, partitions: range) -> Iterator[_Queue]:
        yield INTAKE, [(None, self._keys.requests)]
        for name, topic in self._queue_topics:
            yield name, [(p, self._keys.topic(p, topic)) for p in partitions]

    def _ask(self, pipe: Any, partitions: range, queues: Sequence[_Queue]) -> None:
        keys = self._keys
        for name, topic in self._stages:
            if self._workers:
                pipe.zrange(keys.members(name), 0, -1, withscores=True)
            for p in partitions:
                pipe.hmget(keys.lease(p, name), _LEASE_FIELDS)
                if self._workers:
                    pipe.xinfo_groups(keys.topic(p, topic))
        for name, streams in queues:
            if self._workers:
                pipe.zrange(keys.members(name), 0, -1, withscores=True)
            for _, stream in streams:
                pipe.xlen(stream)
                if self._workers:
                    pipe.xinfo_groups(stream)
                    pipe.zcard(order_keys(stream)[0])
                if self._added:
                    pipe.xinfo_stream(stream)
        if self._added and self._topic:
            for p in partitions:
                pipe.xinfo_stream(keys.topic(p, self._topic))
        pipe.xlen(keys.dead)
        pipe.llen(keys.rejected)
        if self._workers:
            pipe.zrange(keys.gateway_members, 0, -1, withscores=True)

    def _snapshot(self, replies: Replies, partitions: range, queues: Sequence[_Queue]) -> DeploymentSnapshot:
        """Consume the replies in the order of `_ask`."""
        now = self._server.clock.now_ms()
        stages = [self._stage(name, replies, len(partitions), now) for name, _ in self._stages]
        read_queues = [self._queue(name, [p for p, _ in streams], replies, now) for name, streams in queues]
        counts_chunks = self._added and self._topic
        chunks = _sum([_added(next(replies)) for _ in partitions]) if counts_chunks else None
        return DeploymentSnapshot(
            at_ms=now,
            stages=stages,
            queues=read_queues,
            chunks=chunks,
            dead=checked(next(replies)) or 0,
            rejected=checked(next(replies)) or 0,
            gateways=sorted(_alive(next(replies), now)) if self._workers else [],
        )

    def _stage(self, name: str, replies: Replies, partitions: int, now: int) -> StageFacts:
        ages_ms = _alive(next(replies), now) if self._workers else {}
        read: list[PartitionFacts] = []
        for _ in range(partitions):
            owner, until, arrived, done, entries, open_, away = checked(next(replies))
            read.append(
                PartitionFacts(
                    owner=owner.decode(errors="replace") if owner and int(until or 0) > now else None,
                    lag_bytes=lag_of(arrived, done),
                    lag_entries=group_in(next(replies), name).get("lag") if self._workers else None,
                    entries=int(entries or 0),
                    done_bytes=int(done or 0),
                    open=int(open_ or 0) + int(away or 0),
                )
            )
        return StageFacts(name=name, ages_ms=ages_ms, partitions=read)

    def _queue(self, name: str, partitions: Sequence[int | None], replies: Replies, now: int) -> QueueFacts:
        ages_ms = _alive(next(replies), now) if self._workers else {}
        streams: list[StreamFacts] = []
        for partition in partitions:
            entries: int = checked(next(replies)) or 0
            held = 0
            if self._workers:
                held = group_in(next(replies), name).get("pending", 0)
                held -= min(held, checked(next(replies)) or 0)  # entries in the order set are with no worker
            added = _added(next(replies)) if self._added else None
            waiting = max(0, entries - held)  # finished entries are deleted
            streams.append(StreamFacts(partition=partition, waiting=waiting, held=held, added=added))
        return QueueFacts(name=name, ages_ms=ages_ms, streams=streams)


async def read_nodes(server: Server) -> list[NodeFacts]:
    """The server, or each master of a Cluster. Raises redis-py's errors."""
    client = server.client
    if server.topology == "cluster":
        masters = client.PRIMARIES
        infos: dict[str, dict[str, Any]] = await client.info(target_nodes=masters)
        times: dict[str, tuple[int, int]] = await client.time(target_nodes=masters)
        return [_node(name, infos[name], times[name]) for name in sorted(infos) if name in times]
    return [_node(server.url.safe, await client.info(), await client.time())]


def _node(name: str, info: dict[str, Any], time: tuple[int, int]) -> NodeFacts:
    return NodeFacts(
        name=name,
        memory_bytes=info.get("used_memory", 0),
        memory_limit=info.get("maxmemory", 0),
        commands_per_s=info.get("instantaneous_ops_per_sec", 0),
        clients=info.get("connected_clients", 0),
        now_ms=time[0] * 1000 + time[1] // 1000,
        disk={field: str(info[field]) for field in _DISK_STATES if field in info},
        gauges={metric: float(info[field]) for field, metric in _GAUGES.items() if field in info} | _replication(info),
    )


def _replication(info: dict[str, Any]) -> dict[str, float]:
    """How far the replica that is furthest behind is behind; empty without replicas."""
    written = info.get("master_repl_offset", 0)
    replicas = [cast("dict[str, Any]", info[field]) for field in info if re.fullmatch(r"slave\d+", field)]
    behind = [written - int(replica.get("offset", 0)) for replica in replicas]
    return {"tokenbus_server_replication_lag_bytes": float(max(0, *behind))} if behind else {}


def _added(reply: Any) -> int | None:
    """Entries ever added to a stream, by the reply of XINFO STREAM: 0 if there is no stream."""
    stream: dict[str, Any] | None = checked(reply)
    return stream.get("entries-added") if stream else 0


def _sum(counts: Sequence[int | None]) -> int | None:
    """Return the sum; None if one of the counts is unknown."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _alive(reply: Any, now: int) -> dict[str, int]:
    """The members with a recent heartbeat, and how long ago that was."""
    members: list[tuple[bytes, float]] = checked(reply) or []
    ages = {name.decode(errors="replace"): max(0, now - int(seen)) for name, seen in members}
    return {name: age for name, age in ages.items() if age < ALIVE_MS}


def checked(reply: Any) -> Any:
    """Return the reply of a command in a pipeline; None for a missing key. Raises the reply if it is another error."""
    if isinstance(reply, ResponseError) and "no such key" in str(reply):
        return None
    if isinstance(reply, Exception):
        raise reply
    return reply


def group_in(reply: Any, name: str) -> dict[str, Any]:
    """Return what XINFO GROUPS says about this group; empty if there is no such group."""
    groups: list[dict[str, Any]] = checked(reply) or []
    nothing: dict[str, Any] = {}
    return next((group for group in groups if group["name"] == name.encode()), nothing)
