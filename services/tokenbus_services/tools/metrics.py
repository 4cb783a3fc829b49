"""What a tool executor shows of its calls. No label holds a tool's name, which a request may bring."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram


class CallMetrics:
    """Calls by outcome, and how long they took."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "tokenbus_tool_call_seconds",
            "How long a tool's call took, by outcome.",
            ["outcome"],
            registry=registry,
            buckets=(0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0),
        )

    def ran(self, seconds: float, *, is_error: bool) -> None:
        """A call gave its result."""
        self._seconds.labels("error" if is_error else "ok").observe(seconds)
