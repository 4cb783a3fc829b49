"""`tokenbus records …` and `tokenbus replay`: the debug records of runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from tokenbus_services.cli.commands.runs import json_events, json_lines


@click.group(invoke_without_command=True)
@click.pass_context
@json_lines
def records(context: click.Context, as_json: bool) -> None:
    """List recorded runs, newest first: time, run, how it ended, provider, model, sizes."""
    if context.invoked_subcommand is None:
        from tokenbus_services.cli.records import listing

        asyncio.run(listing(as_json=as_json))


@records.command("show")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="The record as one JSON object.")
def records_show(run: str, as_json: bool) -> None:
    """Show the record of RUN: its request, and the provider's answer in each attempt."""
    from tokenbus_services.cli.records import show

    show(run, as_json=as_json)


@records.command("export")
@click.argument("run")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def records_export(run: str, file: Path) -> None:
    """Write the record of RUN to FILE, for `tokenbus replay --file` on any machine."""
    from tokenbus_services.cli.records import export

    export(run, file)


@click.command()
@click.argument("run", required=False)
@click.option(
    "--file", type=click.Path(dir_okay=False, path_type=Path), help="An exported record to use instead of RUN."
)
@json_events
def replay(run: str | None, file: Path | None, as_json: bool) -> int:
    """Feed the recorded raw stream of RUN to decoder and parser again, locally, and show the result.

    Exit code: 0 if the result equals the record, 1 if it differs; stderr shows the difference.
    """
    from tokenbus_services.cli.records import replay_file, replay_run

    if file and not run:
        return replay_file(file, as_json=as_json)
    if run and not file:
        return replay_run(run, as_json=as_json)
    raise click.UsageError("Name a RUN or a --file.", click.get_current_context())
