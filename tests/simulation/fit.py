"""Unit costs from micro-cases, in two steps. Both use micro-cases alone.

1. By process: non-negative least squares over the model's own counts of turns, cold turns, items, chunks and runs. A
different count dominates each micro-case. Each is weighted by the explained share of its CPU, so that a saturated one
weighs as much as a slow one. The sleep after which a process is cold is the best of a few values.
2. For all processes together: the hop between two processes, from the median latency of all micro-cases with a pace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import log

import msgspec

from tests.simulation.costs import Costs, ProcessCost
from tests.simulation.deployment import Deployment, Outcome, Shape, even
from tests.simulation.measurement import Case, Pair

SURE = 0.03
"""Weight of the prior for a cost, relative to a micro-case: it decides only what the micro-cases do not determine."""
ROUNDS = 3
"""Number of iterations: fit, run the model with the result, fit again; the counts depend on the costs."""
SWEEPS = 5_000
COLD_S = (0.0015, 0.002, 0.003)
FIRST = ProcessCost(turn_us=100, cold_us=300, item_us=10, chunk_us=5, run_us=1_000)
LIKELY = [
    [SURE / cost if at == place else 0.0 for place in range(5)]
    for at, cost in enumerate(msgspec.structs.astuple(FIRST))
]
"""Rows that say that each cost is about that of `FIRST`."""
FIRST_HOP_US, SHORTEST_HOP_US, LONGEST_HOP_US = 80.0, 20.0, 200.0
STEPS = 4
GOLDEN = 0.618
AFTER_S = 60.0
"""Time for the last chunks."""
GATEWAY = "gateway"


def simulated(case: Case, costs: Costs, cores: int, *, reader: str = "subscriber") -> tuple[Deployment, Outcome]:
    """A load on one machine. ``reader``: the kind of process that reads the public events."""
    deployment = Deployment(Shape(cores=cores, local=True, subscriber=reader), costs)
    load = even(case.runs, case.pace, case.chunks)
    deployment.feed(load)
    return deployment, deployment.run(max(load.ends) + AFTER_S)


def cpu_of(deployment: Deployment, outcome: Outcome) -> dict[str, float]:
    """Microseconds per chunk by process."""
    return {
        kind: sum(process.used.cpu_s for process in each) * 1e6 / outcome.chunks
        for kind, each in deployment.kinds.items()
    }


def summed(cpu_us: Mapping[str, float]) -> float:
    """The sum of all processes on the path of a chunk. The mock provider stands for the outside world; a gateway is
    beside the path.
    """
    return sum(value for name, value in cpu_us.items() if name not in ("provider", GATEWAY))


def fitted(micro: Sequence[Case], cores: int) -> Costs:
    """Both steps."""
    return timed(by_process(micro, cores), micro, cores)


def pairs(cases: Iterable[Case], costs: Costs, cores: int) -> list[Pair]:
    """The model's values for each load. A saturated load has no latency: it would show the length of the queue, not the
    bus.
    """
    found: list[Pair] = []
    for case in cases:
        deployment, outcome = simulated(case, costs, cores)
        cpu = summed(cpu_of(deployment, outcome))
        found.append(Pair(f"{case.name}: CPU a chunk", "µs", summed(case.cpu_us), cpu))
        if case.pace and case.chunks > 1:
            found.append(Pair(f"{case.name}: latency p50", "ms", case.p50_ms, outcome.wait_ms(0.5)))
            found.append(Pair(f"{case.name}: latency p99", "ms", case.p99_ms, outcome.wait_ms(0.99)))
        if GATEWAY in case.cpu_us:
            deployment, outcome = simulated(case, costs, cores, reader=GATEWAY)
            through = cpu_of(deployment, outcome)[GATEWAY]
            found.append(Pair(f"{case.name}: CPU a chunk, gateway", "µs", case.cpu_us[GATEWAY], through))
    return found


# --- by process ------------------------------------------------------------------------------------------------------


def by_process(micro: Sequence[Case], cores: int, tried: Iterable[float] = COLD_S) -> Costs:
    """The costs that explain each process's CPU best. ``tried``: candidate seconds after which a process is cold."""
    return min((_explained(micro, cores, cold_s) for cold_s in tried), key=lambda found: found[1])[0]


def _explained(micro: Sequence[Case], cores: int, cold_s: float) -> tuple[Costs, float]:
    """The costs, and the squares of the unexplained rest."""
    kinds = {kind for case in micro for kind in case.cpu_us}
    costs = Costs(dict.fromkeys(kinds, FIRST), FIRST_HOP_US, cold_s)
    rest = 0.0
    for _ in range(ROUNDS):
        ran = [(case, *simulated(case, costs, cores)) for case in micro]
        made: dict[str, ProcessCost] = {}
        rest = 0.0
        for kind in kinds:
            rows = [_row(kind, *each) for each in ran if kind in each[0].cpu_us]
            cost = least_squares([*rows, *LIKELY], [1.0] * len(rows) + [SURE] * len(LIKELY))
            rest += sum((1 - sum(a * b for a, b in zip(row, cost, strict=True))) ** 2 for row in rows)
            made[kind] = ProcessCost(*cost)
        costs = msgspec.structs.replace(costs, processes=made)
    return costs, rest


def _row(kind: str, case: Case, deployment: Deployment, outcome: Outcome) -> list[float]:
    """The counts of everything that costs, per measured microsecond of CPU.

    A gateway reads what a subscriber reads, and was measured beside it.
    """
    used = [process.used for process in deployment.kinds["subscriber" if kind == GATEWAY else kind]]
    counts = [
        sum(each.turns for each in used),
        sum(each.cold for each in used),
        sum(each.items for each in used),
        sum(each.chunks for each in used),
    ]
    cpu_us = max(case.cpu_us[kind], 0.1)
    return [*(count / outcome.chunks / cpu_us for count in counts), 1 / case.chunks / cpu_us]


def least_squares(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """The non-negative solution, one coordinate after the other until it converges."""
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
    """The costs with the hop that matches the median latencies best, by golden-section search."""
    paced = [case for case in micro if case.pace]

    def late(hop_us: float) -> float:
        tried = msgspec.structs.replace(costs, hop_us=hop_us)
        return sum(log(simulated(case, tried, cores)[1].wait_ms(0.5) / case.p50_ms) ** 2 for case in paced)

    low, high = SHORTEST_HOP_US, LONGEST_HOP_US
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    off_left, off_right = late(left), late(right)
    for _ in range(STEPS):
        if off_left < off_right:
            high, right, off_right = right, left, off_left
            left = high - GOLDEN * (high - low)
            off_left = late(left)
        else:
            low, left, off_left = left, right, off_right
            right = low + GOLDEN * (high - low)
            off_right = late(right)
    return msgspec.structs.replace(costs, hop_us=left if off_left < off_right else right)
