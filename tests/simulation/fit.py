"""Unit costs from micro-cases, in two steps. Both look at micro-cases alone.

1. By process: least squares over the model's own counts of wake-ups, cold wake-ups, items, chunks and runs. Each
   micro-case is dominated by another of them. Each counts by the share of its CPU that is explained, so that a
   saturated one weighs as much as a slow one. How long a sleep makes a process cold is the one of a few values that
   explains most.
2. For all processes together, from the latency of one run alone at several paces: the hop between two processes, the
   moment at which a turn sends, and how much turns vary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import log

import msgspec

from tests.simulation.costs import Costs, ProcessCost
from tests.simulation.deployment import Deployment, Outcome, Shape, even
from tests.simulation.measurement import Case, Pair

ROUNDS = 3
"""Fit, run the model with what came out, fit again: the counts depend on the costs."""
SWEEPS = 5_000
COLD_S = (0.001, 0.002, 0.003, 0.005, 0.008)
FIRST = ProcessCost(wake_us=200, cold_us=50, item_us=10, chunk_us=5)
FIRST_HOP_US, FIRST_SENT_AT, FIRST_JITTER = 100.0, 0.7, 0.3
FIRST_STEP, STEPS, FINER = 0.5, 7, 0.6
LATEST_SENT = 0.95
PACED_CHUNKS, FULL_CHUNKS = 1_500, 300
"""Of all runs of a paced load, and of each run of a saturated one: enough for a p99, and for a mean."""
LEAST_CHUNKS = 30
FULL_S = 600.0
GATEWAY = "gateway"


def simulated(case: Case, costs: Costs, cores: int, *, reader: str = "subscriber") -> tuple[Deployment, Outcome]:
    """A load on one machine. ``reader``: which kind of process reads the public events."""
    deployment = Deployment(Shape(cores=cores, local=True, subscriber=reader), costs)
    count = min(case.chunks, max(LEAST_CHUNKS, PACED_CHUNKS // case.runs)) if case.pace else FULL_CHUNKS
    load = even(case.runs, case.pace, count)
    deployment.feed(load)
    return deployment, deployment.run(max(load.ends) + 2 if case.pace else FULL_S)


def cpu_of(case: Case, costs: Costs, deployment: Deployment, outcome: Outcome) -> dict[str, float]:
    """Microseconds a chunk by process. A start and an end weigh less than in the model, whose runs are shorter."""
    return {
        kind: (sum(process.used.cpu_s for process in each) * 1e6 / outcome.chunks)
        + costs.processes[kind].run_us / case.chunks
        for kind, each in deployment.kinds.items()
    }


def summed(cpu_us: Mapping[str, float]) -> float:
    """Of all processes on a chunk's way: the mock provider stands for the world outside, a gateway is beside it."""
    return sum(value for name, value in cpu_us.items() if name not in ("provider", GATEWAY))


def fitted(micro: Sequence[Case], cores: int) -> Costs:
    """Both steps."""
    return timed(by_process(micro, cores), micro, cores)


def pairs(cases: Iterable[Case], costs: Costs, cores: int) -> list[Pair]:
    """What the model says of each load. Of a saturated one no latency: it says how long the queue was, not the bus."""
    found: list[Pair] = []
    for case in cases:
        deployment, outcome = simulated(case, costs, cores)
        cpu = summed(cpu_of(case, costs, deployment, outcome))
        found.append(Pair(f"{case.name}: CPU a chunk", "µs", summed(case.cpu_us), cpu))
        if case.pace and case.chunks > 1:
            found.append(Pair(f"{case.name}: latency p50", "ms", case.p50_ms, outcome.wait_ms(0.5)))
            found.append(Pair(f"{case.name}: latency p99", "ms", case.p99_ms, outcome.wait_ms(0.99)))
        if GATEWAY in case.cpu_us:
            deployment, outcome = simulated(case, costs, cores, reader=GATEWAY)
            through = cpu_of(case, costs, deployment, outcome)[GATEWAY]
            found.append(Pair(f"{case.name}: CPU a chunk, gateway", "µs", case.cpu_us[GATEWAY], through))
    return found


# --- by process ------------------------------------------------------------------------------------------------------


def by_process(micro: Sequence[Case], cores: int, tried: Iterable[float] = COLD_S) -> Costs:
    """The costs that explain each process's CPU best. ``tried``: seconds after which a process is cold."""
    return min((_explained(micro, cores, cold_s) for cold_s in tried), key=lambda found: found[1])[0]


def _explained(micro: Sequence[Case], cores: int, cold_s: float) -> tuple[Costs, float]:
    """The costs, and the squares of what they leave unexplained."""
    kinds = {kind for case in micro for kind in case.cpu_us}
    costs = Costs(dict.fromkeys(kinds, FIRST), FIRST_HOP_US, cold_s, FIRST_SENT_AT)
    rest = 0.0
    for _ in range(ROUNDS):
        ran = [(case, *simulated(case, costs, cores)) for case in micro]
        made: dict[str, ProcessCost] = {}
        rest = 0.0
        for kind in kinds:
            rows = [_row(kind, *each) for each in ran if kind in each[0].cpu_us]
            cost = least_squares(rows, [1.0] * len(rows))
            rest += sum((1 - sum(a * b for a, b in zip(row, cost, strict=True))) ** 2 for row in rows)
            made[kind] = ProcessCost(*cost)
        costs = msgspec.structs.replace(costs, processes=made)
    return costs, rest


def _row(kind: str, case: Case, deployment: Deployment, outcome: Outcome) -> list[float]:
    """Counts of everything that costs, for a microsecond of CPU that was measured.

    A gateway reads what a subscriber reads, and was measured beside it.
    """
    used = [process.used for process in deployment.kinds["subscriber" if kind == GATEWAY else kind]]
    counts = [
        sum(each.wakes for each in used),
        sum(each.cold for each in used),
        sum(each.items for each in used),
        sum(each.chunks for each in used),
    ]
    cpu_us = max(case.cpu_us[kind], 0.1)
    return [*(count / outcome.chunks / cpu_us for count in counts), 1 / case.chunks / cpu_us]


def least_squares(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """The non-negative solution, one coordinate after the other until it stands."""
    size = len(rows[0])
    found = [0.0] * size
    norms = [sum(row[i] ** 2 for row in rows) for i in range(size)]
    rest = list(wanted)
    for _ in range(SWEEPS):
        before = list(found)
        for i in range(size):
            if not norms[i]:
                continue
            step = sum(row[i] * r for row, r in zip(rows, rest, strict=True)) / norms[i]
            change = max(0.0, found[i] + step) - found[i]
            if change:
                found[i] += change
                rest = [r - row[i] * change for row, r in zip(rows, rest, strict=True)]
        if all(abs(now - then) <= 1e-7 * now for now, then in zip(found, before, strict=True)):
            break
    return found


# --- in time ---------------------------------------------------------------------------------------------------------


def timed(costs: Costs, micro: Sequence[Case], cores: int) -> Costs:
    """The costs with the times that match the latency of one run alone best, found by ever smaller steps."""
    alone = [case for case in micro if case.runs == 1]
    times = [FIRST_HOP_US, FIRST_SENT_AT, FIRST_JITTER]
    best, step = _late(_with_times(costs, times), alone, cores), FIRST_STEP
    for _ in range(STEPS):
        for place in range(len(times)):
            for by in (1 + step, 1 / (1 + step)):
                tried = [*times]
                tried[place] *= by
                if tried[1] <= LATEST_SENT and (off := _late(_with_times(costs, tried), alone, cores)) < best:
                    best, times = off, tried
        step *= FINER
    return _with_times(costs, times)


def _with_times(costs: Costs, times: Sequence[float]) -> Costs:
    hop_us, sent_at, jitter = times
    return msgspec.structs.replace(costs, hop_us=hop_us, sent_at=sent_at, jitter=jitter)


def _late(costs: Costs, alone: Iterable[Case], cores: int) -> float:
    off = 0.0
    for case in alone:
        _, outcome = simulated(case, costs, cores)
        off += log(outcome.wait_ms(0.5) / case.p50_ms) ** 2 + log(outcome.wait_ms(0.99) / case.p99_ms) ** 2
    return off
