"""Gauges of what exists once in a deployment, read from the server whenever `/metrics` is read.

Each fetcher shows the same values: take the maximum over replicas, never the sum. So they stay true if a stage runs
nowhere at all, when that stage's own metrics vanish.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from tokenbus.bus.keys import InternalTopic, Keys
from tokenbus.bus.server.disk_faults import read_disk_states
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage_lag import LAG_FIELDS, lag_of

_QUEUES: tuple[InternalTopic, ...] = ("turns", "tools")


class DeploymentGauges:
    """Owned partitions, open runs, lag, queues and dead letters of the whole deployment."""

    def __init__(self, registry: CollectorRegistry, keys: Keys, *, judged: bool) -> None:
        """``judged``: whether the deployment has policies, and so their stage."""
        self._keys = keys
        self._stages = ("normalizer", "parser", "policy") if judged else ("normalizer", "parser")

        self._partitions = Gauge(
            "tokenbus_deployment_partitions", "Partitions of the deployment.", [], registry=registry
        )
        self._owned = Gauge(
            "tokenbus_deployment_owned_partitions",
            "Partitions that a worker of the stage owns now.",
            ["stage"],
            registry=registry,
        )
        self._lag = Gauge(
            "tokenbus_deployment_lag_bytes",
            "Bytes of input that the stage has not processed yet.",
            ["stage"],
            registry=registry,
        )
        self._open = Gauge(
            "tokenbus_deployment_open_runs", "Runs that began and have not ended.", [], registry=registry
        )
        self._queues = Gauge(
            "tokenbus_deployment_queue_entries",
            "Entries of a work queue, waiting or in progress.",
            ["queue"],
            registry=registry,
        )
        self._dead = Gauge(
            "tokenbus_deployment_dead_entries",
            "Entries of the dead stream: crashes and rejected requests.",
            ["kind"],
            registry=registry,
        )

        self._disk_fault = Gauge(
            "tokenbus_server_disk_fault",
            "1 if this state of the server's persistence is not `ok`: it cannot write to its disk.",
            ["server", "state"],
            registry=registry,
        )

    async def measure(self, server: Server) -> None:
        """Set all gauges. Raises redis-py's errors; those with labels are then absent rather than stale."""
        keys, partitions = self._keys, range(self._keys.partitions)  # the number may change meanwhile
        for gauge in (self._owned, self._lag, self._queues, self._dead, self._disk_fault):
            gauge.clear()
        for name, states in (await read_disk_states(server)).items():
            for state, word in states.items():
                self._disk_fault.labels(name, state).set(word != "ok")
        pipe = server.client.pipeline(transaction=False)
        for stage in self._stages:
            for p in partitions:
                pipe.hmget(keys.lease(p, stage), ["owner", "until", *LAG_FIELDS, "open"])
        for topic in _QUEUES:
            for p in partitions:
                pipe.xlen(keys.topic(p, topic))
        pipe.xlen(keys.requests)
        pipe.xlen(keys.dead)
        pipe.llen(keys.rejected)
        now_ms = server.clock.now_ms()
        replies: list[Any] = await pipe.execute()
        found = iter(replies)
        open_runs = 0
        for stage in self._stages:
            owned = lag = 0
            for _ in partitions:
                owner, until, arrived, done, open_here = next(found)
                owned += bool(owner) and int(until or 0) > now_ms
                lag += lag_of(arrived, done)
                open_runs += int(open_here or 0) if stage == "parser" else 0
            self._owned.labels(stage).set(owned)
            self._lag.labels(stage).set(lag)
        for topic in _QUEUES:
            self._queues.labels(topic).set(sum(next(found) for _ in partitions))
        self._queues.labels("requests").set(next(found))
        dead, rejected = next(found), next(found)
        self._dead.labels("crashed").set(max(0, dead - rejected))
        self._dead.labels("rejected").set(rejected)
        self._open.set(open_runs)
        self._partitions.set(len(partitions))
