"""The model beside the measurements."""

from __future__ import annotations

import msgspec

from tests.simulation.fit import modelled, simulated, summed
from tests.simulation.measurement import Measured, SmallFigure, name_of

NEAR = 0.2
"""How far the model may be from the small case, as a share of it."""


class Pair(msgspec.Struct, frozen=True):
    """One figure."""

    name: str
    unit: str
    measured: float
    model: float

    @property
    def off(self) -> float:
        """How far the model is from the measurement."""
        return self.model / self.measured - 1

    @property
    def near(self) -> bool:
        """Whether that is near enough."""
        return abs(self.off) <= NEAR


def of_small(figure: SmallFigure, measured: Measured) -> Pair:
    """One figure of the small case."""
    unit = "µs" if figure.what == "CPU a chunk" else "ms"
    name = f"{name_of(figure.runs, figure.pace)}, {figure.what}"
    return Pair(name, unit, figure.value, modelled(figure, measured.costs, measured.small.cores))


def of_cases(measured: Measured) -> list[Pair]:
    """The loads of the busy machine, slowed down by what processes waited there. These are not fitted as a whole."""
    pairs: list[Pair] = []
    for case in measured.cases:
        _, outcome = simulated(case.runs, case.pace, measured.costs, cores=1, waited=case.waited)
        name = name_of(case.runs, case.pace)
        pairs.append(Pair(f"{name}, CPU a chunk", "µs", summed(case.cpu_us), summed(outcome.cpu_us)))
        if case.pace:
            pairs.append(Pair(f"{name}, latency p50", "ms", case.p50_ms, outcome.wait_ms(0.5)))
            pairs.append(Pair(f"{name}, latency p99", "ms", case.p99_ms, outcome.wait_ms(0.99)))
        else:
            pairs.append(Pair(f"{name}, chunks a second", "/s", case.per_second, outcome.chunks / outcome.seconds))
    return pairs


def report(measured: Measured) -> str:
    """Tables."""
    before, after = measured.load
    busy = max(case.foreign for case in measured.cases)
    costs = measured.costs
    return "\n".join(
        [
            f"the small case: {measured.small.source}",
            _HEAD,
            *(_row(of_small(figure, measured)) for figure in measured.small.figures),
            "",
            f"{measured.date}: {measured.machine}; load average {before:.1f} before and {after:.1f} after;"
            f" other programs used up to {busy:.0%} of the machine",
            _HEAD,
            *(_row(pair) for pair in of_cases(measured)),
            "",
            f"unit costs in µs; hop {costs.hop_us:.0f} µs",
            f"{'':<14}{'wake':>8}{'cold':>8}{'item':>8}{'chunk':>8}",
            *(
                f"{kind:<14}{cost.wake_us:>8.1f}{cost.cold_us:>8.1f}{cost.item_us:>8.1f}{cost.chunk_us:>8.2f}"
                for kind, cost in costs.processes.items()
            ),
        ]
    )


_HEAD = f"{'':<44}{'measured':>13}{'model':>12}{'off':>7}"


def _row(pair: Pair) -> str:
    far = "" if pair.near else "  beyond 20 %"
    return f"{pair.name:<44}{pair.measured:>10,.1f} {pair.unit}{pair.model:>12,.1f}{pair.off:>+7.0%}{far}"
