"""The result of the bench, as a table for people and as JSON for programs."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime

import msgspec

from tests.bench.figures import Figure

_HEAD = ("", "tokenbus", "bare", "ratio", "aim", "")


class Machine(msgspec.Struct, frozen=True):
    """The machine. If its cores were busy before the bench began, all figures are doubtful."""

    cores: int
    python: str
    server: str
    date: str
    load_before: float
    load_after: float


class Report(msgspec.Struct, frozen=True):
    """All figures of a bench."""

    machine: Machine
    seconds: float
    figures: list[Figure]


def machine(server: str, load_before: float) -> Machine:
    today = datetime.now(UTC).date().isoformat()
    return Machine(os.cpu_count() or 0, platform.python_version(), server, today, load_before, os.getloadavg()[0])


def as_json(report: Report) -> str:
    return msgspec.json.format(msgspec.json.encode(report)).decode()


def as_table(report: Report) -> str:
    """Aligned columns, one figure per line."""
    rows = [_HEAD, *(cells(figure) for figure in report.figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = [_line(row, widths) for row in rows]
    m = report.machine
    lines += [
        "",
        "bare: three hops over streams in plain redis-py on the same server, as many processes, one entry an event.",
        "ratio: the median of the rounds, in brackets their quartiles; in the section otel its interval of 95 %.",
        "CPU: user and system time of the services, the server and one subscriber; the provider is shown apart.",
        "commands: a script counts as one command sent; what it calls on the server is shown as inside scripts.",
        f"{m.cores} cores, Python {m.python}, {m.server}; load average {m.load_before:.2f} before and"
        f" {m.load_after:.2f} after; {report.seconds:.0f} s",
    ]
    return "\n".join(lines)


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    """Text to the left, numbers to the right."""
    cells = zip(row, widths, (str.ljust, str.rjust, str.rjust, str.rjust, str.ljust, str.ljust), strict=True)
    return "  ".join(justify(cell, width) for cell, width, justify in cells).rstrip()


def cells(figure: Figure) -> tuple[str, ...]:
    """What a table says of a figure: name, value, bare, ratio, aim, and whether it is met."""
    verdict = "" if figure.met is None else "met" if figure.met else "NOT MET"
    return (
        figure.name,
        _amount(figure.value, figure.unit),
        "" if figure.bare is None else _amount(figure.bare, figure.unit),
        _ratio(figure),
        figure.aim,
        verdict,
    )


def _ratio(figure: Figure) -> str:
    if figure.ratio is None:
        return ""
    if figure.spread is None:
        return f"{figure.ratio:.2f}"
    low, high = figure.spread
    return f"{figure.ratio:.3f} ({low:.3f} to {high:.3f})"


def _amount(value: float, unit: str) -> str:
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}".rstrip()
