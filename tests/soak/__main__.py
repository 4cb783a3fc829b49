"""`python -m tests.soak [--seconds N] [--share S] [--keep FILE]`. Exit code 1 if something grew or was left behind."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from tests.soak.judging import Finding, Unit
from tests.soak.soak import Plan, Result, soak


def main() -> None:
    """Run the soak for this time, print the table, and exit with the verdict."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description="Check that nothing grows under an even load."
    )
    parser.add_argument("--seconds", type=float, default=1800.0, help="under load (1800)")
    parser.add_argument("--share", type=float, default=0.5, help="share of the machine's maximum rate (0.5)")
    parser.add_argument("--keep", type=Path, help="file for all measurements, as JSON")
    options = parser.parse_args()
    plan = Plan(
        seconds=options.seconds,
        share=options.share,
        calibrate_s=min(30.0, options.seconds / 10),
        keep_s=min(60.0, options.seconds / 10),
    )
    with (
        tempfile.TemporaryDirectory(prefix="tokenbus-soak-") as directory,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        try:
            result = runner.run(soak(plan, Path(directory)))
        except KeyboardInterrupt:
            sys.exit(130)
    if options.keep:
        options.keep.write_bytes(msgspec.json.encode(result))
    show(result)
    sys.exit(not result.passed)


def show(result: Result) -> None:
    table = Table(title="growth over the time that is judged, the later 70 %", title_justify="left")
    for column in ("", "median", "highest", "grew", "allowed", ""):
        table.add_column(column, justify="right" if column else "left")
    for finding in result.findings:
        table.add_row(*_row(finding), style=None if finding.flat else "red")
    console = Console(width=None if os.isatty(1) else 120)
    console.print(table)
    ends = ", ".join(f"{count} {how}" for how, count in sorted(result.outcomes.items()))
    console.print(f"{result.runs} runs ({ends}); {result.saturated:.1f} a second at the most")
    for what, items in (("left", result.left), ("logged", result.complaints), ("not ended", result.unended)):
        for item in items[:20]:
            console.print(f"{what}: {item}", markup=False)
    console.print("passed: all is flat" if result.passed else "NOT PASSED")


def _row(finding: Finding) -> tuple[str, ...]:
    amounts = (finding.middle, finding.highest, finding.grew, finding.allowed)
    return finding.name, *(_amount(a, finding.unit) for a in amounts), "flat" if finding.flat else "GROWS"


def _amount(value: float, unit: Unit) -> str:
    return f"{value / 2**20:,.1f} MiB" if unit in ("bytes", "level") else f"{value:,.0f}"


if __name__ == "__main__":
    main()
