"""`tokenbus dead …`: the entries of the dead stream."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import click

from tokenbus_services.cli.commands.runs import agreed, json_lines


@click.group()
def dead() -> None:
    """Handle dead letters: entries that could not be processed, with reason, origin and bytes."""


def _entries(context: click.Context, parameter: click.Parameter, values: tuple[str, ...] | str) -> Any:
    for value in [values] if isinstance(values, str) else values:
        if not re.fullmatch(r"[0-9]+-[0-9]+", value, re.ASCII) or any(int(n) >= 2**64 for n in value.split("-")):
            raise click.BadParameter(f"{value!r} is not the id of an entry; `tokenbus dead list` shows the ids.")
    return values


def _some_or_all(entries: tuple[str, ...], everything: bool) -> tuple[str, ...]:
    if bool(entries) == everything:
        raise click.UsageError("Name entries, or use --all.", click.get_current_context())
    return entries


@dead.command("list")
@click.option(
    "--most", type=click.IntRange(1), default=50, show_default=True, help="Maximum entries to show, newest first."
)
@json_lines
def dead_list(most: int, as_json: bool) -> None:
    """List the newest entries."""
    from tokenbus_services.cli.dead import listing

    asyncio.run(listing(most=most, as_json=as_json))


@dead.command("show")
@click.argument("entry", callback=_entries)
@click.option("--raw", is_flag=True, help="Write only its bytes, unchanged; not to a terminal.")
@json_lines
def dead_show(entry: str, raw: bool, as_json: bool) -> None:
    """Show ENTRY in full: reason, origin and bytes."""
    from tokenbus_services.cli.dead import show

    asyncio.run(show(entry, as_json=as_json, raw=raw))


@dead.command("retry")
@click.argument("entries", nargs=-1, callback=_entries, metavar="[ENTRY]…")
@click.option("--all", "everything", is_flag=True, help="All entries.")
@json_lines
def dead_retry(entries: tuple[str, ...], everything: bool, as_json: bool) -> int:
    """Publish the request of each ENTRY again, as a new run, and delete the entry.

    The event of a group of subscribers is given back to that group instead: its handlers get it once more. Repeating
    the command starts only one run. An entry without a usable request stays, and the reason is printed.

    Exit code: 1 if an entry stays.
    """
    from tokenbus_services.cli.dead import retry

    return asyncio.run(retry(_some_or_all(entries, everything), as_json=as_json))


@dead.command("drop")
@click.argument("entries", nargs=-1, callback=_entries, metavar="[ENTRY]…")
@click.option("--all", "everything", is_flag=True, help="All entries; asks first.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_lines
def dead_drop(entries: tuple[str, ...], everything: bool, yes: bool, as_json: bool) -> None:
    """Delete each ENTRY."""
    from tokenbus_services.cli.dead import count, drop

    chosen = _some_or_all(entries, everything)
    if everything and not yes and not agreed(f"Delete {asyncio.run(count())} dead entries permanently?"):
        return
    asyncio.run(drop(chosen, as_json=as_json))
