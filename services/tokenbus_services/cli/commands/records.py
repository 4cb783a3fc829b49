"""`tokenbus records …` and `tokenbus replay`: the debug records of runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from tokenbus_services.cli.commands.options import json_events, json_lines


@click.group(invoke_without_command=True)
@click.pass_context
@json_lines
def records(context: click.Context, as_json: bool) -> None:
    """List the recorded runs, the newest first: when, run, how it ended, provider and model, sizes."""
    if context.invoked_subcommand is None:
        from tokenbus_services.cli.records import listing

        asyncio.run(listing(as_json=as_json))


@records.command("show")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="The record as one JSON object.")
def records_show(run: str, as_json: bool) -> None:
    """Show what was recorded of RUN: its request, and what the provider sent in each attempt."""
    from tokenbus_services.cli.records import show

    show(run, as_json=as_json)


@records.command("export")
@click.argument("run")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def records_export(run: str, file: Path) -> None:
    """Write what was recorded of RUN into FILE, for `tokenbus replay --file` anywhere."""
    from tokenbus_services.cli.records import export

    export(run, file)


@click.command()
@click.argument("run", required=False)
@click.option("--file", type=click.Path(dir_okay=False, path_type=Path), help="An exported record, in place of RUN.")
@json_events
def replay(run: str | None, file: Path | None, as_json: bool) -> int:
    """Feed the recorded raw stream of RUN through decoder and parser again, here, and show what comes out.

    Exit code: 0 where that is what was recorded, 1 where it differs; stderr tells how.
    """
    from tokenbus_services.cli.records import replay_file, replay_run

    if file and not run:
        return replay_file(file, as_json=as_json)
    if run and not file:
        return replay_run(run, as_json=as_json)
    raise click.UsageError("Name a RUN or a --file.", click.get_current_context())
