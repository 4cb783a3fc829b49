"""Metrics of the gateway by key."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from tokenbus import Usage
from tokenbus_services.gateway.metrics import MAX_KEYS, OTHER_KEYS, GatewayMetrics


def test_keys_beyond_the_most_share_one_label() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    for n in range(MAX_KEYS + 3):
        metrics.of_key(f"key{n}", 200, Usage(input=2, output=3))
    metrics.of_key("key0", 429, Usage())

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"tokenbus_gateway_key_{name}_total", labels)

    assert value("answers", key="key0", status="200") == 1
    assert value("answers", key="key0", status="429") == 1
    assert value("answers", key=OTHER_KEYS, status="200") == 3
    assert value("answers", key=f"key{MAX_KEYS}", status="200") is None
    assert value("tokens", key=OTHER_KEYS, kind="output") == 9
