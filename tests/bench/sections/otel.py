"""The cost of traces: runs whose publisher samples them beside runs whose publisher does not, in the same processes.

Two deployments of the same code differ by several percent in CPU, which is more than the effect. So a deployment with
OpenTelemetry is compared with itself: the flag in a request's `traceparent` decides whether the run has spans. Each
round ends with a third load, again without spans. The load with spans is compared with the mean of the two others, so a
machine that becomes slower affects both sides. The ratio of those two loads shows the noise. The cost of OpenTelemetry
for a run without spans (metrics of attempts, its threads) is measured against a deployment without OpenTelemetry, where
the noise is larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import median

from tests.bench.figures import WARM, Figure
from tests.bench.in_process.spans import costs_of_spans
from tests.bench.jobs import Load
from tests.bench.measure import Meter
from tests.bench.stack import running
from tests.collector import collector

MOST = 1.02
MANY = Load(16, 50, 50)
FULL = Load(48, 400)
LOADS = {MANY: ("16 runs of 50 chunks/s", 10), FULL: ("saturated, runs of 400 chunks", 36)}
"""The name of each load, and the number of rounds that resolves 2 %."""
OFF, PLAIN, AGAIN, TRACED = "off", "not sampled", "not sampled again", "sampled"
SETTLE_S = 1.3
"""A worker gathers spans for a second before it encodes and sends them: that is a part of what they cost."""
OFF_EVERY = 3
"""Every n-th round has a load without OpenTelemetry."""
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{:02x}"


def traced() -> list[Figure]:
    """Each load, with and without spans of every run. The collector runs in this process, which does not count."""
    costs: dict[tuple[Load, str], list[float]] = {}
    with (
        collector() as received,
        running([WARM, *LOADS]) as off,
        running([WARM, *LOADS], settings=f'[otel]\nendpoint = "{received.url}"\n') as on,
    ):
        meters = {OFF: Meter(off), PLAIN: Meter(on), AGAIN: Meter(on), TRACED: Meter(on)}
        for load in (WARM, *LOADS):
            for which in (OFF, TRACED):
                meters[which].services(load, traceparent=TRACEPARENT.format(which is TRACED))
        spans = len(received.spans())
        assert spans, "nothing was traced"
        for load, (_, rounds) in LOADS.items():
            for number in range(rounds):
                for which in turns(number):
                    flags = int(which is TRACED)
                    sample = meters[which].services(load, settle_s=SETTLE_S, traceparent=TRACEPARENT.format(flags))
                    costs.setdefault((load, which), []).append(sample.cpu_us())
        assert len(received.spans()) > spans, "nothing was traced"
    a_run, export = costs_of_spans()
    figures = [
        Figure(name="CPU of the spans of a run, encoded and sent", unit="µs", value=a_run),
        Figure(name="  of an export, beside its spans", unit="µs", value=export),
    ]
    for load, (name, _) in LOADS.items():
        plain, again = costs[load, PLAIN], costs[load, AGAIN]
        beside = [(one + other) / 2 for one, other in zip(plain, again, strict=True)]
        figures.append(compared(f"CPU a chunk, runs sampled, {name}", costs[load, TRACED], beside, MOST))
        figures.append(compared("  not sampled either", again, plain))
        figures.append(compared("  not sampled, against OpenTelemetry off", plain[::OFF_EVERY], costs[load, OFF]))
    return figures


def turns(number: int) -> Sequence[str]:
    """The order of a round."""
    order = (PLAIN, TRACED, AGAIN)
    return (OFF, *order) if number % OFF_EVERY == 0 else order


def compared(name: str, costs: Sequence[float], beside: Sequence[float], most: float | None = None) -> Figure:
    """The median of the rounds' ratios, and the interval that has the true median with a probability of 95 %."""
    ratios = [cost / bare for cost, bare in zip(costs, beside, strict=True)]
    ratio = median(ratios)
    return Figure(
        name=name,
        unit="µs",
        value=median(costs),
        bare=median(beside),
        ratio=ratio,
        spread=interval(ratios),
        aim=f"ratio ≤ {most:g}" if most else "",
        met=ratio <= most if most else None,
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, from the order of the values alone: it assumes no distribution."""
    ordered = sorted(values)
    below = int((len(ordered) - 1.96 * sqrt(len(ordered))) / 2)
    return ordered[below], ordered[-1 - below]
