"""The measurement: micro-cases that give the unit costs, and other loads that the model has to predict."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tests.simulation.costs import Costs

STORED = Path(__file__).with_name("measured.json")


def name_of(runs: int, pace: float) -> str:
    """The name of a load in the report."""
    count = f"{runs} run{'s' * (runs > 1)}"
    return f"{count}, {pace:g} chunks/s each" if pace else f"{count}, saturated"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One load through the real services, by process: the median of all rounds."""

    runs: int
    pace: float
    """Chunks a second of each run; 0: as fast as possible."""
    chunks: int
    """Chunks of each run."""
    p50_ms: float
    p99_ms: float
    cpu_us: dict[str, float]
    """CPU per chunk, by process, without the idle CPU of the process."""

    @property
    def name(self) -> str:
        return name_of(self.runs, self.pace)


class Pair(msgspec.Struct, frozen=True):
    """One figure beside the model's value."""

    name: str
    unit: str
    measured: float
    model: float

    @property
    def off(self) -> float:
        """Relative distance of the model from the measurement."""
        return self.model / self.measured - 1


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `calibrate` stores."""

    date: str
    machine: str
    """Cores, kind, Python, server: enough to judge a comparison."""
    load: tuple[float, float]
    """Load average over one minute, before and after."""
    foreign: float
    """Share of the machine that other programs used, in the worst round."""
    cores: int
    idle: dict[str, float]
    """Share of a core that each process uses without load."""
    micro: list[Case]
    """These give the unit costs."""
    others: list[Case]
    """These are predicted: no cost was fitted to them."""
    costs: Costs
    given_again: list[Pair]
    """The model's values for the micro-cases."""
    predicted: list[Pair]
    """The model's values for the others."""


def stored(path: Path = STORED) -> Measured:
    return msgspec.json.decode(path.read_bytes(), type=Measured)


def store(measured: Measured, path: Path = STORED) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")
