"""Tool call metrics. No label holds a tool name, because requests can choose it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

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

    def ran(self, seconds: float, *, is_error: bool) -> None:
        """Record a finished call."""
        self._seconds.labels("error" if is_error else "ok").observe(seconds)
