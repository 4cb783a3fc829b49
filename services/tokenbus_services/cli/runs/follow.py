"""`tokenbus follow`: shows one run."""

from __future__ import annotations

from tokenbus import Client
from tokenbus.errors import RunError
from tokenbus.events.public import RunEnd
from tokenbus_services.cli import connect as reaching
from tokenbus_services.cli import exit_codes as ending
from tokenbus_services.cli.render import event_text as wording
from tokenbus_services.cli.render.output import Show, showing


async def follow(run: str, *, after: int, as_json: bool) -> int:
    """Show a run from a cursor to its end; return the exit code for its outcome."""
    async with reaching.client() as bus:
        with showing(as_json=as_json) as show:
            return await show_run(bus, run, show, after=after)


async def show_run(bus: Client, run: str, show: Show, *, after: int = -1, wait_s: float = 10.0) -> int:
    """Show a run's events after ``after``; return the exit code for its outcome."""
    async for event in bus.follow(run, after=after, wait_s=wait_s):
        show(event)
        if isinstance(event, RunEnd):
            return ending.RUN_STATUS[wording.name(event)]
    try:  # the cursor is past the end
        await bus.result(run)
    except RunError as e:
        return ending.code_of(e)
    return 0
