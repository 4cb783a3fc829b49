"""The signals that an operator sees after a fault: alerts, log lines, metrics, spans and the doctor, each with its
time.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.collector import Collector
from tests.deploy.prometheus_server import Prometheus
from tests.e2e.fleet import Fleet

QUERIES = (
    "sum by (status) (rate(tokenbus_runs_ended_total[30s]))",
    "sum by (provider, outcome) (rate(tokenbus_provider_attempts_total[30s]))",
    "max(tokenbus_deployment_open_runs)",
    "max by (queue) (tokenbus_deployment_queue_entries)",
    "max by (stage) (tokenbus_deployment_owned_partitions)",
    "topk(4, max by (stage, partition) (tokenbus_lag_bytes) > 65536)",
    "max by (stage) (tokenbus_deployment_lag_bytes) > 65536",
    "sum by (policy, action) (rate(tokenbus_policy_decisions_total[30s])) > 0",
    "sum(tokenbus_policy_waiting_calls)",
    "sum(tokenbus_policy_waiting_drafts)",
    "sum by (end) (increase(tokenbus_policy_executor_ends_total[1m])) > 0",
    "count(up == 0)",
)
FIELDS = ("class", "code", "status", "outcome", "hint", "problem", "error", "stage", "policy", "where")
LEVELS = ("warning", "error", "critical")


class Signals:
    """Reads all signals; appends what is new to the file ``out``."""

    def __init__(self, services: Fleet, prometheus: Prometheus, received: Collector, out: Path) -> None:
        self._services = services
        self._prometheus = prometheus
        self._received = received
        self._out = out
        self._begin = 0.0
        self._begin_ns = 0
        self._seen: set[str] = set()
        self._read = {id(worker): 0 for worker in services.workers}
        self.counts: Counter[str] = Counter()

    def begin(self) -> None:
        """From now on, record what is new."""
        for worker in self._services.workers:
            self._read[id(worker)] = worker.log.stat().st_size
        self._begin, self._begin_ns = time.monotonic(), time.time_ns()

    def note(self, what: str) -> None:
        """Write a line, the first time that it occurs."""
        self.counts[what] += 1
        if what not in self._seen:
            self._seen.add(what)
            with self._out.open("a") as out:
                out.write(f"{time.monotonic() - self._begin:6.1f} s  {what}\n")

    async def look(self) -> None:
        """Record what is new in the alerts, logs and spans."""
        for alert in (await self._prometheus.get("alerts"))["alerts"]:
            labels = {k: v for k, v in alert["labels"].items() if k in ("stage", "partition", "instance", "severity")}
            self.note(f"alert {alert['labels']['alertname']} {alert['state']} {labels}: {alert['annotations']['todo']}")
        for worker in self._services.workers:
            for line in self._new_lines(worker):
                self.note(line)
        for span in self._received.spans():
            if span.failed and span.end_ns > self._begin_ns:
                self.note(f"span {span.name} of {span.service}: {span.attributes.get('error.type')}")

    def _new_lines(self, worker: Any) -> list[str]:
        at = self._read[id(worker)]
        data = worker.log.read_bytes()[at:]
        end = data.rfind(b"\n") + 1
        self._read[id(worker)] = at + end
        found: list[str] = []
        for line in data[:end].decode(errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                entry = {"level": "error", "event": line[:160]}
            if entry.get("level") in LEVELS:
                facts = {name: entry[name] for name in FIELDS if name in entry}
                found.append(f"log {worker.kind} {entry['level']} {entry['event'][:160]} {facts}")
        return found

    async def metrics(self) -> None:
        """Record the current results of the queries."""
        for query in QUERIES:
            for series in (await self._prometheus.get(f"query?query={quote(query)}"))["result"]:
                if float(series["value"][1]):
                    self.note(f"metric {query} {series['metric']} = {float(series['value'][1]):.4g}")

    async def doctor(self) -> None:
        """Record the doctor's output."""
        for line in (await self._services.doctor()).splitlines():
            if line.strip() and not line.lstrip().startswith("ok"):
                self.note(f"doctor {line.strip()}")
