"""What the policy stage adds to a chunk on its way, with a policy that lets everything through."""

from __future__ import annotations

from statistics import median

from tests.bench.figures import ROUNDS, WARM, Figure
from tests.bench.jobs import Load
from tests.bench.measure import Meter
from tests.bench.stack import SERVICES, running

LOAD = Load(2, 250, 50)
PASSES = '[policies.passes]\nuse = "tokenbus.policy:StreamProcessor"\n'


def judged() -> list[Figure]:
    """The same load with the stage and without it, in turn."""
    with running([WARM, LOAD], settings=PASSES, services=(*SERVICES, "policy")) as stack:
        meter = Meter(stack)
        meter.services(WARM, policies=["passes"])
        rounds = [(meter.services(LOAD, policies=["passes"]), meter.services(LOAD)) for _ in range(ROUNDS)]
    return [
        Figure(
            name=f"added latency of an idle policy stage, {name} at 100 chunks/s",
            unit="ms",
            value=median(with_it.latency_ms(share) - without.latency_ms(share) for with_it, without in rounds),
        )
        for name, share in (("p50", 0.5), ("p99", 0.99))
    ]
