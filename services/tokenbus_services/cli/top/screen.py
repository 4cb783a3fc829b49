"""The live view of `tokenbus top` on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tokenbus.errors import ServerUnavailable
from tokenbus_services.cli.render.event_text import per_second, size
from tokenbus_services.cli.render.output import safe
from tokenbus_services.cli.top.figures import Sample, describe_lag, totals, troubles
from tokenbus_services.runtime.deployment_snapshot import GroupFacts, StageFacts

NARROW = 90
"""Terminal width in columns below which worker names are omitted."""
AROUND = 17
"""Screen lines used for totals, server, queues and headings."""


class TopScreen:
    """Takes over the whole screen until it is closed."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._last: Sample | None = None
        self._live = Live(Text("looking …"), console=console, screen=True, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, found: Sample | ServerUnavailable) -> None:
        """Show the sample. If the server is unavailable, the last sample stays."""
        if isinstance(found, Sample):
            self._last = found
        parts = [self._heading(found)]
        if look := self._last:
            rows = max(3, self._console.height - AROUND - len(look.nodes) - len(list(troubles(look.trouble))))
            parts += screen_parts(look, rows=rows, narrow=self._console.width < NARROW)
        self._live.update(Group(*parts), refresh=True)

    def _heading(self, found: Sample | ServerUnavailable) -> Text | Table:
        heading = Text(safe(self._title), style="bold")
        if isinstance(found, ServerUnavailable):
            heading.append(f"  {safe(str(found))}", style="bold red")
        return heading


def screen_parts(look: Sample, *, rows: int, narrow: bool) -> list[Text | Table]:
    """Return what is below the heading. ``narrow``: omit worker names, so that everything else fits."""
    figures = Table.grid(padding=(0, 3))
    cells = [Text.assemble((f"{name} ", "dim"), value) for name, value in totals(look).items()]
    per_row = 3 if narrow else len(cells)
    for i in range(0, len(cells), per_row):
        figures.add_row(*cells[i : i + per_row])
    nodes = Table.grid(padding=(0, 2))
    for node in look.nodes:
        limit = f" of {size(node.memory_limit)}" if node.memory_limit else ""
        nodes.add_row(
            Text(safe(node.name), style="dim"),
            f"memory {size(node.memory_bytes)}{limit}",
            f"{node.commands_per_s} commands/s",
            f"{node.clients} clients",
        )
    return [figures, nodes, *_troubles(look), _groups(look, narrow), *_partitions(look.now.stages, rows, narrow)]


def _troubles(look: Sample) -> list[Text | Table]:
    table = Table.grid(padding=(0, 2))
    for where, what in troubles(look.trouble):
        table.add_row(Text(safe(where), style="bold red", overflow="fold"), Text(safe(what), overflow="fold"))
    return [table] if table.row_count else []


def _groups(look: Sample, narrow: bool) -> Table:
    waiting = "waiting" if narrow else "waiting or behind"
    who = [] if narrow else ["who"]
    table = Table("group", "workers", waiting, "active", "works", *who, box=SIMPLE_HEAD, expand=True)
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[1:5]:
        column.justify = "right"
    for queue in look.now.queues:
        table.add_row(
            queue.name,
            _count(queue),
            str(queue.waiting),
            str(queue.held),
            _coming(look, queue.name),
            *([] if narrow else [_who(queue.workers)]),
        )
    for stage in look.now.stages:
        rate = per_second(look.rates.stage_bytes[stage.name], size)
        lag = describe_lag(stage.lag_entries, stage.lag_bytes)
        table.add_row(stage.name, _count(stage), lag, "", rate, *([] if narrow else [_who(stage.workers)]))
    return table


def _partitions(stages: Sequence[StageFacts], rows: int, narrow: bool) -> list[Text | Table]:
    """Return as many partitions as fit: those without an owner first, then those with the largest lag."""
    table = Table("partition", box=SIMPLE_HEAD)
    for stage in stages:
        if narrow:
            table.add_column(stage.name, justify="right", no_wrap=True)
        else:
            table.add_column(f"{stage.name} of")
            table.add_column("behind", justify="right")
    table.add_column("open runs", justify="right")
    across = list(zip(*(stage.partitions for stage in stages), strict=True))
    order = sorted(
        range(len(across)), key=lambda n: (all(p.owner for p in across[n]), -sum(p.lag_bytes for p in across[n]), n)
    )
    shown = sorted(order[:rows])
    parser = next(n for n, stage in enumerate(stages) if stage.name == "parser")
    for n in shown:
        cells = [Text(str(n))]
        for p in across[n]:
            owner = Text(safe(p.owner)) if p.owner else Text("nobody", style="bold red")
            lag = Text(describe_lag(p.lag_entries, p.lag_bytes))
            cells += [owner, lag] if not narrow else [lag if p.owner else owner]
        table.add_row(*cells, Text(str(across[n][parser].open)))
    rest = len(across) - len(shown)
    return [table, Text(f"and {rest} more, none further behind", style="dim")] if rest else [table]


def _count(group: GroupFacts) -> Text:
    return Text(str(len(group.workers)), style="" if group.workers else "bold red")


def _who(workers: Sequence[str]) -> Text:
    return Text(safe(", ".join(workers)), style="dim", overflow="ellipsis")


def _coming(look: Sample, queue: str) -> str:
    rates = {
        "intake": look.rates.requests,
        "fetcher": look.rates.attempts,
        "tools": look.rates.tool_calls,
        "recorder": look.rates.records,
    }
    return per_second(rates[queue])
