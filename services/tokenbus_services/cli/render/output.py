"""Chooses how to show events: with rich on a terminal, otherwise as plain text, or as JSON lines on request."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from tokenbus.events.public import (
    Answering,
    BlockComplete,
    BlockStarted,
    Chunk,
    ImagePreview,
    PublicEvent,
    RunEnd,
    UsageReported,
    encode,
)
from tokenbus.events.topics import TopicEvent, as_written, type_of
from tokenbus_services.cli.render import event_text as wording
from tokenbus_services.cli.render.event_text import NoPublic
from tokenbus_services.terminal_text import safe, safe_json

Show = Callable[[TopicEvent], None]


@contextmanager
def showing(*, as_json: bool = False, many_runs: bool = False) -> Generator[Show]:
    """Yield a function that shows one event."""
    if as_json:
        yield _show_json
    elif shown := console():
        from tokenbus_services.cli.render.live_view import Screen

        with Screen(shown, many_runs=many_runs) as screen:
            yield screen.feed
    elif many_runs:
        yield _show_line
    else:
        text = PlainText()
        yield lambda event: _show_line(event) if isinstance(event, NoPublic) else _write(text.feed(event))


def print_json(value: object) -> None:
    write(safe_json(msgspec.json.encode(value)) + b"\n")


def fields_of(event: TopicEvent) -> dict[str, object]:
    """The event as a JSON object."""
    return msgspec.to_builtins(as_written(event))


def write(data: bytes) -> None:
    """Write bytes to stdout at once."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _show_json(event: TopicEvent) -> None:
    write(safe_json(encode(as_written(event))) + b"\n")


def _show_line(event: TopicEvent) -> None:
    _write(safe(wording.one_line(event)) + "\n")


def _write(text: str) -> None:
    if text:
        sys.stdout.write(safe(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()


class PlainText:
    """Converts one run's events to text. Lines that begin with a word in brackets are about the run; others are its
    text.
    """

    def __init__(self) -> None:
        self._at_line_start = True
        self._block: int | None = None
        """The visible block written last."""

    def feed(self, event: PublicEvent) -> str:
        """Return the text to write for this event; may be empty."""
        match event:
            case Chunk(visible=True):
                return self._visible(event)
            case BlockComplete() if event.kind != "text":
                return self._marked(wording.title(event), wording.content(event))
            case BlockStarted(prompt=str(prompt)):
                return self._marked("image of", prompt)
            case Chunk() | BlockStarted() | ImagePreview() | BlockComplete() | UsageReported() | Answering():
                return ""  # the run's end shows the total usage
            case _:
                text = self._marked(type_of(event), wording.details(event))
                if isinstance(event, RunEnd):
                    text += self._marked("usage", wording.usage(event.usage)) if event.usage else ""
                    text += self._marked("timing", wording.timing(event.timing))
                return text

    def _visible(self, chunk: Chunk) -> str:
        begin = "" if chunk.block == self._block else self._fresh_line()
        self._block = chunk.block
        text = begin + chunk.text
        if text:
            self._at_line_start = text.endswith("\n")
        return text

    def _marked(self, mark: str, text: str) -> str:
        lines = "".join(f"[{mark}] {safe(line)}".rstrip() + "\n" for line in text.splitlines() or [""])
        begin = self._fresh_line()
        self._at_line_start = True
        return begin + lines

    def _fresh_line(self) -> str:
        return "" if self._at_line_start else "\n"


if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["console", "safe"]


def console() -> Console | None:
    """Return rich's console if stdout is a terminal with cursor control; None otherwise."""
    from rich.console import Console

    made = Console(highlight=False, emoji=False, markup=False)
    return made if made.is_terminal and not made.is_dumb_terminal else None
