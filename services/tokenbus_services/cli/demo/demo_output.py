"""The output of `tokenbus demo` around its run: service startup and the request. Service logs go to files."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from tokenbus.events.requests import Generate
from tokenbus_services.cli.render import terminal
from tokenbus_services.cli.up.start_output import StartTable
from tokenbus_services.cli.up.supervisor import Watcher


class DemoWatcher(Watcher, Protocol):
    """Receives the demo's events, besides those of its services."""

    def on_request(self, request: Generate) -> None:
        """The request is being sent."""
        ...


@contextmanager
def demo_watcher(directory: Path, names: Sequence[str]) -> Generator[DemoWatcher]:
    """Return the watcher that suits stdout; services log to files in the directory."""
    console = terminal.console()
    if console is None:
        yield PlainDemo(directory)
    else:
        with StartTable(console, names, transient=True) as table:
            yield ShownDemo(directory, table)


class _Logs:
    """One log file per child."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def on_line(self, name: str, line: str) -> None:
        with (self._directory / f"{name}.log").open("a", encoding="utf-8") as log:
            log.write(f"{line}\n")

    def stopping(self) -> None:
        """Show nothing: the answer has been shown."""


class PlainDemo(_Logs):
    """Marked lines, in the format of `plain_text.PlainText`."""

    def ready(self, name: str, url: str) -> None:
        print(f"[ready] {name} {url}", flush=True)

    def died(self, name: str, how: str, pause_s: float) -> None:
        print(f"[died] {name} {how}", flush=True)

    def all_ready(self) -> None:
        """Show nothing: each service has had its own line."""

    def on_request(self, request: Generate) -> None:
        print(f"[user] {_question(request)}", flush=True)


class ShownDemo(_Logs):
    """A live table while services start, then the question in a panel."""

    def __init__(self, directory: Path, table: StartTable) -> None:
        super().__init__(directory)
        self._table = table

    def ready(self, name: str, url: str) -> None:
        self._table.ready(name, url)

    def died(self, name: str, how: str, pause_s: float) -> None:
        self._table.died(name, how, pause_s)

    def all_ready(self) -> None:
        self._table.stop()

    def on_request(self, request: Generate) -> None:
        from rich.panel import Panel

        self._table.console.print(Panel(_question(request), title="user", title_align="left", border_style="yellow"))


def _question(request: Generate) -> str:
    content = request.messages[-1].content
    assert isinstance(content, str)
    return content
