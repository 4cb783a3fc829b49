"""Metrics that every service shows on `/metrics`, besides FastStream's own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from redis.exceptions import RedisError

from tokenbus.bus.activity import OTHER
from tokenbus.bus.keys import Keys
from tokenbus.bus.leases import LAG_FIELDS, lag_of
from tokenbus.bus.liveness import rest
from tokenbus.bus.server.retry import Defects
from tokenbus.bus.server.server import Server
from tokenbus.bus.topology import INTAKE, QUEUES, RECORDER, WEBHOOKS
from tokenbus.core.request.bounds import MAX_NAME_CHARS
from tokenbus_services.runtime.deployment_snapshot import DeploymentReader, read_nodes
from tokenbus_services.settings import Settings


class OneStageMetrics(msgspec.Struct, frozen=True):
    entries: Counter
    batch_s: Histogram
    partitions: Gauge
    blocked: Gauge


class StageMetrics:
    """Metrics of the ordered stages in one process, by stage."""

    def __init__(self, registry: CollectorRegistry) -> None:
        gauge = partial(Gauge, registry=registry)
        self._entries = Counter(
            "tokenbus_entries", "Stream entries that were processed and committed.", ["stage"], registry=registry
        )
        self._batch_s = Histogram(
            "tokenbus_batch_seconds",
            "From a read to its commit.",
            ["stage"],
            registry=registry,
            buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.0),
        )
        self._partitions = gauge("tokenbus_partitions", "Partitions that this worker owns.", ["stage"])
        self._blocked = gauge(
            "tokenbus_partitions_blocked",
            "Partitions that this worker found with a shared key of the wrong type; `tokenbus doctor` names it.",
            ["stage"],
        )

    def of(self, stage: str) -> OneStageMetrics:
        return OneStageMetrics(
            entries=self._entries.labels(stage),
            batch_s=self._batch_s.labels(stage),
            partitions=self._partitions.labels(stage),
            blocked=self._blocked.labels(stage),
        )


class PassedOver:
    """Counts work that failed and that its task went on from; each failure is in the log."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._failures = Counter(
            "tokenbus_work_failures",
            "Failures of the worker's own tasks that were logged and skipped.",
            ["work"],
            registry=registry,
        )

    def count(self, work: str) -> None:
        self._failures.labels(work=work).inc()


class DeadLetterMetrics:
    """Counts what this process adds to the dead stream. The stream's length cannot show that: it has a bound."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._written = Counter(
            "tokenbus_dead_letters",
            "Entries that this worker added to the dead stream: crashes and rejected requests.",
            ["kind"],
            registry=registry,
        )
        for kind in ("crashed", "rejected"):
            self._written.labels(kind)  # shown as 0, so that the first one is an increase

    def count(self, kind: str) -> None:
        """Count an entry that was written."""
        self._written.labels(kind).inc()


# Lag of a worker's partitions, measured whenever `/metrics` is read.
#
# Each partition has one owner per stage, so sums over all workers count nothing twice.


class PartitionGauges:
    """Lag of one worker's partitions. Call `add` for each stage."""

    def __init__(self, registry: CollectorRegistry, keys: Keys) -> None:
        self._keys = keys
        self._stages: list[tuple[str, Callable[[], Sequence[int]]]] = []
        self._lag = Gauge(
            "tokenbus_lag_bytes",
            "Bytes of a partition's input that the stage has not processed yet.",
            ["stage", "partition"],
            registry=registry,
        )

    def add(self, stage: str, owned: Callable[[], Sequence[int]]) -> None:
        """``owned``: the partitions that the worker owns in this stage."""
        self._stages.append((stage, owned))

    async def measure(self, server: Server) -> None:
        """Set all gauges. Raises redis-py's errors; the gauges are then absent rather than stale."""
        self._lag.clear()
        pipe = server.client.pipeline(transaction=False)
        pairs = [(stage, p) for stage, owned in self._stages for p in owned()]
        for stage, p in pairs:
            pipe.hmget(self._keys.lease(p, stage), LAG_FIELDS)
        replies: list[Any] = await pipe.execute() if pairs else []
        for (stage, p), reply in zip(pairs, replies, strict=True):
            self._lag.labels(stage, p).set(lag_of(*reply))


# Names that may be labels of metrics. Requests may bring any name, so only known ones and few others are; the rest is
# `other`.

MAX_MODELS = 100
"""Maximum models of one provider that become labels besides those in the settings."""
MAX_UNHEARD = 10
"""The same for models that never answered."""


class KnownModels:
    """Knows the providers and models of the settings, and learns models that answered.

    A misspelt model never answers. So that whoever looks for it reads its name, the first few of these are labels, too.
    """

    def __init__(self, settings: Settings) -> None:
        self._known: dict[str, set[str]] = {name: set() for name in settings.providers}
        self._learned = dict.fromkeys(settings.providers, 0)
        self._unheard: dict[str, set[str]] = {name: set() for name in settings.providers}
        for name, provider in settings.providers.items():
            self._known[name].update(provider.model_aliases.values())
        for name, rates in settings.limits.providers.items():
            self._known[name].update(model for model in rates.models if not model.endswith("*"))
        for route in settings.fallback_routes:
            for choice in route.fallback:
                self._known[choice.provider].add(choice.model)
        if gateway := settings.gateway:
            for full_name in (*gateway.models, *(one for choices in gateway.aliases.values() for one in choices)):
                provider, _, model = full_name.partition("/")
                self._known.get(provider, set[str]()).add(model)

    def label(self, provider: str, model: str, *, ok: bool) -> tuple[str, str]:
        """The labels for a provider and model. ``ok``: the model answered."""
        known = self._known.get(provider)
        if known is None:
            return OTHER, OTHER
        if model not in known:
            if not ok:
                return provider, self._of_unheard(provider, model)
            if self._learned[provider] >= MAX_MODELS:
                return provider, OTHER
            self._learned[provider] += 1
            known.add(model)
        return provider, model

    def _of_unheard(self, provider: str, model: str) -> str:
        unheard = self._unheard[provider]
        if model not in unheard:
            if len(unheard) >= MAX_UNHEARD or len(model) > MAX_NAME_CHARS:
                return OTHER
            unheard.add(model)
        return model


def known_tenants(settings: Settings) -> frozenset[str]:
    """The tenants that the settings name. Empty: metrics do not distinguish tenants."""
    keys = settings.gateway.keys if settings.gateway else {}
    return frozenset({*settings.limits.tenants, *(key.tenant or name for name, key in keys.items())})


# Gauges of what exists once in a deployment, read from the server whenever `/metrics` is read.
#
# Each fetcher shows the same values: take the maximum over replicas, never the sum. So they stay true if a stage runs
# nowhere at all, when that stage's own metrics vanish.

_QUEUE_LABELS = {INTAKE: "requests", **dict((*QUEUES, RECORDER, WEBHOOKS))}
"""By group: what its queue is called."""


def server_gauges(registry: CollectorRegistry) -> dict[str, Gauge]:
    """By name: what `NodeFacts.gauges` has."""
    made: dict[str, Gauge] = {}

    def gauge(name: str, what: str, label: str) -> None:
        made[name] = Gauge(name, what, [label], registry=registry)

    gauge("tokenbus_server_memory_bytes", "Memory in use by the server's data.", "server")
    gauge("tokenbus_server_memory_limit_bytes", "`maxmemory` of the server; 0: none.", "server")
    gauge("tokenbus_server_memory_resident_bytes", "Memory that the server's process takes.", "server")
    gauge("tokenbus_server_memory_fragmentation", "Resident memory as a multiple of the memory in use.", "server")
    gauge("tokenbus_server_evicted_keys", "Keys that the server deleted for want of memory.", "server")
    gauge("tokenbus_server_aof_bytes", "Size of the append-only file.", "server")
    gauge("tokenbus_server_aof_rewriting", "1 while the server rewrites its append-only file.", "server")
    gauge("tokenbus_server_aof_delayed_fsyncs", "Writes that waited for the disk.", "server")
    gauge("tokenbus_server_replicas", "Replicas that are connected.", "server")
    gauge("tokenbus_server_replication_lag_bytes", "What the last of the replicas has not read yet.", "server")
    return made


class DeploymentGauges:
    """Owned partitions, open runs, lag, queues and dead letters of the whole deployment."""

    def __init__(self, registry: CollectorRegistry, server: Server, reader: DeploymentReader) -> None:
        gauge = partial(Gauge, registry=registry)
        self._server = server
        self._reader = reader
        self._partitions = gauge("tokenbus_deployment_partitions", "Partitions of the deployment.", [])
        self._owned = gauge(
            "tokenbus_deployment_owned_partitions", "Partitions that a worker of the stage owns now.", ["stage"]
        )
        self._lag = gauge(
            "tokenbus_deployment_lag_bytes", "Bytes of input that the stage has not processed yet.", ["stage"]
        )
        self._open = gauge("tokenbus_deployment_open_runs", "Runs that began and have not ended.", [])
        self._queues = gauge(
            "tokenbus_deployment_queue_entries", "Entries of a work queue, waiting or in progress.", ["queue"]
        )
        self._dead = gauge(
            "tokenbus_deployment_dead_entries", "Entries of the dead stream: crashes and rejected requests.", ["kind"]
        )
        self._server_gauges = server_gauges(registry)
        self._disk_fault = gauge(
            "tokenbus_server_disk_fault",
            "1 if this state of the server's persistence is not `ok`: it cannot write to its disk.",
            ["server", "state"],
        )

    async def measure(self) -> None:
        """Set all gauges. Raises redis-py's errors; those with labels are then absent rather than stale."""
        of_server = (self._disk_fault, *self._server_gauges.values())
        for gauge in (self._owned, self._lag, self._queues, self._dead, *of_server):
            gauge.clear()
        for node in await read_nodes(self._server):
            for state, word in node.disk.items():
                self._disk_fault.labels(node.name, state).set(word != "ok")
            for name, value in node.gauges.items():
                self._server_gauges[name].labels(node.name).set(value)
        now = await self._reader.read()
        for stage in now.stages:
            self._owned.labels(stage.name).set(stage.owned)
            self._lag.labels(stage.name).set(stage.lag_bytes)
        for queue in now.queues:
            self._queues.labels(_QUEUE_LABELS[queue.name]).set(queue.waiting + queue.held)
        self._dead.labels("crashed").set(max(0, now.dead - now.rejected))
        self._dead.labels("rejected").set(now.rejected)
        self._open.set(now.open_runs)
        self._partitions.set(len(now.stages[0].partitions))


log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

WRITE_S = 5.0


async def write_regularly(write: Callable[[], Awaitable[None]]) -> None:
    """Call ``write`` every few seconds. A server that is away, or rights that are missing, cost only the counts."""
    defects = Defects()
    while True:
        await rest(WRITE_S)
        try:
            await write()
            defects.none()
        except Exception as e:
            log.debug("activity_not_written", error=str(e) or type(e).__name__)
            if not isinstance(e, RedisError | OSError):
                defects.count(e)
