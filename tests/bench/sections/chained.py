"""The three services as one process (`worker pipeline`) and as three, beside the bare chain, in turn in one run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from tests.bench.figures import ROUNDS, WARM, Figure
from tests.bench.jobs import Load
from tests.bench.measure import Meter, Sample
from tests.bench.procs import resident_kb
from tests.bench.stack import PIPELINE, running

ONE = Load(1, 400, 100)
MANY = Load(16, 300, 50)
SLOW = Load(2, 250, 50)
FAST = Load(20, 200, 50)
FULL = Load(64, 800)
LOADS = (ONE, MANY, SLOW, FAST, FULL)
_p50 = partial(Sample.latency_ms, share=0.5)
READINGS: list[tuple[Load, str, str, Callable[[Sample], float], str, float, bool]] = [
    (ONE, "CPU a chunk, 1 run of 100 chunks/s", "µs", Sample.cpu_us, "", 0.0, True),
    (MANY, "CPU a chunk, 16 runs of 50 chunks/s", "µs", Sample.cpu_us, "ratio ≤ 0.4", 0.4, True),
    (SLOW, "added latency p50 at 100 chunks/s", "ms", _p50, "ratio ≤ 0.8", 0.8, True),
    (FAST, "added latency p50 at 1,000 chunks/s", "ms", _p50, "ratio ≤ 1.5", 1.5, True),
    (FULL, "CPU a chunk, saturated, 64 runs", "µs", Sample.cpu_us, "≤ 30 µs", 30.0, False),
]
"""For each: the load, its figures, and the aim of the chained way: a ratio to the bare chain, or a bound."""
START_S = 60.0


def chained() -> list[Figure]:
    """Each load through three processes, through one, and through the bare chain; then the start of `tokenbus up`."""
    samples: dict[tuple[str, Load], list[Sample]] = {}
    with running([WARM, *LOADS]) as apart, running([WARM, *LOADS], services=(PIPELINE,)) as together:
        meters = {"separate": Meter(apart), "chained": Meter(together)}
        for meter in meters.values():
            meter.services(WARM)
        meters["chained"].bare(WARM)
        for _ in range(ROUNDS):
            for load in LOADS:
                for way, meter in meters.items():
                    samples.setdefault((way, load), []).append(meter.services(load))
                samples.setdefault(("bare", load), []).append(meters["chained"].bare(load))
    figures: list[Figure] = []
    for load, name, unit, of, aim, most, by_ratio in READINGS:
        bare = [of(sample) for sample in samples["bare", load]]
        for way in meters:
            values = [of(sample) for sample in samples[way, load]]
            ratio = median(value / beside for value, beside in zip(values, bare, strict=True))
            met = (ratio if by_ratio else median(values)) <= most if aim and way == "chained" else None
            figures.append(
                Figure(
                    name=f"{name}, {way}",
                    unit=unit,
                    value=median(values),
                    bare=median(bare),
                    ratio=ratio,
                    aim=aim if way == "chained" else "",
                    met=met,
                )
            )
    return figures + _starts()


def _starts() -> list[Figure]:
    """Seconds until `tokenbus up` is ready, and the memory of its processes then."""
    found = {
        way: [_up(options) for _ in range(ROUNDS)] for way, options in (("up", ()), ("up --chained", ("--chained",)))
    }
    figures: list[Figure] = []
    for at, (what, unit) in enumerate((("start", "s"), ("memory", "MB"))):
        whole = median(each[at] for each in found["up"])
        for way, each in found.items():
            value = median(one[at] for one in each)
            aim = "half of up's" if way != "up" else ""
            met = value <= whole / 2 if aim else None
            figures.append(Figure(name=f"{what} of `tokenbus {way}`", unit=unit, value=value, aim=aim, met=met))
    return figures


def _up(options: Sequence[str]) -> tuple[float, float]:
    with TemporaryDirectory(prefix="tokenbus-bench-up-") as directory:
        config = Path(directory, "tokenbus.toml")
        ports = "".join(f"{name} = 0\n" for name in ("fetcher", "normalizer", "parser", "pipeline", "tools", "blobs"))
        config.write_text(f'data_dir = "{directory}"\n[http]\n{ports}')
        begin = time.monotonic()
        up = subprocess.Popen(
            [sys.executable, "-m", "tokenbus_services.cli", "up", *options],
            env={**os.environ, "TOKENBUS_CONFIG": str(config)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert up.stdout
            for line in up.stdout:
                if line.strip() == "ready":
                    break
                if time.monotonic() > begin + START_S:
                    raise TimeoutError("`tokenbus up` is not ready")
            return time.monotonic() - begin, sum(map(resident_kb, _family(up.pid))) / 1024
        finally:
            up.terminate()
            up.wait()


def _family(pid: int) -> list[int]:
    """The process and all of its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in _family(int(child)))]
