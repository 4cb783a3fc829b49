"""What was measured: the small case on a quiet machine, and by load what each process used."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from tests.simulation.costs import Costs

STORED = Path(__file__).with_name("measured.json")


def name_of(runs: int, pace: float) -> str:
    """A load, as in the report."""
    count = f"{runs} run{'s' * (runs > 1)}"
    return f"{count}, {pace:g} chunks/s each" if pace else f"{count}, saturated"


class SmallFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of the small case."""

    runs: int
    pace: float
    """Chunks a second of each run; 0: as fast as it goes."""
    what: Literal["CPU a chunk", "latency p50"]
    value: float
    """In microseconds, of all processes on a chunk's way; or in milliseconds."""


class Small(msgspec.Struct, frozen=True, kw_only=True):
    """The small case, on a machine that did nothing else."""

    source: str
    """When and how it was measured."""
    cores: int
    figures: list[SmallFigure]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One load through the real services, by process."""

    runs: int
    pace: float
    chunks: int
    """Of each run."""
    per_second: float
    p50_ms: float
    p99_ms: float
    cpu_us: dict[str, float]
    """A chunk, by process, without what the process uses when it is idle."""
    wakes: dict[str, float]
    """A chunk, by process: how often it slept and was woken."""
    waited: float
    """Time in which these processes were ready and waited for a core, as a share of their CPU."""
    foreign: float
    """Share of the machine that other programs used meanwhile."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `calibrate` stores."""

    date: str
    machine: str
    """Cores, kind, Python, server: enough to know what it compares with."""
    load: tuple[float, float]
    """Load average of a minute, before and after."""
    cores: int
    idle: dict[str, float]
    """Share of a core that each process uses when nothing is sent."""
    cases: list[Case]
    small: Small
    costs: Costs
    separate: Costs
    """The same with items as the processes measured alone say, before they were matched to the small case. One server
    takes the scripts of all partitions as one command; a Cluster takes a command for each, which costs more.
    """


def stored(path: Path = STORED) -> Measured:
    """What was measured last."""
    return msgspec.json.decode(path.read_bytes(), type=Measured)


def store(measured: Measured, path: Path = STORED) -> None:
    """Keep it."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")
