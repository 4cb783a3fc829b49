"""Unit costs from measured CPU, in two steps.

1. By process: least squares over the counts of wake-ups, items and chunks of each measured load. Wake-ups are measured,
   items and chunks are the model's own counts. Each load counts by the share of its CPU that is explained, so that a
   saturated one weighs as much as a slow one. This works on a busy machine, because CPU and wake-ups are a process's
   own. How long processes waited for cores there is measured, and slows the model down as much.
2. To the small case of a quiet machine: four numbers for all processes together. A wake-up, what is added after a long
   sleep, an item, and the hop between two processes. What a chunk costs stays, for that is what large batches cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log

import msgspec

from tests.simulation.costs import Costs, ProcessCost
from tests.simulation.deployment import Deployment, Outcome, Shape, even
from tests.simulation.measurement import Case, Small, SmallFigure

ROUNDS = 4
"""Fit, run the model with what came out, fit again: the counts depend on the costs."""
SWEEPS = 2_000
FIRST = ProcessCost(wake_us=200, cold_us=0, item_us=20, chunk_us=10)
FIRST_FACTORS = (0.8, 1.6, 0.2, 150.0)
FIRST_STEP, STEPS, FINER = 0.3, 10, 0.8
PACED_CHUNKS, FULL_CHUNKS = 60, 500
"""Of each run, enough for a mean; the measurement had more."""
FULL_S = 600.0


def simulated(runs: int, pace: float, costs: Costs, *, cores: int, waited: float = 0.0) -> tuple[Deployment, Outcome]:
    """A load on one machine. ``waited``: for cores that other programs use, as a share of CPU."""
    deployment = Deployment(Shape(cores=None if waited else cores, local=True, slowed=1 + waited), costs)
    load = even(runs, pace, PACED_CHUNKS if pace else FULL_CHUNKS)
    deployment.feed(load)
    return deployment, deployment.run(max(load.ends) + 2 if pace else FULL_S)


def summed(cpu_us: Mapping[str, float]) -> float:
    """Of all processes on a chunk's way: the mock provider stands for the world outside."""
    return sum(value for name, value in cpu_us.items() if name != "provider")


def fitted(cases: Sequence[Case], small: Small) -> tuple[Costs, Costs]:
    """Both steps; and the same with the items of the first."""
    first = by_process(cases)
    both = matched(first, small)
    return both, with_items(both, first)


def with_items(costs: Costs, other: Costs) -> Costs:
    """The costs with the items of others."""
    made = {
        kind: msgspec.structs.replace(each, item_us=other.processes[kind].item_us)
        for kind, each in costs.processes.items()
    }
    return Costs(processes=made, hop_us=costs.hop_us)


# --- by process ------------------------------------------------------------------------------------------------------


def by_process(cases: Sequence[Case]) -> Costs:
    """The costs that explain each process's CPU best."""
    kinds = list(cases[0].cpu_us)
    costs = Costs(processes=dict.fromkeys(kinds, FIRST), hop_us=FIRST_FACTORS[-1])
    for _ in range(ROUNDS):
        ran = [(case, *simulated(case.runs, case.pace, costs, cores=1, waited=case.waited)) for case in cases]
        made = {kind: _cost([_row(kind, *each) for each in ran]) for kind in kinds}
        costs = Costs(processes=made, hop_us=costs.hop_us)
    return costs


def _row(kind: str, case: Case, deployment: Deployment, outcome: Outcome) -> tuple[list[float], float]:
    """Wake-ups, items and chunks for a chunk that came; and the CPU for it."""
    used = [process.used for process in deployment.kinds[kind]]
    counts = [sum(each.items for each in used) / outcome.chunks, sum(each.chunks for each in used) / outcome.chunks]
    return [case.wakes[kind], *counts], case.cpu_us[kind]


def _cost(rows: Sequence[tuple[list[float], float]]) -> ProcessCost:
    wake, item, chunk = least_squares([[count / cpu for count in counts] for counts, cpu in rows], [1.0] * len(rows))
    return ProcessCost(wake_us=wake, cold_us=0.0, item_us=item, chunk_us=chunk)


def least_squares(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """The non-negative solution, one coordinate after the other until it stands."""
    size = len(rows[0])
    found = [0.0] * size
    norms = [sum(row[i] ** 2 for row in rows) for i in range(size)]
    rest = list(wanted)
    for _ in range(SWEEPS):
        for i in range(size):
            if not norms[i]:
                continue
            step = sum(row[i] * r for row, r in zip(rows, rest, strict=True)) / norms[i]
            change = max(0.0, found[i] + step) - found[i]
            if change:
                found[i] += change
                rest = [r - row[i] * change for row, r in zip(rows, rest, strict=True)]
    return found


# --- to the small case -----------------------------------------------------------------------------------------------


def modelled(figure: SmallFigure, costs: Costs, cores: int) -> float:
    """What the model says of a figure."""
    _, outcome = simulated(figure.runs, figure.pace, costs, cores=cores)
    return summed(outcome.cpu_us) if figure.what == "CPU a chunk" else outcome.wait_ms(0.5)


def matched(costs: Costs, small: Small) -> Costs:
    """The costs times the factors that match the small case best, found by ever smaller steps."""
    factors = list(FIRST_FACTORS)
    best, step = _off(_times(costs, factors), small), FIRST_STEP
    for _ in range(STEPS):
        for place in range(len(factors)):
            for by in (1 + step, 1 / (1 + step)):
                tried = [*factors]
                tried[place] *= by
                if (off := _off(_times(costs, tried), small)) < best:
                    best, factors = off, tried
        step *= FINER
    return _times(costs, factors)


def _times(costs: Costs, factors: Sequence[float]) -> Costs:
    wake, cold, item, hop_us = factors
    return Costs(
        processes={
            kind: ProcessCost(
                wake_us=each.wake_us * wake,
                cold_us=each.wake_us * wake * cold,
                item_us=each.item_us * item,
                chunk_us=each.chunk_us,
            )
            for kind, each in costs.processes.items()
        },
        hop_us=hop_us,
    )


def _off(costs: Costs, small: Small) -> float:
    return sum(log(modelled(figure, costs, small.cores) / figure.value) ** 2 for figure in small.figures)
