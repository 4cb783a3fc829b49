"""Is the bus well: partitions, queues, workers and dead letters, read from the server in one pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from tokenbus.bus.keys import InternalTopic, Keys, order_keys
from tokenbus.bus.server.info_replies import checked, group_in
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage_lag import LAG_FIELDS, lag_of

_STAGES: tuple[tuple[str, InternalTopic], ...] = (("normalizer", "raw"), ("parser", "events"))
_POLICY: tuple[str, InternalTopic] = ("policy", "drafts")
_QUEUES: tuple[tuple[str, InternalTopic], ...] = (("fetcher", "turns"), ("tools", "tools"))
_INTAKE = "intake"
GONE_MS = 60_000
"""A worker without a heartbeat for this long is no longer listed."""


class PartitionHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One partition of an ordered stage."""

    partition: int
    stage: str
    owner: str | None
    lag_entries: int | None
    """None if the server does not know."""
    lag_bytes: int


class QueueHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One stream of a work queue."""

    queue: str
    partition: int | None
    waiting: int
    processing: int = msgspec.field(name="in_hand")
    """Entries that workers are processing."""


class LaneHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of one tenant that no provider has answered yet."""

    tenant: str
    waiting: int


class DeadCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters: of crashes, and rejected requests."""

    entries: int = 0
    rejected: int = 0


class WorkerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, and how long ago it gave a sign of life."""

    stage: str
    worker: str
    age_s: float


class ProviderHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one provider and model in the last five minutes."""

    name: str
    model: str
    attempts_5m: int
    errors_5m: int
    limited_5m: int
    first_byte_p50_ms: int | None
    first_byte_p99_ms: int | None


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Everything."""

    providers: list[ProviderHealth] = []
    partitions: list[PartitionHealth] = []
    queues: list[QueueHealth] = []
    lanes: list[LaneHealth] = []
    dead: DeadCounts = DeadCounts()
    workers: list[WorkerHealth] = []


class HealthReader:
    """Reads what the server knows of the deployment."""

    def __init__(self, server: Server, keys: Keys, *, judged: bool) -> None:
        """``judged``: whether the deployment has policies, and so their stage."""
        self._server = server
        self._keys = keys
        self._stages = (*_STAGES, _POLICY) if judged else _STAGES

    async def read(self) -> Health:
        """Raises redis-py's errors."""
        keys, partitions_now = self._keys, range(self._keys.partitions)  # the number may change meanwhile
        queued = list(self._queues())
        pipe = self._server.client.pipeline(transaction=False)
        for stage, topic in self._stages:
            pipe.zrange(keys.members(stage), 0, -1, withscores=True)
            for p in partitions_now:
                pipe.hmget(keys.lease(p, stage), ["owner", "until", *LAG_FIELDS])
                pipe.xinfo_groups(keys.topic(p, topic))
        for _, _, stream in queued:
            pipe.xlen(stream)
            pipe.xinfo_groups(stream)
            pipe.zcard(order_keys(stream)[0])
        for queue in (_INTAKE, *(name for name, _ in _QUEUES)):
            pipe.zrange(keys.members(queue), 0, -1, withscores=True)
        pipe.xlen(keys.dead)
        pipe.llen(keys.rejected)
        answers: list[Any] = await pipe.execute(raise_on_error=False)
        replies = iter(answers)
        now = self._server.clock.now_ms()
        workers: list[WorkerHealth] = []
        partitions: list[PartitionHealth] = []
        for stage, _ in self._stages:
            workers += _workers(stage, checked(next(replies)), now)
            for p in partitions_now:
                owner, until, arrived, done = checked(next(replies))
                owned = bool(owner) and int(until or 0) > now
                partitions.append(
                    PartitionHealth(
                        partition=p,
                        stage=stage,
                        owner=owner.decode(errors="replace") if owned else None,
                        lag_entries=group_in(next(replies), stage).get("lag"),
                        lag_bytes=lag_of(arrived, done),
                    )
                )
        queues = [_queue(name, p, replies) for name, p, _ in queued]
        for queue in (_INTAKE, *(name for name, _ in _QUEUES)):
            workers += _workers(queue, checked(next(replies)), now)
        dead, rejected = checked(next(replies)) or 0, checked(next(replies)) or 0
        counts = DeadCounts(entries=max(0, dead - rejected), rejected=rejected)
        return Health(partitions=partitions, queues=queues, dead=counts, workers=workers)

    def _queues(self) -> Iterator[tuple[str, int | None, str]]:
        yield _INTAKE, None, self._keys.requests
        for name, topic in _QUEUES:
            for p in range(self._keys.partitions):
                yield name, p, self._keys.topic(p, topic)


def _queue(name: str, partition: int | None, replies: Iterator[Any]) -> QueueHealth:
    length: int = checked(next(replies)) or 0
    pending: int = group_in(next(replies), name).get("pending", 0)
    pending -= min(pending, checked(next(replies)) or 0)  # entries in the order set are with no worker
    return QueueHealth(queue=name, partition=partition, waiting=max(0, length - pending), processing=pending)


def _workers(stage: str, members: list[tuple[bytes, float]] | None, now: int) -> list[WorkerHealth]:
    found = [(name, max(0, now - int(seen))) for name, seen in members or []]
    return [
        WorkerHealth(stage=stage, worker=name.decode(errors="replace"), age_s=round(age / 1000, 1))
        for name, age in sorted(found)
        if age < GONE_MS
    ]
