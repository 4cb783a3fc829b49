"""The table of figures in the README, which `make bench README=1` measures and writes: no number there is by hand."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path

from tests.bench.figures import Figure
from tests.bench.report import Report, cells

PAGE = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- figures: make bench README=1 -->\n", "<!-- /figures -->\n"
HEAD = "| | tokenbus | bare | ratio | aim |\n|---|---|---|---|---|\n"
SHOWN: dict[str, tuple[str, ...]] = {
    "chained": (
        "added latency p50 at 100 chunks/s, *",
        "added latency p50 at 1,000 chunks/s, *",
        "CPU a chunk, 16 runs of 50 chunks/s, *",
        "CPU a chunk, saturated, 64 runs, *",
        "start of *",
        "memory of `*",
    ),
    "commands": ("commands sent a chunk at 5,000 chunks/s",),
    "idle": ("CPU of an idle *",),
    "cancel": ("cancel to the provider's socket p99, *",),
    "intake": ("cancel to the provider's socket p99, *", "first call of a tenant, *"),
    "policy": ("added latency of an idle policy stage, p50 *",),
    "gateway": (
        "*: request to first chunk p50, *",
        "gateway: added latency p50, *",
        "gateway: CPU a chunk, *",
        "gateway: memory of an idle stream, *",
    ),
    "sessions": (
        "session: message to first chunk p50; *",
        "session: memory at the server of *",
    ),
    "disconnect": ("disconnect to the provider's socket, *, p99",),
    "hands": ("connections of *", "memory of a follower, *", "a test with *"),
}
"""For each section of the bench: the figures that the README shows. A `*` stands for any text."""


def of_readme(figures: Sequence[Figure]) -> list[Figure]:
    """The figures to show, in the order of their patterns. Raises `LookupError` for a pattern without a figure."""
    shown: list[Figure] = []
    for pattern in dict.fromkeys(chain.from_iterable(SHOWN.values())):
        found = [figure for figure in figures if fnmatchcase(figure.name, pattern)]
        if not found:
            raise LookupError(f"no figure is named {pattern!r}")
        shown += found
    return shown


def table(report: Report) -> str:
    """The table in Markdown, with the machine below it."""
    rows = (cells(figure) for figure in of_readme(report.figures))
    lines = (
        f"| {name} | {value} | {bare} | {ratio} | {_aim(aim, met)} |\n" for name, value, bare, ratio, aim, met in rows
    )
    m = report.machine
    where = f"{m.date}, {m.cores} cores, Python {m.python}, {m.server}; load average {m.load_before:.1f} before.\n"
    return f"{HEAD}{''.join(lines)}\n{where}"


def write(report: Report) -> None:
    """Replace the README's table."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(report)}\n{END}{rest.partition(END)[2]}")


def _aim(aim: str, met: str) -> str:
    return f"{aim}, {met.lower()}" if aim else ""
