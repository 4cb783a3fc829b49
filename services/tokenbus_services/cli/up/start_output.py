"""The output of `tokenbus up`: a live table of starting services for a person, lines for a program."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import msgspec

from tokenbus_services.cli.render import output
from tokenbus_services.cli.up import supervisor as own_server
from tokenbus_services.cli.up.supervisor import Watcher, WorkerSlot

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


class UpWatcher(Watcher, Protocol):
    """Receives the events of `tokenbus up`, besides those of its services."""

    def server(self, url: str) -> None:
        """The server is up."""
        ...


@contextmanager
def up_watcher(slots: Sequence[WorkerSlot], *, console: bool) -> Generator[UpWatcher]:
    """Return the watcher that suits stdout. ``console``: print the address of the gateway's console."""
    gateways = [slot.name for slot in slots if slot.service == "gateway"] if console else []
    screen = output.console()
    if screen is None:
        yield PlainWatcher(gateways)
    else:
        names = [slot.name for slot in slots]
        with StartTable(screen, [own_server.NAME, *names], gateways=gateways) as watcher:
            yield watcher


class PlainWatcher:
    """Plain lines: events on stdout, service logs on stderr."""

    def __init__(self, gateways: Sequence[str] = ()) -> None:
        """``gateways``: names of the services that serve the console."""
        self._gateways = gateways

    def server(self, url: str) -> None:
        print("server", url, flush=True)

    def ready(self, name: str, url: str) -> None:
        print("ready", name, url, flush=True)
        if name in self._gateways:
            print("console", console_url(url), flush=True)

    def all_ready(self) -> None:
        print("ready", flush=True)

    def died(self, name: str, how: str, pause_s: float) -> None:
        print(f"died {name} {how}; starting again in {pause_s:g} s", flush=True)

    def stopping(self) -> None:
        print("stopping", flush=True)

    def on_line(self, name: str, line: str) -> None:
        print(f"{name} | {line}", file=sys.stderr, flush=True)


class StartTable:
    """A live table until all services are ready, then lines."""

    def __init__(
        self, console: Console, names: Sequence[str], *, transient: bool = False, gateways: Sequence[str] = ()
    ) -> None:
        """``transient``: remove the table when all services are ready. ``gateways``: names of the services that serve
        the console.
        """
        from rich.live import Live

        self.console = console
        self._gateways = gateways
        self._urls: dict[str, str | None] = dict.fromkeys(names)
        self._live = Live(console=console, refresh_per_second=12, transient=transient)
        self._url = ""

    def __enter__(self) -> StartTable:
        self._live.start()
        self._show()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop updating the table."""
        self._live.stop()

    def server(self, url: str) -> None:
        self._url = url
        self.ready(own_server.NAME, url)

    def ready(self, name: str, url: str) -> None:
        if self._live.is_started:
            self._urls[name] = url
            self._show()
        else:
            self.console.print(f"{name} is ready again: {url}", style="green")

    def all_ready(self) -> None:
        self.stop()
        self.console.print("ready", style="bold green", end="")
        self.console.print(f" · server {self._url} · Ctrl-C stops all")
        for name in self._gateways:
            self.console.print(f"console {console_url(self._urls[name] or '')}", style="bold")
        self.console.print("tokenbus send, tail and doctor find it in this directory", style="dim")

    def died(self, name: str, how: str, pause_s: float) -> None:
        self.console.print(f"{name} {how}; starting again in {pause_s:g} s", style="yellow")

    def stopping(self) -> None:
        self.stop()
        self.console.print("stopping", style="dim")

    def on_line(self, name: str, line: str) -> None:
        self.console.print(log_line(name, line))

    def _show(self) -> None:
        self._live.update(start_table(self._urls))


def console_url(gateway: str) -> str:
    """The address of the console at this gateway."""
    return f"{gateway}/console/"


def start_table(urls: dict[str, str | None]) -> Table:
    """Render one row per process: a spinner, or its URL."""
    from rich.spinner import Spinner
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, url in urls.items():
        sign = Spinner("dots", style="cyan") if url is None else Text("✓", style="green")
        table.add_row(sign, name, Text(url or "starting", style="dim"))
    return table


def log_line(name: str, line: str) -> Text:
    """Render a line of a service's log for a person: the event, then its fields."""
    from rich.text import Text

    shown = Text(f"{name} │ ", style="cyan")
    try:
        fields = msgspec.json.decode(line, type=dict[str, object])
    except msgspec.DecodeError:
        return shown.append(output.safe(line), style="default")
    level = str(fields.pop("level", "info"))
    event = str(fields.pop("event", ""))
    style = {"warning": "yellow", "error": "red", "critical": "bold red"}.get(level, "default")
    for known in ("timestamp", "service"):
        fields.pop(known, None)
    hint = fields.pop("hint", None)
    shown.append(output.safe(event), style=style)
    for key, value in fields.items():
        shown.append(output.safe(f" {key}={value}"), style="dim")
    if hint:
        shown.append(output.safe(f": {hint}"), style=style)  # what a newcomer looks for
    return shown
