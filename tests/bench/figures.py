"""The figures of `make bench`, and their aims: the first aims of the project, on a machine with two cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import msgspec

from tests.bench.in_process.chunk_path import measured_path
from tests.bench.in_process.decode import DIALECTS, decoding
from tests.bench.in_process.prefill import reading
from tests.bench.in_process.redact import redacting
from tests.bench.jobs import Load
from tests.bench.measure import SERVICES_COUNTED, Meter, Sample

ROUNDS = 3
"""Number of rounds; in each, the services and the bare chain run in turn. The medians are reported."""
IDLE_S = 10.0
WARM = Load(8, 50, 50)
PREFILL_PIECES = 250_000
"""Pieces of four characters that a reader of prefill text must process in a second."""


class Figure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the report."""

    name: str
    unit: str
    value: float
    bare: float | None = None
    ratio: float | None = None
    """Ratio of value to bare: the median of the rounds' ratios, so a busy moment of the machine affects both."""
    spread: tuple[float, float] | None = None
    """Lower and upper quartile of the rounds' ratios, or as the section states."""
    aim: str = ""
    met: bool | None = None


class Reading(msgspec.Struct, frozen=True):
    """A figure that is computed from a load."""

    name: str
    unit: str
    of: Callable[[Sample], float]
    most: float | None = None
    most_ratio: float | None = None
    bare: bool = True
    """Whether the bare chain has this figure too."""

    def figure(self, rounds: Sequence[tuple[Sample, Sample]]) -> Figure:
        """The figure of all rounds; each round has a sample of the services and one of the bare chain."""
        value = median(self.of(services) for services, _ in rounds)
        if not self.bare:
            return Figure(name=self.name, unit=self.unit, value=value)
        bare = median(self.of(chain) for _, chain in rounds)
        ratio = median(self.of(services) / self.of(chain) for services, chain in rounds)
        aim, met = "", None
        if self.most is not None:
            aim, met = f"≤ {self.most:g} {self.unit}".rstrip(), value <= self.most
        elif self.most_ratio is not None:
            aim, met = f"ratio ≤ {self.most_ratio:g}", ratio <= self.most_ratio
        return Figure(name=self.name, unit=self.unit, value=value, bare=bare, ratio=ratio, aim=aim, met=met)


class Section(msgspec.Struct, frozen=True):
    load: Load
    readings: list[Reading]


def _latency(rate: str) -> list[Reading]:
    p50, p99 = (partial(Sample.latency_ms, share=share) for share in (0.5, 0.99))
    return [
        Reading(f"added latency p50 at {rate} chunks/s", "ms", p50, most_ratio=1.5),
        Reading(f"added latency p99 at {rate} chunks/s", "ms", p99),
    ]


def _cpu(load: str, most: float) -> list[Reading]:
    return [
        Reading(f"CPU a chunk, {load}", "µs", Sample.cpu_us, most=most),
        *(
            Reading(f"  {name}", "µs", partial(Sample.cpu_us_of, name=name), bare=False)
            for name in (*SERVICES_COUNTED, "provider")
        ),
    ]


SECTIONS: dict[str, Section] = {
    "latency-100": Section(Load(2, 250, 50), _latency("100")),
    "latency-1000": Section(Load(20, 200, 50), _latency("1,000")),
    "saturation": Section(
        Load(64, 800),
        [Reading("chunks a second, saturated, 64 runs", "/s", Sample.per_second), *_cpu("saturated, 64 runs", 60)],
    ),
    "streams": Section(Load(16, 300, 50), _cpu("16 runs of 50 chunks/s", 700)),
    "commands": Section(
        Load(50, 400, 100),
        [
            Reading("commands sent a chunk at 5,000 chunks/s", "", Sample.sent_per_chunk, most=0.5),
            Reading("  called inside scripts", "", Sample.inside_per_chunk, bare=False),
            Reading("  chunks a second that came", "/s", Sample.per_second),
        ],
    ),
}
NAMES = (*SECTIONS, "idle")


def measured(meter: Meter, name: str) -> list[Figure]:
    """Measure one section on a running stack."""
    if name == "idle":
        return _idle(meter)
    section = SECTIONS[name]
    rounds = [(meter.services(section.load), meter.bare(section.load)) for _ in range(ROUNDS)]
    return [reading.figure(rounds) for reading in section.readings]


def _idle(meter: Meter) -> list[Figure]:
    return [
        Figure(name=f"CPU of an idle {name}", unit="%", value=percent, aim="≤ 1 %", met=percent <= 1)
        for name, percent in meter.idle(IDLE_S).items()
    ]


def walked() -> list[Figure]:
    """A chunk's way through a pipeline worker, in one process."""
    return [Figure(name=name, unit=unit, value=value) for name, unit, value in measured_path()]


def decoded() -> list[Figure]:
    """Measure the decoders and the reader of prefill text alone, without a process."""
    figures: list[Figure] = []
    for api in DIALECTS:
        ours, bare = decoding(api)
        name = f"chunks a second decoded, {api}"
        figures.append(Figure(name=name, unit="/s", value=ours, bare=bare, ratio=ours / bare))
        ours, bare = redacting(api)
        name = f"  with its secrets looked for, {api}"
        figures.append(Figure(name=name, unit="/s", value=ours, bare=bare, ratio=ours / bare))
    for size, name in ((64 * 2**10, "64 KB"), (2**20, "1 MB")):
        value = reading(size)
        aim, met = f"≥ {PREFILL_PIECES:,} /s", value >= PREFILL_PIECES
        figures.append(
            Figure(name=f"pieces a second read in prefill, {name}", unit="/s", value=value, aim=aim, met=met)
        )
    return figures
