"""Tool call metrics. No label holds a tool name, because requests can choose it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from tokenbus_services.executor.processes import End
from tokenbus_services.runtime.metrics.worker_metrics import DeadLetterMetrics


class CallMetrics:
    """Calls by outcome, and their durations."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.dead_letters = DeadLetterMetrics(registry)
        self._seconds = Histogram(
            "tokenbus_tool_call_seconds",
            "Duration of tool calls, by outcome.",
            ["outcome"],
            registry=registry,
            buckets=(0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0),
        )

        self._ends = Counter(
            "tokenbus_tool_executor_ends", "Executors that a Python tool ended, by how.", ["end"], registry=registry
        )

    def executor_ended(self, end: End) -> None:
        """Record an executor that ended unexpectedly."""
        self._ends.labels(end).inc()

    def ran(self, seconds: float, *, is_error: bool) -> None:
        """Record a finished call."""
        self._seconds.labels("error" if is_error else "ok").observe(seconds)
