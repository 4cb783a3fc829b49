"""Shows findings: as a table, as lines or as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from tokenbus_services.cli.doctor.checks import Finding
from tokenbus_services.cli.render import terminal


def show(findings: list[Finding], *, as_json: bool) -> None:
    """Show the findings."""
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode())
    elif console := terminal.console():
        console.print(_table(findings))
    else:
        for line in lines(findings):
            print(terminal.safe(line))


def lines(findings: list[Finding]) -> Iterator[str]:
    """Yield a line per finding, and one for what to do."""
    for finding in findings:
        yield f"{finding.level:5} {finding.about}: {finding.says}"
        if finding.todo:
            yield f"      → {finding.todo}"


def _table(findings: list[Finding]) -> Any:
    from rich.table import Table
    from rich.text import Text

    signs = {"ok": ("✓", "green"), "note": ("•", "yellow"), "wrong": ("✗", "bold red")}
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        sign, style = signs[finding.level]
        says = Text(terminal.safe(finding.says))
        if finding.todo:
            says.append(f"\n{finding.todo}", style="cyan")
        table.add_row(Text(sign, style=style), Text(finding.about, style="bold"), says)
    return table
