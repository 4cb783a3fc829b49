"""A live view of runs on a terminal: open blocks grow in panels at the bottom, finished ones scroll up above them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tokenbus.events import public
from tokenbus.events.topics import TopicEvent, type_of
from tokenbus_services.cli.render import event_text as wording
from tokenbus_services.terminal_text import safe

_MOST_OPEN = 4
_STYLES = {
    "text": "green",
    "thinking": "bright_black",
    "tool_call": "cyan",
    "tool_result": "magenta",
    "image": "blue",
    "audio": "green",
    "server_tool": "cyan",
}
_LIFE_STYLES = {
    "completed": "green",
    "started": "dim",
    "usage": "dim",
    "tool_progress": "dim",
    "retrying": "yellow",
    "restarted": "yellow",
}


@dataclass(slots=True)
class ShownBlock:
    """A block as far as it has been received."""

    run: str
    number: int
    kind: str
    title: str
    pieces: list[str] = field(default_factory=list[str])
    void: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


Done = ShownBlock | public.PublicEvent
"""Something to print permanently: a finished block, or a lifecycle event."""


class LiveBlocks:
    """Folds public events of any number of runs into growing blocks and finished things. Pure."""

    def __init__(self, most_open: int = _MOST_OPEN) -> None:
        self._most_open = most_open
        self._open: dict[tuple[str, int], ShownBlock] = {}

    @property
    def open(self) -> tuple[ShownBlock, ...]:
        """The blocks that still grow, most recently grown last."""
        return tuple(self._open.values())

    def feed(self, event: public.PublicEvent) -> list[Done]:
        """Apply one event; return the output that it completes."""
        match event:
            case public.BlockStarted():
                lines = [event.prompt] if event.prompt else []
                self._open[event.run, event.block] = ShownBlock(
                    event.run, event.block, event.kind, wording.title(event), lines
                )
                return self._overflow()
            case public.Chunk():
                self._grow(event)
                return self._overflow()
            case public.ImagePreview():
                if block := self._open.get((event.run, event.block)):
                    block.pieces = [f"preview {event.index}: {wording.image(event.image)}"]
                return []
            case public.BlockComplete():
                self._open.pop((event.run, event.block), None)
                block = ShownBlock(event.run, event.block, event.kind, wording.title(event), [wording.content(event)])
                return [block]
            case public.Retrying() | public.Restarted():
                return [*self._take(event.run, since=event.drop_from, void=True), event]
            case public.RunEnd():
                return [*self._take(event.run), event]
            case (
                public.Started()
                | public.ToolProgress()
                | public.BlockProgress()
                | public.Waiting()
                | public.Resumed()
                | public.UnknownEvent()
            ):
                return [event]
            case public.ChildStarted() | public.ChildEnded():
                return [event]
            case public.UsageReported() | public.Answering():
                return []  # a run's end shows the total and the model

    def _grow(self, chunk: public.Chunk) -> None:
        key = chunk.run, chunk.block
        block = self._open.pop(key, None) or ShownBlock(*key, chunk.kind, chunk.kind.replace("_", " "))
        if chunk.tool_name:
            block.title = f"{chunk.kind.replace('_', ' ')} {chunk.tool_name}"
        if chunk.tool_call_part in (None, "input"):
            block.pieces.append(chunk.text)
        self._open[key] = block

    def _take(self, run: str, *, since: int = 0, void: bool = False) -> list[ShownBlock]:
        taken = [self._open.pop(key) for key in list(self._open) if key[0] == run and key[1] >= since]
        for block in taken:
            block.void = void
        return taken

    def _overflow(self) -> list[Done]:
        """Close the block that has not grown for longest. Needed for topics that carry only chunks, where blocks
        never end.
        """
        if len(self._open) <= self._most_open:
            return []
        return [self._open.pop(next(iter(self._open)))]


class Screen:
    """Shows events live: ``with Screen(console) as screen: screen.feed(event)``."""

    def __init__(self, console: Console, *, many_runs: bool = False) -> None:
        self._console = console
        self._many_runs = many_runs
        self._blocks = LiveBlocks()
        self._open: tuple[ShownBlock, ...] = ()  # a snapshot for the drawing thread
        self._live = Live(console=console, get_renderable=self._growing, refresh_per_second=12, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        left, self._open = self._open, ()
        self._live.stop()
        for block in left:
            self._console.print(panel(block, self._many_runs))

    def feed(self, event: TopicEvent) -> None:
        if isinstance(event, wording.NoPublic):
            self._console.print(Text(safe(wording.one_line(event))))
            return
        done = self._blocks.feed(event)
        self._open = self._blocks.open
        for thing in done:
            self._console.print(
                panel(thing, self._many_runs) if isinstance(thing, ShownBlock) else life(thing, self._many_runs)
            )

    def _growing(self) -> RenderableType:
        blocks = self._open
        most = max(1, self._console.height // max(1, len(blocks)) - 3)
        return Group(*(panel(block, self._many_runs, last_lines=most) for block in blocks))


class _LastLines:
    """The end of a text that may be longer than the screen."""

    def __init__(self, text: str, most: int, style: str) -> None:
        self._text = text
        self._most = most
        self._style = style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        end = self._text[-self._most * options.max_width :]
        yield from Text(end, style=self._style).wrap(console, options.max_width)[-self._most :]


def panel(block: ShownBlock, with_run: bool, *, last_lines: int | None = None) -> Panel:
    """Render a block in a panel; with ``last_lines``, only its last lines."""
    text = safe(block.text)
    style = "dim strike" if block.void else "dim italic" if block.kind == "thinking" else ""
    title = f"{block.run} · {block.title}" if with_run else block.title
    return Panel(
        Text(text, style=style) if last_lines is None else _LastLines(text, last_lines, style),
        title=Text(safe(title) + (" (void)" if block.void else "")),
        title_align="left",
        border_style=_STYLES.get(block.kind, "white"),
    )


def life(event: public.PublicEvent, with_run: bool) -> RenderableType:
    """Render a lifecycle event as a line; a run's end also with its tokens and timing."""
    name = type_of(event)
    words = Text(f"{event.run} " if with_run else "", style="dim")
    words.append(name, style=_LIFE_STYLES.get(name, "bold red")).append(" " + safe(wording.details(event)))
    if not isinstance(event, public.RunEnd):
        return words
    table = Table.grid(padding=(0, 2))
    if event.usage:
        table.add_row("tokens", wording.usage(event.usage))
    table.add_row("time", wording.timing(event.timing))
    return Group(words, table)
