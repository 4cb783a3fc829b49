"""`tokenbus runs` and `tokenbus cancel`: lists or stops the runs that the options choose."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tokenbus import Client, RunInfo
from tokenbus.client.run_list import run_filter
from tokenbus.errors import RunNotFound, SettingsError
from tokenbus.events.run_info import ENDED_STATES
from tokenbus_services.cli import connect as reaching
from tokenbus_services.cli import exit_codes as ending
from tokenbus_services.cli.audit import noted_apart
from tokenbus_services.cli.render import output

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

WIDE = 132
"""From this width on, the table has a column for each fact."""
STATE_AND_AGE = 18
"""Width of these two columns and of the gaps before them."""


async def listing(choice: RunChoice, *, limit: int, oldest_first: bool, archived: bool, as_json: bool) -> None:
    """Show the chosen runs."""
    choice.check()
    async with reaching.client() as bus:
        found = [info async for info in choice.runs(bus, limit=limit, oldest_first=oldest_first, archived=archived)]
    now_ms = time.time_ns() // 1_000_000
    if as_json:
        for info in found:
            output.print_json(info)
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


_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", re.ASCII)


class RunChoice(msgspec.Struct, frozen=True, kw_only=True):
    states: tuple[str, ...] = ()
    tenant: str | None = None
    provider: str | None = None
    older_than: str | None = None
    prefix: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was chosen."""
        return self == RunChoice()

    def check(self) -> None:
        """Raise SettingsError if a value is wrong."""
        self._arguments()

    def runs(
        self, bus: Client, *, limit: int | None = None, oldest_first: bool = False, archived: bool = False
    ) -> AsyncGenerator[RunInfo]:
        """The chosen runs. Raises SettingsError."""
        return bus.runs(**self._arguments(), limit=limit, oldest_first=oldest_first, archived=archived)

    def _arguments(self) -> dict[str, Any]:
        age_s = None if self.older_than is None else seconds(self.older_than)
        given: dict[str, Any] = {
            "state": self.states or None,
            "tenant": self.tenant,
            "provider": self.provider,
            "older_than": age_s,
            "prefix": self.prefix,
        }
        try:
            run_filter(**given)
        except ValueError as e:
            name, _, problem = str(e).partition(": ")
            raise SettingsError("options", f"--{name.replace('_', '-')}", problem) from None
        return given


def seconds(age: str) -> float:
    """The seconds of an age like ``90``, ``10m`` or ``1.5h``. Raises SettingsError."""
    if not (found := _AGE.fullmatch(age.strip())):
        problem = f"{age!r} is not an age: use a number followed by s, m, h or d (10m)"
        raise SettingsError("options", "--older-than", problem)
    return float(found[1]) * _UNITS_S[found[2]]


def age_text(age_ms: int) -> str:
    """An age in its largest unit: ``12s``, ``3m``, ``5h``, ``2d``."""
    age_s = max(0, age_ms) // 1000
    unit = next((unit for unit in ("d", "h", "m") if age_s >= _UNITS_S[unit]), "s")
    return f"{age_s // _UNITS_S[unit]}{unit}"


LOOK_S = 0.1
LOOKS = 20
"""How often to look for a run that may just have been sent, before it counts as unknown."""
AT_ONCE = 100
_ENDED = ("ended", *ENDED_STATES)


async def cancel(run: str, *, reason: str | None) -> int:
    """Cancel the run; return the exit code. An unknown run is cancelled too, for its request may still wait."""
    async with reaching.client() as bus:
        info = await _known(bus, run)
        if info and not info.is_open:
            print(output.safe(f"run {run} has ended already: {info.state}"), file=sys.stderr)
            return 0
        await bus.cancel(run, reason)
    await noted_apart("cancel", run=run, reason=reason)
    if info:
        return 0
    ending.print_error(f"{RunNotFound(run)}. A request of this run that still waits will be cancelled")
    return ending.OTHER


async def open_runs(choice: RunChoice) -> list[RunInfo]:
    """The open runs that the options choose, the oldest first. Raises SettingsError."""
    if choice.is_empty:
        problem = "name one, or choose runs by --state, --tenant, --provider, --older-than or --prefix"
        raise SettingsError("options", "RUN", problem)
    if not choice.states:
        choice = msgspec.structs.replace(choice, states=("open",))
    elif wrong := [state for state in choice.states if state in _ENDED]:
        problem = f"runs that are {wrong[0]} have ended: choose open, queued or running"
        raise SettingsError("options", "--state", problem)
    choice.check()
    async with reaching.client() as bus:
        return [info async for info in choice.runs(bus, oldest_first=True)]


async def cancel_all(found: Sequence[RunInfo], *, reason: str | None, as_json: bool) -> None:
    """Cancel these runs, and print the id of each."""
    async with reaching.client() as bus:
        for at in range(0, len(found), AT_ONCE):
            some = found[at : at + AT_ONCE]
            await asyncio.gather(*(bus.cancel(info.run, reason) for info in some))
            for info in some:
                _print_outcome(info, as_json)
    await noted_apart("cancel", runs=[info.run for info in found], reason=reason)


async def _known(bus: Client, run: str) -> RunInfo | None:
    for n in range(LOOKS):
        if info := (await bus.describe([run])).get(run):
            return info
        if n < LOOKS - 1:
            await asyncio.sleep(LOOK_S)
    return None


def _print_outcome(info: RunInfo, as_json: bool) -> None:
    if as_json:
        output.print_json({"run": info.run})
    else:
        print(output.safe(info.run), flush=True)
