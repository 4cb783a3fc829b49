"""`python -m tests.simulation.calibrate`: measures unit costs by micro-cases, then predicts other loads.

The predicted loads are measured in the same rounds, and no cost is fitted to them. All of this takes about five
minutes. It needs a quiet machine, and reports how much of it other programs used. ``--docs`` writes the tables into
docs/operate/scale.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import msgspec

from tests.bench.http_clients import Door
from tests.bench.jobs import Load
from tests.bench.measure import Meter
from tests.bench.sections.gateway import GATEWAY, answered
from tests.bench.stack import PROVIDER, SERVICES, Stack, running
from tests.simulation.compare import report
from tests.simulation.costs import Costs
from tests.simulation.fit import fitted, pairs
from tests.simulation.measurement import STORED, Case, Measured, store, stored
from tests.simulation.pages import write
from tests.simulation.scale import larger, table

WARM = Load(8, 50, 50)
MICRO = (
    Load(1, 500, 100),
    Load(1, 1200, 400),
    Load(1, 2000, 1000),
    Load(64, 300, 150),
    Load(64, 800),
    Load(100, 1, 50),
)
"""These isolate: a turn after a long sleep, a short one, almost none; a run in a batch; a chunk; a run's start and
end.
"""
OTHERS = (Load(2, 300, 50), Load(4, 1000, 250), Load(16, 250, 50), Load(64, 100, 20))
THROUGH_GATEWAY = (*MICRO[:5], OTHERS[2])
"""Measured again with clients of a gateway; the last one is predicted."""
KINDS = ("provider", "fetcher", "normalizer", "parser", "server", "subscriber", GATEWAY)
ROUNDS = 3
IDLE_S = 6.0


class _Counters(msgspec.Struct, frozen=True):
    at: float
    cpu: dict[str, float]
    busy: float
    own: float
    """CPU of the bench itself."""


class _Reading(msgspec.Struct, frozen=True):
    case: Case
    foreign: float


def main() -> None:
    """Measure, fit, predict, store, compare."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.calibrate", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--refit", action="store_true", help="measure nothing; fit the costs to the stored measurement")
    parser.add_argument("--to", type=Path, default=STORED, help="file for the measurement")
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/operate/scale.md")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # as in tests.bench
    if options.refit:
        before = stored(options.to)
        measured = _fit(before)
    else:
        measured = _measure_all(options.rounds)
    store(measured, options.to)
    print(report(measured), flush=True)
    if options.docs:
        print("simulating larger deployments", flush=True)
        _check(measured.costs)
        found = larger(measured.costs)
        print(table(found))
        write(measured, found)


def _check(costs: Costs) -> None:
    """Raises SystemExit if a process has no cost for its chunks: no larger deployment can be computed then."""
    for kind in ("fetcher", "normalizer", "parser", "server"):
        cost = costs.processes[kind]
        if not cost.chunk_us and not cost.item_us:
            raise SystemExit(f"the fit gave the {kind} no cost for a chunk; docs/operate/scale.md was not written")


def _fit(before: Measured) -> Measured:
    """The measurement with fitted costs, and with their predictions."""
    costs = fitted(before.micro, before.cores)
    return msgspec.structs.replace(
        before,
        costs=costs,
        given_again=pairs(before.micro, costs, before.cores),
        predicted=pairs(before.others, costs, before.cores),
    )


def _measure_all(rounds: int) -> Measured:
    before = os.getloadavg()[0]
    cores = os.cpu_count() or 1
    readings: dict[Load, list[_Reading]] = {}
    through: dict[Load, list[float]] = {}
    settings = "[gateway]\nconnections = 4096\n"
    with running([WARM, *MICRO, *OTHERS], services=(*SERVICES, GATEWAY), settings=settings) as stack:
        meter = Meter(stack)
        meter.services(WARM)
        idle = _idle(stack)
        for number in range(rounds):
            for load in (*MICRO, *OTHERS):
                print(f"round {number + 1}: {load.name}, {load.runs} runs", flush=True)
                readings.setdefault(load, []).append(_measured(stack, meter, load, idle))
                if load in THROUGH_GATEWAY:
                    through.setdefault(load, []).append(_of_gateway(stack, load, idle[GATEWAY]))
        server = stack.server
    cases = {load: _median([each.case for each in found], through.get(load)) for load, found in readings.items()}
    micro, others = [cases[load] for load in MICRO], [cases[load] for load in OTHERS]
    print("fitting", flush=True)
    return _fit(
        Measured(
            date=datetime.now(UTC).date().isoformat(),
            machine=f"{cores} cores, {_processor()}, Python {platform.python_version()}, {server}",
            load=(before, os.getloadavg()[0]),
            foreign=max(each.foreign for found in readings.values() for each in found),
            cores=cores,
            idle=idle,
            micro=micro,
            others=others,
            costs=Costs({}, 0.0),
            given_again=[],
            predicted=[],
        )
    )


def _median(found: Sequence[Case], through: Sequence[float] | None) -> Case:
    cpu_us = {kind: median(case.cpu_us[kind] for case in found) for kind in found[0].cpu_us}
    if through:
        cpu_us[GATEWAY] = median(through)
    p50_ms, p99_ms = median(case.p50_ms for case in found), median(case.p99_ms for case in found)
    return msgspec.structs.replace(found[0], p50_ms=p50_ms, p99_ms=p99_ms, cpu_us=cpu_us)


def _idle(stack: Stack) -> dict[str, float]:
    first = _counters(stack.pids)
    time.sleep(IDLE_S)
    last = _counters(stack.pids)
    return {kind: (last.cpu[kind] - first.cpu[kind]) / (last.at - first.at) for kind in KINDS}


def _measured(stack: Stack, meter: Meter, load: Load, idle: Mapping[str, float]) -> _Reading:
    first = _counters(stack.pids)
    sample = meter.services(load)
    last = _counters(stack.pids)
    seconds = last.at - first.at
    spent = {kind: last.cpu[kind] - first.cpu[kind] for kind in KINDS}
    cores = os.cpu_count() or 1
    ours = sum(spent.values()) + last.own - first.own
    case = Case(
        runs=load.runs,
        pace=load.pace,
        chunks=load.chunks,
        p50_ms=sample.latency_ms(0.5),
        p99_ms=sample.latency_ms(0.99),
        cpu_us={
            kind: max(0.0, s - idle[kind] * seconds) * 1e6 / sample.chunks
            for kind, s in spent.items()
            if kind != GATEWAY
        },
    )
    return _Reading(case, max(0.0, (last.busy - first.busy - ours) / seconds / cores))


def _of_gateway(stack: Stack, load: Load, idle: float) -> float:
    """CPU of the gateway per chunk, in microseconds, with one client per run."""
    first = _counters(stack.pids)
    answered(Door(f"{stack.urls[GATEWAY]}/v1"), f"{PROVIDER}/{load.name}", load)
    last = _counters(stack.pids)
    spent = last.cpu[GATEWAY] - first.cpu[GATEWAY] - idle * (last.at - first.at)
    return max(0.0, spent) * 1e6 / load.total


def _counters(pids: Mapping[str, int]) -> _Counters:
    return _Counters(time.monotonic(), {kind: _cpu_s(pids[kind]) for kind in KINDS}, _busy_s(), time.process_time())


def _cpu_s(pid: int) -> float:
    """CPU of all its threads so far, to the nanosecond (the kernel's sched-stats.rst)."""
    return (
        sum(int(Path(task, "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9
    )


def _busy_s() -> float:
    """Busy seconds of all cores together."""
    numbers = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(numbers) - numbers[3] - numbers[4]) / os.sysconf("SC_CLK_TCK")


def _processor() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1].strip() if found else platform.machine()


if __name__ == "__main__":
    main()
