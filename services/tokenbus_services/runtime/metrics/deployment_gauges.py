"""Gauges of what exists once in a deployment, read from the server whenever `/metrics` is read.

Each fetcher shows the same values: take the maximum over replicas, never the sum. So they stay true if a stage runs
nowhere at all, when that stage's own metrics vanish.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from tokenbus.bus.keys import Keys
from tokenbus.bus.server.disk_faults import read_disk_states
from tokenbus.bus.server.server import Server
from tokenbus.bus.topology import INTAKE, QUEUES, RECORDER
from tokenbus_services.runtime.deployment_snapshot import DeploymentReader

_QUEUE_LABELS = {INTAKE: "requests", **dict((*QUEUES, RECORDER))}
"""By group: what its queue is called."""


class DeploymentGauges:
    """Owned partitions, open runs, lag, queues and dead letters of the whole deployment."""

    def __init__(
        self, registry: CollectorRegistry, server: Server, keys: Keys, *, judged: bool, recorded: bool
    ) -> None:
        """``judged``: whether the deployment has policies. ``recorded``: whether it records runs."""
        self._server = server
        self._reader = DeploymentReader(server, keys, recorded=recorded, judged=judged, workers=False)
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

    async def measure(self) -> None:
        """Set all gauges. Raises redis-py's errors; those with labels are then absent rather than stale."""
        for gauge in (self._owned, self._lag, self._queues, self._dead, self._disk_fault):
            gauge.clear()
        for name, states in (await read_disk_states(self._server)).items():
            for state, word in states.items():
                self._disk_fault.labels(name, state).set(word != "ok")
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
