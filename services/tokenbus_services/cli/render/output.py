"""Chooses how to show events: with rich on a terminal, otherwise as plain text, or as JSON lines on request."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from tokenbus.client.decode import TopicEvent
from tokenbus.events.decisions import Decided
from tokenbus.events.public import UnknownEvent, encode
from tokenbus_services.cli.render import event_text as wording
from tokenbus_services.cli.render import terminal
from tokenbus_services.cli.render.plain_text import PlainText

Show = Callable[[TopicEvent], None]


@contextmanager
def showing(*, as_json: bool = False, many_runs: bool = False) -> Generator[Show]:
    """Yield a function that shows one event."""
    if as_json:
        yield _show_json
    elif console := terminal.console():
        from tokenbus_services.cli.render.live_view import Screen

        with Screen(console, many_runs=many_runs) as screen:
            yield screen.feed
    elif many_runs:
        yield _show_line
    else:
        text = PlainText()
        yield lambda event: _show_line(event) if isinstance(event, Decided) else _write(text.feed(event))


def _show_json(event: TopicEvent) -> None:
    sys.stdout.buffer.write(encode(event.fields if isinstance(event, UnknownEvent) else event) + b"\n")
    sys.stdout.buffer.flush()


def _show_line(event: TopicEvent) -> None:
    _write(wording.one_line(event) + "\n")


def _write(text: str) -> None:
    if text:
        sys.stdout.write(terminal.safe(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()
