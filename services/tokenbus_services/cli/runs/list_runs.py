"""`tokenbus runs`: lists the deployment's runs, open and ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from tokenbus import RunInfo
from tokenbus_services.cli import connect as reaching
from tokenbus_services.cli.render import output
from tokenbus_services.cli.runs.run_choice import RunChoice, age_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

WIDE = 132
"""From this width on, the table has a column for each fact."""
STATE_AND_AGE = 18
"""Width of these two columns and of the gaps before them."""


async def listing(choice: RunChoice, *, limit: int, oldest_first: bool, as_json: bool) -> None:
    """Show the chosen runs."""
    choice.check()
    async with reaching.client() as bus:
        found = [info async for info in choice.runs(bus, limit=limit, oldest_first=oldest_first)]
    now_ms = time.time_ns() // 1_000_000
    if as_json:
        for info in found:
            sys.stdout.buffer.write(msgspec.json.encode(info) + b"\n")
        sys.stdout.buffer.flush()
    elif not found:
        print("no such runs" if not choice.is_empty else "no runs", file=sys.stderr)
    elif console := output.console():
        console.print(table(found, now_ms=now_ms, width=console.width))
    else:
        for info in found:
            print(output.safe("  ".join((info.run, info.state, age_text(now_ms - info.at_ms), *facts(info)))))


def table(found: Sequence[RunInfo], *, now_ms: int, width: int) -> RenderableType:
    """A row a run; on a narrow terminal its facts stand under its id."""
    return _wide(found, now_ms) if width >= WIDE else _narrow(found, now_ms, width)


def _wide(found: Sequence[RunInfo], now_ms: int) -> RenderableType:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, pad_edge=False)
    made.add_column("run", no_wrap=True, overflow="ellipsis", min_width=36)
    made.add_column("state", no_wrap=True, min_width=10)
    made.add_column("age", no_wrap=True, min_width=4, justify="right")
    made.add_column("tenant", no_wrap=True, overflow="ellipsis", max_width=20)
    made.add_column("provider/model", no_wrap=True, overflow="ellipsis")
    made.add_column("end", no_wrap=True, overflow="ellipsis", min_width=20)
    for info in found:
        age = age_text(now_ms - info.at_ms)
        made.add_row(_text(info.run), _state(info), _text(age), *(_text(fact) for fact in facts(info)))
    return made


def _narrow(found: Sequence[RunInfo], now_ms: int, width: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    longest = max(len("run"), *(len(output.safe(info.run)) for info in found))
    column = min(longest, width - STATE_AND_AGE)
    lines = [_text(f"{'run':{column}}  {'state':10}  {'age':>4}", "bold")]
    for info in found:
        run = _text(info.run)
        run.truncate(column, overflow="ellipsis", pad=True)
        state = _state(info)
        state.pad_right(10 - len(state.plain))
        lines.append(Text.assemble(run, "  ", state, f"  {age_text(now_ms - info.at_ms):>4}"))
        if known := [fact for fact in reversed(facts(info)) if fact != "-"]:
            lines.append(_text(f"  {' · '.join(known)}", "dim"))
    return Group(*lines)


def _state(info: RunInfo) -> Text:
    return _text(info.state, _STYLES.get(info.state, ""))


def _text(words: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(output.safe(words), style=style, no_wrap=True, overflow="ellipsis")


def facts(info: RunInfo) -> tuple[str, str, str]:
    """Tenant, provider and model, and how the run ended; ``-`` for what is not known."""
    model = "/".join(word for word in (info.provider, info.model) if word)
    end = " ".join(word for word in (info.finish, info.error) if word)
    return info.tenant or "-", model or "-", end or "-"


_STYLES = {"failed": "red", "incomplete": "yellow", "cancelled": "yellow", "running": "green"}
