"""A deployment at one moment, and the rates between two: shown by `top`, checked by `doctor`. Pure."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tokenbus.bus.keys import InternalTopic

STAGES: tuple[tuple[str, InternalTopic], ...] = (("normalizer", "raw"), ("parser", "events"))
"""The ordered stages, each with its input."""
POLICY: tuple[str, InternalTopic] = ("policy", "drafts")
"""An additional stage, if runs have policies."""
QUEUES: tuple[tuple[str, InternalTopic], ...] = (("fetcher", "turns"), ("tools", "tools"))
"""Groups of partitioned work queues; intake reads the inbound stream."""
RECORDER: tuple[str, InternalTopic] = ("recorder", "records")
"""An additional queue, if runs are recorded."""
INTAKE = "intake"
CHAINED = ("fetcher", "normalizer", "parser")
"""The groups of which a pipeline worker is a member under one name."""


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
    """Runs that the parser has open, or attempts that the normalizer reads."""


class StageFacts(_Facts, frozen=True, kw_only=True):
    """An ordered stage."""

    name: str
    workers: list[str]
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
    def open(self) -> int:
        """Sum over all partitions."""
        return sum(p.open for p in self.partitions)


class QueueFacts(_Facts, frozen=True, kw_only=True):
    """The work queues of a group, over all their streams."""

    name: str
    workers: list[str]
    waiting: int = 0
    """Entries that no worker has taken."""
    held: int = 0
    """Entries that workers are processing."""
    added: int | None = None
    """Entries ever added; None if the server does not count them (Redis 6.2)."""


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
    disk_fault: str | None = None
    """The server's report on its last write to disk, if that failed."""


class DeploymentSnapshot(_Facts, frozen=True, kw_only=True):
    """The whole deployment at one moment."""

    at_ms: int
    """Unix time by the server's clock."""
    stages: list[StageFacts]
    """Those of `STAGES`, and `POLICY` if it was sampled."""
    queues: list[QueueFacts]
    nodes: list[NodeFacts]
    chunks: int | None
    """Chunks ever written to a public topic; None if none is written, or if the server does not count (Redis 6.2)."""
    dead: int
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


class Rates(_Facts, frozen=True, kw_only=True):
    """Rates per second between two samples. None: not counted by the server, or the counter was reset."""

    requests: float | None
    attempts: float | None
    tool_calls: float | None
    records: float | None = None
    """Entries for the recorder; None also if nothing is recorded."""
    chunks: float | None
    stage_bytes: dict[str, float | None]
    """By stage: bytes of frames processed."""


def rates(before: DeploymentSnapshot, now: DeploymentSnapshot) -> Rates:
    """Compute the rates between two samples."""
    return Rates(
        requests=_rate(before, now, lambda s: _added(s, INTAKE)),
        attempts=_rate(before, now, lambda s: _added(s, "fetcher")),
        tool_calls=_rate(before, now, lambda s: _added(s, "tools")),
        records=_rate(before, now, lambda s: _added(s, RECORDER[0])),
        chunks=_rate(before, now, lambda s: s.chunks),
        stage_bytes={stage.name: _rate(before, now, lambda s, name=stage.name: _done(s, name)) for stage in now.stages},
    )


def _rate(
    before: DeploymentSnapshot, now: DeploymentSnapshot, counter: Callable[[DeploymentSnapshot], int | None]
) -> float | None:
    begin, end, ms = counter(before), counter(now), now.at_ms - before.at_ms
    if begin is None or end is None or end < begin or ms <= 0:
        return None
    return (end - begin) * 1000 / ms


def _added(snapshot: DeploymentSnapshot, queue: str) -> int | None:
    return next((q.added for q in snapshot.queues if q.name == queue), None)


def _done(snapshot: DeploymentSnapshot, stage: str) -> int:
    return sum(p.done_bytes for s in snapshot.stages if s.name == stage for p in s.partitions)
