"""Samples a deployment with one pipeline per sample; its length depends on partitions, never on runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from tokenbus.bus.keys import Keys, PublicTopic, order_keys
from tokenbus.bus.server.disk_faults import disk_states
from tokenbus.bus.server.info_replies import checked, group_in
from tokenbus.bus.server.server import Server, translated
from tokenbus.bus.stage_lag import LAG_FIELDS, lag_of
from tokenbus_services.cli.inspect.snapshot import (
    INTAKE,
    POLICY,
    QUEUES,
    RECORDER,
    STAGES,
    DeploymentSnapshot,
    NodeFacts,
    PartitionFacts,
    QueueFacts,
    StageFacts,
)

Replies: TypeAlias = Iterator[Any]

ALIVE_MS = 5_000
"""A worker sends a heartbeat, or renews its lease, at least once a second."""
_LEASE_FIELDS = ("owner", "until", *LAG_FIELDS, "entries", "open")


class Observer:
    """Takes samples of one deployment."""

    def __init__(
        self,
        server: Server,
        keys: Keys,
        *,
        topic: PublicTopic | None = "chunks",
        recorded: bool = False,
        judged: bool = False,
    ) -> None:
        """``topic``: the public topic whose entries count as chunks; None if none is written. ``recorded``: whether
        the deployment records runs. ``judged``: whether it has policies.
        """
        self._server = server
        self._keys = keys
        self._topic: PublicTopic | None = topic
        self._queue_topics = (*QUEUES, RECORDER) if recorded else QUEUES
        self._stages = (*STAGES, POLICY) if judged else STAGES

    async def snapshot(self) -> DeploymentSnapshot:
        """Take one sample. Raises ServerUnavailable, and redis-py's error for a missing permission."""
        with translated(self._server):
            replies: list[Any] = await self._ask().execute(raise_on_error=False)
            return self._snapshot(iter(replies), await self._nodes())

    def _ask(self) -> Any:
        keys = self._keys
        pipe = self._server.client.pipeline(transaction=False)
        for name, topic in self._stages:
            pipe.zrange(keys.members(name), 0, -1, withscores=True)
            for p in range(keys.partitions):
                pipe.hmget(keys.lease(p, name), _LEASE_FIELDS)
                pipe.xinfo_groups(keys.topic(p, topic))
        for name, streams in self._queues():
            pipe.zrange(keys.members(name), 0, -1, withscores=True)
            for stream in streams:
                pipe.xinfo_stream(stream)
                pipe.xinfo_groups(stream)
                pipe.zcard(order_keys(stream)[0])
        if self._topic:
            for p in range(keys.partitions):
                pipe.xinfo_stream(keys.topic(p, self._topic))
        pipe.xlen(keys.dead)
        pipe.zrange(keys.gateway_members, 0, -1, withscores=True)
        return pipe

    def _queues(self) -> Iterator[tuple[str, list[str]]]:
        yield INTAKE, [self._keys.requests]
        for name, topic in self._queue_topics:
            yield name, [self._keys.topic(p, topic) for p in range(self._keys.partitions)]

    def _snapshot(self, replies: Replies, nodes: list[NodeFacts]) -> DeploymentSnapshot:
        """Consume the replies in the order of `_ask`."""
        now = max(node.now_ms for node in nodes)
        stages = [self._stage(name, replies, now) for name, _ in self._stages]
        queues = [self._queue(name, len(streams), replies, now) for name, streams in self._queues()]
        return DeploymentSnapshot(
            at_ms=now,
            stages=stages,
            queues=queues,
            nodes=nodes,
            chunks=self._chunks(replies) if self._topic else None,
            dead=checked(next(replies)),
            gateways=_alive(next(replies), now),
        )

    def _stage(self, name: str, replies: Replies, now: int) -> StageFacts:
        workers = _alive(next(replies), now)
        partitions: list[PartitionFacts] = []
        for _ in range(self._keys.partitions):
            owner, until, arrived, done, entries, open_ = checked(next(replies))
            partitions.append(
                PartitionFacts(
                    owner=owner.decode(errors="replace") if owner and int(until or 0) > now else None,
                    lag_bytes=lag_of(arrived, done),
                    lag_entries=group_in(next(replies), name).get("lag"),
                    entries=int(entries or 0),
                    done_bytes=int(done or 0),
                    open=int(open_ or 0),
                )
            )
        return StageFacts(name=name, workers=workers, partitions=partitions)

    def _queue(self, name: str, streams: int, replies: Replies, now: int) -> QueueFacts:
        workers = _alive(next(replies), now)
        waiting = held = 0
        added: list[int | None] = []
        for _ in range(streams):
            stream: dict[str, Any] = checked(next(replies)) or {}
            pending: int = group_in(next(replies), name).get("pending", 0)
            pending -= min(pending, checked(next(replies)))  # entries in the order set are with no worker
            held += pending
            waiting += stream.get("length", 0) - pending  # finished entries are deleted
            if stream:
                added.append(stream.get("entries-added"))
        return QueueFacts(name=name, workers=workers, waiting=max(0, waiting), held=held, added=_sum(added))

    def _chunks(self, replies: Replies) -> int | None:
        streams: list[dict[str, Any] | None] = [checked(next(replies)) for _ in range(self._keys.partitions)]
        return _sum([stream.get("entries-added") for stream in streams if stream])

    async def _nodes(self) -> list[NodeFacts]:
        client = self._server.client
        if self._server.topology == "cluster":
            masters = client.PRIMARIES
            infos: dict[str, dict[str, Any]] = await client.info(target_nodes=masters)
            times: dict[str, tuple[int, int]] = await client.time(target_nodes=masters)
            return [_node(name, infos[name], times[name]) for name in sorted(infos) if name in times]
        return [_node(self._server.url.safe, await client.info(), await client.time())]


def _node(name: str, info: dict[str, Any], time: tuple[int, int]) -> NodeFacts:
    faults = (f"{state} {word}" for state, word in disk_states(info).items() if word != "ok")
    return NodeFacts(
        name=name,
        memory_bytes=info.get("used_memory", 0),
        memory_limit=info.get("maxmemory", 0),
        commands_per_s=info.get("instantaneous_ops_per_sec", 0),
        clients=info.get("connected_clients", 0),
        now_ms=time[0] * 1000 + time[1] // 1000,
        disk_fault=next(faults, None),
    )


def _sum(counts: Sequence[int | None]) -> int | None:
    """Return the sum; None if one of the counts is unknown."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _alive(reply: Any, now: int) -> list[str]:
    """Return members with a recent heartbeat."""
    members: list[tuple[bytes, float]] = checked(reply) or []
    return sorted(name.decode(errors="replace") for name, seen in members if now - seen < ALIVE_MS)
