"""`tokenbus cancel`: stops one run, or all that are open and match."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import msgspec

from tokenbus import Client, RunInfo
from tokenbus.errors import RunNotFound, SettingsError
from tokenbus.events.run_info import ENDED_STATES
from tokenbus_services.cli import connect as reaching
from tokenbus_services.cli import exit_codes as ending
from tokenbus_services.cli.render import output
from tokenbus_services.cli.runs.run_choice import RunChoice

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


async def _known(bus: Client, run: str) -> RunInfo | None:
    for n in range(LOOKS):
        if info := (await bus.describe([run])).get(run):
            return info
        if n < LOOKS - 1:
            await asyncio.sleep(LOOK_S)
    return None


def _print_outcome(info: RunInfo, as_json: bool) -> None:
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode({"run": info.run}) + b"\n")
        sys.stdout.buffer.flush()
    else:
        print(output.safe(info.run), flush=True)
