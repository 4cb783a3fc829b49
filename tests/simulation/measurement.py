"""What was measured: micro-cases that give the unit costs, and other loads that the model has to predict."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tests.simulation.costs import Costs

STORED = Path(__file__).with_name("measured.json")


def name_of(runs: int, pace: float) -> str:
    """A load, as in the report."""
    count = f"{runs} run{'s' * (runs > 1)}"
    return f"{count}, {pace:g} chunks/s each" if pace else f"{count}, saturated"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One load through the real services, by process: the median of all rounds."""

    runs: int
    pace: float
    """Chunks a second of each run; 0: as fast as it goes."""
    chunks: int
    """Of each run."""
    p50_ms: float
    p99_ms: float
    cpu_us: dict[str, float]
    """A chunk, by process, without what the process uses when it is idle."""

    @property
    def name(self) -> str:
        """As in the report."""
        return name_of(self.runs, self.pace)


class Pair(msgspec.Struct, frozen=True):
    """One figure beside what the model says of it."""

    name: str
    unit: str
    measured: float
    model: float

    @property
    def off(self) -> float:
        """How far the model is from the measurement."""
        return self.model / self.measured - 1


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `calibrate` stores."""

    date: str
    machine: str
    """Cores, kind, Python, server: enough to know what it compares with."""
    load: tuple[float, float]
    """Load average of a minute, before and after."""
    foreign: float
    """Share of the machine that other programs used: in the round that was worst."""
    cores: int
    idle: dict[str, float]
    """Share of a core that each process uses when nothing is sent."""
    micro: list[Case]
    """Give the unit costs."""
    others: list[Case]
    """Are predicted: no cost was fitted to them."""
    costs: Costs
    given_again: list[Pair]
    """The micro-cases, by the costs that were fitted to them."""
    predicted: list[Pair]
    """The others."""


def stored(path: Path = STORED) -> Measured:
    """What was measured last."""
    return msgspec.json.decode(path.read_bytes(), type=Measured)


def store(measured: Measured, path: Path = STORED) -> None:
    """Keep it."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")
