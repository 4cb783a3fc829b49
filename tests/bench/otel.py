"""What traces cost: the services with OpenTelemetry on, beside the same with it off, in turn in one run."""

from __future__ import annotations

from statistics import median

from tests.bench.figures import WARM, Figure
from tests.bench.jobs import Load
from tests.bench.measure import Meter, Sample
from tests.bench.stack import running
from tests.collector import collector

ROUNDS = 5
SHORT = Load(64, 40)
MANY = Load(16, 300, 50)
FULL = Load(64, 800)
LOADS = {
    SHORT: ("CPU a chunk, traced, 64 runs of 40 chunks", None),
    MANY: ("CPU a chunk, traced, 16 runs of 50 chunks/s", 1.02),
    FULL: ("CPU a chunk, traced, saturated, 64 runs of 800 chunks", 1.02),
}
"""What is read off each load, and the most that its ratio to the same without traces may be."""


def traced() -> list[Figure]:
    """Each load with and without traces of every run. The collector runs in this process, which is not counted."""
    samples: dict[tuple[Load, bool], list[Sample]] = {}
    with (
        collector() as received,
        running([WARM, *LOADS]) as without,
        running([WARM, *LOADS], settings=f'[otel]\nendpoint = "{received.url}"\n') as with_traces,
    ):
        meters = {False: Meter(without), True: Meter(with_traces)}
        for meter in meters.values():
            meter.services(WARM)
        for _ in range(ROUNDS):
            for load in LOADS:
                for on, meter in meters.items():
                    samples.setdefault((load, on), []).append(meter.services(load))
        assert received.spans(), "nothing was traced"
    figures: list[Figure] = []
    for load, (name, most) in LOADS.items():
        off, on = ([sample.cpu_us() for sample in samples[load, traces]] for traces in (False, True))
        ratio = median(one / beside for one, beside in zip(on, off, strict=True))
        figures.append(
            Figure(
                name=name,
                unit="µs",
                value=median(on),
                bare=median(off),
                ratio=ratio,
                aim=f"ratio ≤ {most:g}" if most else "",
                met=ratio <= most if most else None,
            )
        )
    return figures
