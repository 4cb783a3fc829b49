"""What traces cost: the services with OpenTelemetry on, beside two deployments of the same with it off.

CPU time of the processes is compared, never the wall clock. The three take turns, and who begins changes from round to
round, so that a busy moment of the machine falls on each. The second deployment without traces shows what the
machine's noise alone makes of a ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles

from tests.bench.figures import WARM, Figure
from tests.bench.jobs import Load
from tests.bench.measure import Meter
from tests.bench.stack import running
from tests.collector import collector

ROUNDS = 9
SHORT = Load(64, 40)
MANY = Load(16, 150, 50)
FULL = Load(64, 400)
LOADS = {
    SHORT: ("64 runs of 40 chunks", None),
    MANY: ("16 runs of 50 chunks/s", 1.02),
    FULL: ("saturated, 64 runs of 400 chunks", 1.02),
}
"""What each load is called, and the most that its ratio to the same without traces may be."""
OFF, CONTROL, ON = "off", "off again", "traced"


def traced() -> list[Figure]:
    """Each load with and without traces of every run. The collector runs in this process, which is not counted."""
    costs: dict[tuple[Load, str], list[float]] = {}
    with (
        collector() as received,
        running([WARM, *LOADS]) as off,
        running([WARM, *LOADS]) as control,
        running([WARM, *LOADS], settings=f'[otel]\nendpoint = "{received.url}"\n') as on,
    ):
        meters = {OFF: Meter(off), CONTROL: Meter(control), ON: Meter(on)}
        for meter in meters.values():
            meter.services(WARM)
        for number in range(ROUNDS):
            for load in LOADS:
                for which in turns(number):
                    costs.setdefault((load, which), []).append(meters[which].services(load).cpu_us())
        assert received.spans(), "nothing was traced"
    figures: list[Figure] = []
    for load, (name, most) in LOADS.items():
        without = costs[load, OFF]
        figures.append(compared(f"CPU a chunk, traced, {name}", costs[load, ON], without, most))
        figures.append(compared("  not traced either", costs[load, CONTROL], without))
    return figures


def turns(number: int) -> Sequence[str]:
    """The order of a round."""
    order = (OFF, ON, CONTROL)
    begin = number % len(order)
    return (*order[begin:], *order[:begin])


def compared(name: str, costs: Sequence[float], beside: Sequence[float], most: float | None = None) -> Figure:
    """The median of the rounds' ratios, and their quartiles."""
    ratios = [cost / bare for cost, bare in zip(costs, beside, strict=True)]
    low, ratio, high = quantiles(ratios, n=4, method="inclusive")
    return Figure(
        name=name,
        unit="µs",
        value=median(costs),
        bare=median(beside),
        ratio=ratio,
        spread=(low, high),
        aim=f"ratio ≤ {most:g}" if most else "",
        met=ratio <= most if most else None,
    )
