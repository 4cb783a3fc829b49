"""`python -m tests.simulation.calibrate`: measures the small case with the real services, and fits the unit costs.

CPU and wake-ups are each process's own, so a busy machine serves for the unit costs. Each load is measured several
times, and the time with the least waiting for a core counts. If other programs used little of the machine, its loads
become the small case too; otherwise the small case that is stored stays.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from tests.bench.jobs import Load
from tests.bench.measure import Meter
from tests.bench.procs import cpu_s
from tests.bench.stack import running
from tests.simulation.compare import report
from tests.simulation.fit import fitted, summed
from tests.simulation.measurement import STORED, Case, Measured, Small, SmallFigure, store, stored

WARM = Load(8, 50, 50)
LOADS = (
    Load(1, 300, 100),
    Load(2, 200, 50),
    Load(16, 200, 50),
    Load(20, 200, 50),
    Load(64, 150, 50),
    Load(64, 800),
    Load(16, 1600),
)
SMALL = (LOADS[0], LOADS[2], LOADS[5]), (LOADS[1], LOADS[3])
"""What the small case consists of: CPU of these, median latency of those."""
QUIET = 0.1
"""Share of the machine that other programs may use for its loads to count as the small case."""
KINDS = ("provider", "fetcher", "normalizer", "parser", "server", "subscriber")
ROUNDS = 3
IDLE_S = 6.0


class _Counters(msgspec.Struct, frozen=True):
    at: float
    cpu: dict[str, float]
    wakes: dict[str, int]
    waited: float
    busy: float


def main() -> None:
    """Measure, fit, store, compare."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.calibrate", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--refit", action="store_true", help="measure nothing; fit the costs to what is stored")
    parser.add_argument("--to", type=Path, default=STORED, help="where to store it")
    options = parser.parse_args()
    if options.refit:
        before = stored(options.to)
        costs, separate = fitted(before.cases, before.small)
        measured = msgspec.structs.replace(before, costs=costs, separate=separate)
    else:
        measured = _measure_all(options.rounds)
    store(measured, options.to)
    print(report(measured))


def _measure_all(rounds: int) -> Measured:
    before = os.getloadavg()[0]
    cores = os.cpu_count() or 1
    with running([WARM, *LOADS]) as stack:
        pids = {kind: stack.pids[kind] for kind in KINDS}
        meter = Meter(stack)
        meter.services(WARM)
        idle = _idle(pids)
        found: dict[Load, list[Case]] = {}
        for number in range(rounds):
            for load in LOADS:
                print(f"round {number + 1}: {load.name}, {load.runs} runs", flush=True)
                found.setdefault(load, []).append(_measured(meter, pids, load, idle))
        server = stack.server
    best = {load: min(each, key=lambda case: case.waited) for load, each in found.items()}
    cases = list(best.values())
    small = stored().small if max(case.foreign for case in cases) > QUIET else _small(best, cores)
    costs, separate = fitted(cases, small)
    return Measured(
        date=datetime.now(UTC).date().isoformat(),
        machine=f"{cores} cores, {_processor()}, Python {platform.python_version()}, {server}",
        load=(before, os.getloadavg()[0]),
        cores=cores,
        idle=idle,
        cases=cases,
        small=small,
        costs=costs,
        separate=separate,
    )


def _small(best: dict[Load, Case], cores: int) -> Small:
    by_cpu, by_latency = SMALL
    figures = [
        SmallFigure(runs=load.runs, pace=load.pace, what="CPU a chunk", value=summed(best[load].cpu_us))
        for load in by_cpu
    ]
    figures += [
        SmallFigure(runs=load.runs, pace=load.pace, what="latency p50", value=best[load].p50_ms) for load in by_latency
    ]
    return Small(source=f"measured with the unit costs, {datetime.now(UTC).date()}", cores=cores, figures=figures)


def _idle(pids: dict[str, int]) -> dict[str, float]:
    first = _counters(pids)
    time.sleep(IDLE_S)
    last = _counters(pids)
    return {kind: (last.cpu[kind] - first.cpu[kind]) / (last.at - first.at) for kind in pids}


def _measured(meter: Meter, pids: dict[str, int], load: Load, idle: dict[str, float]) -> Case:
    first = _counters(pids)
    sample = meter.services(load)
    last = _counters(pids)
    seconds = last.at - first.at
    spent = {kind: last.cpu[kind] - first.cpu[kind] for kind in pids}
    everything = (last.busy - first.busy) / seconds / (os.cpu_count() or 1)
    return Case(
        runs=load.runs,
        pace=load.pace,
        chunks=load.chunks,
        per_second=sample.per_second(),
        p50_ms=sample.latency_ms(0.5),
        p99_ms=sample.latency_ms(0.99),
        cpu_us={kind: max(0.0, s - idle[kind] * seconds) * 1e6 / sample.chunks for kind, s in spent.items()},
        wakes={kind: (last.wakes[kind] - first.wakes[kind]) / sample.chunks for kind in pids},
        waited=(last.waited - first.waited) / sum(spent.values()),
        foreign=max(0.0, everything - sum(spent.values()) / seconds / (os.cpu_count() or 1)),
    )


def _counters(pids: dict[str, int]) -> _Counters:
    return _Counters(
        at=time.monotonic(),
        cpu={kind: cpu_s(pid) for kind, pid in pids.items()},
        wakes={kind: _wakes(pid) for kind, pid in pids.items()},
        waited=sum(_waited_s(pid) for pid in pids.values()),
        busy=_busy_s(),
    )


def _wakes(pid: int) -> int:
    """Voluntary switches so far: how often its main thread slept (proc(5))."""
    found = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def _waited_s(pid: int) -> float:
    """Time that its main thread was ready and waited for a core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def _busy_s() -> float:
    """Seconds that all cores together were busy."""
    numbers = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(numbers) - numbers[3] - numbers[4]) / os.sysconf("SC_CLK_TCK")


def _processor() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1].strip() if found else platform.machine()


if __name__ == "__main__":
    main()
