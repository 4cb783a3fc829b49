"""`tokenbus top`: shows a deployment at work, sampled repeatedly."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tokenbus.bus.keys import Keys, PublicTopic
from tokenbus.bus.server.server import Server, translated
from tokenbus.bus.topology import INTAKE, POLICY, RECORDER, WEBHOOKS
from tokenbus.errors import ServerUnavailable
from tokenbus_services.cli import connect as reaching
from tokenbus_services.cli.inspect import Trouble, TroubleObserver
from tokenbus_services.cli.render import output
from tokenbus_services.cli.render.event_text import failure, per_second, size, time_span
from tokenbus_services.cli.render.output import print_json, safe
from tokenbus_services.runtime.deployment_snapshot import (
    DeploymentReader,
    DeploymentSnapshot,
    GroupFacts,
    NodeFacts,
    StageFacts,
    read_nodes,
)
from tokenbus_services.settings import Settings


async def top(*, every_s: float, once: bool, as_json: bool) -> None:
    """Show a sample every ``every_s`` seconds until Ctrl-C; with ``once``, show one, measured over that time.

    On a terminal it keeps running if the server goes away. Raises ServerUnavailable, and other refusals of the server.
    """
    async with reaching.deployment() as (settings, server, keys):
        meant = settings.further_queues
        reader = DeploymentReader(
            server,
            keys,
            added=True,
            topic=_counted(settings),
            further=[
                each for each in (RECORDER, WEBHOOKS) if each in meant or await _has_workers(server, keys, each[0])
            ],
            judged=bool(settings.policies) or await _has_workers(server, keys, POLICY[0]),
        )
        blobs = settings.blobs
        trouble = TroubleObserver(server, keys, blobs_url=None if blobs.loader else blobs.address)
        looks = _looks(server, reader, trouble, every_s)
        if not (once or as_json) and (console := output.console()):
            with TopScreen(console, f"{keys.prefix} on {server.url.safe}") as screen:
                async for found in looks:
                    screen.show(found)
            return
        async for found in looks:
            if isinstance(found, ServerUnavailable):
                raise found
            if as_json:
                print_json(found)
            else:
                print(output.safe("\n".join(lines(found))), end="\n" if once else "\n\n", flush=True)
            if once:
                return


async def _looks(
    server: Server, reader: DeploymentReader, trouble: TroubleObserver, every_s: float
) -> AsyncGenerator[Sample | ServerUnavailable]:
    """Yield a look from the second sample on, or ServerUnavailable while the server is away."""
    before: DeploymentSnapshot | None = None
    while True:
        try:
            with translated(server):
                await server.clock.measure()
                now, nodes = await reader.read(), await read_nodes(server)
            failing = await trouble.look()
        except ServerUnavailable as e:
            yield e
        else:
            if before:
                yield Sample(now, nodes, rates(before, now), failing)
            before = now
        await asyncio.sleep(every_s)


async def _has_workers(server: Server, keys: Keys, group: str) -> bool:
    """Whether the group has workers, though these settings may not name what it works for."""
    with translated(server):
        return bool(await server.client.zcard(keys.members(group)))


def _counted(settings: Settings) -> PublicTopic | None:
    """Return the written topic from which chunks can be counted; None if there is none."""
    written: tuple[PublicTopic, ...] = ("chunks", "visible")
    return next((topic for topic in written if topic in settings.topics), None)


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
        self._found: Sample | ServerUnavailable | None = None
        self._scroll = 0
        """Partitions above the screen."""
        self._keys = _Keys(self._pressed)
        self._live = Live(Text("looking …"), console=console, screen=True, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        self._keys.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keys.end()
        self._live.stop()

    def _pressed(self, key: str) -> None:
        self._scroll = max(0, self._scroll + _STEPS.get(key, 0) * (self._rows if key in _PAGES else 1))
        if key in _ENDS:
            self._scroll = _ENDS[key]
        if self._found:
            self.show(self._found)

    @property
    def _rows(self) -> int:
        look = self._last
        return (
            max(3, self._console.height - AROUND - len(look.nodes) - len(list(troubles(look.trouble)))) if look else 3
        )

    def show(self, found: Sample | ServerUnavailable) -> None:
        """Show the sample. If the server is unavailable, the last sample stays."""
        self._found = found
        if isinstance(found, Sample):
            self._last = found
        parts = [self._heading(found)]
        if look := self._last:
            self._scroll = min(self._scroll, max(0, len(look.now.stages[0].partitions) - self._rows))
            narrow = self._console.width < NARROW
            parts += screen_parts(look, rows=self._rows, narrow=narrow, scroll=self._scroll)
        self._live.update(Group(*parts), refresh=True)

    def _heading(self, found: Sample | ServerUnavailable) -> Text | Table:
        heading = Text(safe(self._title), style="bold")
        if isinstance(found, ServerUnavailable):
            heading.append(f"  {safe(str(found))}", style="bold red")
        return heading


_UP, _DOWN, _PAGE_UP, _PAGE_DOWN = "\x1b[A", "\x1b[B", "\x1b[5~", "\x1b[6~"
_STEPS = {_UP: -1, "k": -1, _DOWN: 1, "j": 1, _PAGE_UP: -1, "b": -1, _PAGE_DOWN: 1, " ": 1}
_PAGES = {_PAGE_UP, _PAGE_DOWN, "b", " "}
_ENDS = {"g": 0, "\x1b[H": 0, "G": 10**6, "\x1b[F": 10**6}


class _Keys:
    """Passes on each key that is pressed, if the standard input is a terminal."""

    def __init__(self, pressed: Callable[[str], None]) -> None:
        self._pressed = pressed
        self._before: list[Any] | None = None

    def begin(self) -> None:
        """Read keys at once and without an echo. Ctrl-C stays what it is."""
        if sys.stdin.isatty():
            import termios
            import tty

            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
            asyncio.get_running_loop().add_reader(sys.stdin, self._read)

    def end(self) -> None:
        """Leave the terminal as it was."""
        if self._before is not None:
            import termios

            asyncio.get_running_loop().remove_reader(sys.stdin)
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def _read(self) -> None:
        if not (data := os.read(sys.stdin.fileno(), 64)):
            asyncio.get_running_loop().remove_reader(sys.stdin)
        self._pressed(data.decode(errors="replace"))


def screen_parts(look: Sample, *, rows: int, narrow: bool, scroll: int = 0) -> list[Text | Table]:
    """Return what is below the heading. ``narrow``: omit worker names, so that everything else fits. ``scroll``: the
    partitions that are above the screen.
    """
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
    return [
        figures,
        nodes,
        *_troubles(look),
        _groups(look, narrow),
        *_partitions(look.now.stages, rows, narrow, scroll),
    ]


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


def _partitions(stages: Sequence[StageFacts], rows: int, narrow: bool, scroll: int) -> list[Text | Table]:
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
    shown = sorted(order[scroll : scroll + rows])
    parser = next(n for n, stage in enumerate(stages) if stage.name == "parser")
    for n in shown:
        cells = [Text(str(n))]
        for p in across[n]:
            owner = Text(safe(p.owner)) if p.owner else Text("nobody", style="bold red")
            lag = Text(describe_lag(p.lag_entries, p.lag_bytes))
            cells += [owner, lag] if not narrow else [lag if p.owner else owner]
        table.add_row(*cells, Text(str(across[n][parser].open)))
    below = len(across) - scroll - len(shown)
    hidden = [f"{scroll} above" if scroll else "", f"{below} more, none further behind" if below else ""]
    said = ", ".join(filter(None, hidden))
    return [table, Text(f"and {said} (arrow keys)", style="dim")] if said else [table]


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
        "webhooks": look.rates.notices,
    }
    return per_second(rates[queue])


MAX_TROUBLES = 3
"""Maximum models shown of each kind of failure; `doctor` shows all."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates per second between two samples. None: not counted by the server, or the counter was reset."""

    requests: float | None
    attempts: float | None
    tool_calls: float | None
    records: float | None = None
    """Entries for the recorder; None also if nothing is recorded."""
    notices: float | None = None
    """Ends of runs of which webhooks are told; None also if there are none."""
    chunks: float | None
    stage_bytes: dict[str, float | None]
    """By stage: bytes of frames processed."""


class Sample(msgspec.Struct, frozen=True):
    """A sample, and the rates since the sample before."""

    now: DeploymentSnapshot
    nodes: list[NodeFacts]
    rates: Rates
    trouble: Trouble = Trouble()


def lines(look: Sample) -> Iterator[str]:
    """Yield a sample as lines of text."""
    yield "  ".join(f"{name} {value}" for name, value in totals(look).items())
    for node in look.nodes:
        limit = f" of {size(node.memory_limit)}" if node.memory_limit else ""
        yield (
            f"server      {node.name}  memory {size(node.memory_bytes)}{limit}"
            f"  commands {node.commands_per_s}/s  clients {node.clients}"
        )
    for stage in look.now.stages:
        yield (
            f"{stage.name:<10}  workers {len(stage.workers)}  partitions owned {stage.owned} of {len(stage.partitions)}"
            f"  behind {describe_lag(stage.lag_entries, stage.lag_bytes)}"
            f"  works {per_second(look.rates.stage_bytes[stage.name], size)}"
        )
    for queue in look.now.queues:
        yield f"{queue.name:<10}  workers {len(queue.workers)}  waiting {queue.waiting}  active {queue.held}"
    for where, what in troubles(look.trouble):
        yield f"{where:<10}  {what}"


def troubles(trouble: Trouble) -> Iterator[tuple[str, str]]:
    """Yield what fails outside the bus: what it is, and how it fails; the worst first."""
    for each in trouble.failing[:MAX_TROUBLES]:
        yield (
            f"{each.failure.provider}/{each.failure.model}",
            f"{each.failed} of {each.attempts} calls: {failure(each.failure)}, {time_span(each.last_ms)} ago",
        )
    for each in trouble.silent[:MAX_TROUBLES]:
        yield f"{each.provider}/{each.model}", f"{each.calls} calls silent, the oldest for {time_span(each.since_ms)}"
    if blobs := trouble.blobs:
        yield "blobs", f"{blobs.code}, {time_span(1000 * blobs.ago_s)} ago"


def totals(look: Sample) -> dict[str, str]:
    """Return the figures of the whole deployment, by name."""
    other_kinds = {"pipelines": look.now.pipelines, "gateways": look.now.gateways}
    return {
        "open runs": str(look.now.open_runs),
        "requests": per_second(look.rates.requests),
        "attempts": per_second(look.rates.attempts),
        "tool calls": per_second(look.rates.tool_calls),
        "chunks": per_second(look.rates.chunks),
        "dead": str(look.now.dead),
        **{name: str(len(workers)) for name, workers in other_kinds.items() if workers},
    }


def describe_lag(entries: int | None, lag_bytes: int) -> str:
    return size(lag_bytes) if entries is None else f"{entries} ({size(lag_bytes)})"


def rates(before: DeploymentSnapshot, now: DeploymentSnapshot) -> Rates:
    """Compute the rates between two samples."""
    return Rates(
        requests=_rate(before, now, lambda s: _added(s, INTAKE)),
        attempts=_rate(before, now, lambda s: _added(s, "fetcher")),
        tool_calls=_rate(before, now, lambda s: _added(s, "tools")),
        records=_rate(before, now, lambda s: _added(s, RECORDER[0])),
        notices=_rate(before, now, lambda s: _added(s, WEBHOOKS[0])),
        chunks=_rate(before, now, lambda s: s.chunks),
        stage_bytes={stage.name: _rate(before, now, lambda s, name=stage.name: _done(s, name)) for stage in now.stages},
    )


def _rate(
    before: DeploymentSnapshot, now: DeploymentSnapshot, counter: Callable[[DeploymentSnapshot], int | None]
) -> float | None:
    begin, end, ms = counter(before), counter(now), now.at_ms - before.at_ms
    if begin is None or end is None or end < begin or ms <= 0:
        return None
    return (end - begin) * 1000 / ms


def _added(snapshot: DeploymentSnapshot, queue: str) -> int | None:
    return next((q.added for q in snapshot.queues if q.name == queue), None)


def _done(snapshot: DeploymentSnapshot, stage: str) -> int:
    return sum(p.done_bytes for s in snapshot.stages if s.name == stage for p in s.partitions)
