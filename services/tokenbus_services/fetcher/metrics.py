"""What a fetcher shows of who may call, besides FastStream's numbers. No label holds a name that a request brings."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from tokenbus.bus.scripts.limits import Kind


class AdmissionMetrics:
    """Calls granted, and refused by the kind of the limit."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.granted = Counter("tokenbus_calls_granted", "Provider calls that got leave.", registry=registry)
        self._refused = Counter(
            "tokenbus_calls_refused",
            "How often a limit said: not now; the call asks again. By what is limited: model, provider or tenant.",
            ["limit"],
            registry=registry,
        )

    def refused(self, kind: Kind) -> None:
        """A limit of this kind refused."""
        self._refused.labels(limit=kind).inc()
