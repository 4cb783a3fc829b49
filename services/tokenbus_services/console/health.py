"""Is the bus well: partitions, queues, workers and dead letters, as the console's page shows them."""

from __future__ import annotations

import msgspec

from tokenbus_services.runtime.deployment_snapshot import DeploymentSnapshot


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
    providers: list[ProviderHealth] = []
    partitions: list[PartitionHealth] = []
    queues: list[QueueHealth] = []
    lanes: list[LaneHealth] = []
    dead: DeadCounts = DeadCounts()
    workers: list[WorkerHealth] = []


def health_of(now: DeploymentSnapshot) -> Health:
    return Health(
        partitions=[
            PartitionHealth(
                partition=n, stage=stage.name, owner=p.owner, lag_entries=p.lag_entries, lag_bytes=p.lag_bytes
            )
            for stage in now.stages
            for n, p in enumerate(stage.partitions)
        ],
        queues=[
            QueueHealth(queue=queue.name, partition=s.partition, waiting=s.waiting, processing=s.held)
            for queue in now.queues
            for s in queue.streams
        ],
        dead=DeadCounts(entries=max(0, now.dead - now.rejected), rejected=now.rejected),
        workers=[
            WorkerHealth(stage=group.name, worker=worker, age_s=round(group.ages_ms[worker] / 1000, 1))
            for group in (*now.stages, *now.queues)
            for worker in group.workers
        ],
    )
