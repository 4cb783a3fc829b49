"""Commands that publish, show and stop runs."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from tokenbus.bus.keys import TOPICS
from tokenbus_services.cli.runs.completion import provider_names, run_ids
from tokenbus_services.cli.runs.run_options import run_options

json_events = click.option("--json", "as_json", is_flag=True, help="Print one JSON event per line, as on the bus.")
json_lines = click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")


def agreed(question: str) -> bool:
    """The user's answer at the terminal. Raises UsageError if stdin is not a terminal."""
    if not sys.stdin.isatty():
        raise click.UsageError("Needs --yes, because there is no terminal to ask at.")
    return click.confirm(question, err=True)


if TYPE_CHECKING:
    from tokenbus.bus.keys import SubscribedTopic


@click.command()
@click.argument("file", required=False, type=click.File("rb"))
@click.option(
    "--provider",
    shell_complete=provider_names,
    help="Name of a configured provider. Default under `tokenbus up --mock`: the mock provider.",
)
@click.option("--model", help="Model of the provider.")
@click.option("--text", help="The user's message.")
@click.option("--system", help="The system prompt.")
@click.option("--tool", "tools", multiple=True, help="Name of a declared tool that the model may call. Repeatable.")
@click.option("--max-tokens", type=click.IntRange(1))
@click.option("--id", help="The run's id. Sending the same id again does not start a second run.")
@click.option("--follow", is_flag=True, help="Show the run as it streams; print its id to stderr.")
@json_events
def send(
    file: BinaryIO | None, tools: tuple[str, ...], follow: bool, as_json: bool, **options: str | int | None
) -> int:
    """Publish a request and print the id of its run.

    FILE contains the request as JSON (- for stdin); without it, the options define the request. Under
    `tokenbus up --mock` neither is needed: the command sends the demo's question and shows its run.
    """
    from tokenbus_services.cli.runs.send import send

    return asyncio.run(send(file, options, tools=tools, follow=follow, as_json=as_json))


@click.command()
@click.argument("topic", type=click.Choice(TOPICS), metavar="TOPIC")
@click.option("--group", help="Share the events with other processes of this group.")
@click.option(
    "--from",
    "begin",
    type=click.Choice(["now", "start"]),
    default="now",
    help="start: begin with the oldest event kept (for a group: only if it is new).",
)
@click.option("--run", "runs", multiple=True, shell_complete=run_ids, help="Only the events of this run. Repeatable.")
@click.option(
    "--kind", "kinds", multiple=True, help="Only this type of event (failed), or kind of block (text). Repeatable."
)
@json_events
def tail(topic: SubscribedTopic, runs: tuple[str, ...], kinds: tuple[str, ...], **how: Any) -> None:
    """Show new events of all runs on TOPIC (visible, chunks, blocks, runs or decisions)."""
    from tokenbus_services.cli.runs.send import tail

    asyncio.run(tail(topic, runs=runs, kinds=kinds, **how))


@click.command()
@run_options
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Maximum number of runs to show.")
@click.option("--oldest-first", is_flag=True, help="Default: the newest first.")
@json_lines
def runs(limit: int, oldest_first: bool, as_json: bool, **choice: Any) -> None:
    """List open and ended runs: id, state, age, tenant, provider, model, and how they ended.

    The age is the time since the acceptance of an open run, or since the end of an ended one. Ended runs are listed
    for as long as they are kept (retention.finished_run_s).
    """
    from tokenbus_services.cli.runs.list_runs import listing
    from tokenbus_services.cli.runs.run_choice import RunChoice

    asyncio.run(listing(RunChoice(**choice), limit=limit, oldest_first=oldest_first, as_json=as_json))


@click.command()
@click.argument("run", shell_complete=run_ids)
@click.option("--after", type=click.IntRange(-1), default=-1, help="Show only the events after this seq.")
@json_events
def follow(run: str, after: int, as_json: bool) -> int:
    """Show all events of RUN, stored and live, to its end.

    Exit code: 0 completed, 4 incomplete, 5 failed, 6 cancelled.
    """
    from tokenbus_services.cli.runs.follow import follow

    return asyncio.run(follow(run, after=after, as_json=as_json))


@click.command()
@click.argument("run", required=False, shell_complete=run_ids)
@click.option("--reason", help="Reason, repeated in the run's last event.")
@run_options
@click.option("--yes", is_flag=True, help="Do not ask before cancelling runs chosen by options.")
@json_lines
def cancel(run: str | None, reason: str | None, yes: bool, as_json: bool, **choice: Any) -> int:
    """Cancel RUN, also at the provider; or all open runs that match the options, after asking.

    Exit code: 1 if RUN is unknown.
    """
    from tokenbus_services.cli.runs.cancel import cancel, cancel_all, open_runs
    from tokenbus_services.cli.runs.run_choice import RunChoice

    chosen = RunChoice(**choice)
    if run is not None and not chosen.is_empty:
        raise click.UsageError("Name a RUN, or choose runs by options.", click.get_current_context())
    if run is not None:
        return asyncio.run(cancel(run, reason=reason))
    found = asyncio.run(open_runs(chosen))
    if not found:
        click.echo("no such runs", err=True)
    elif yes or agreed(f"Cancel {len(found)} run{'s' if len(found) > 1 else ''}?"):
        asyncio.run(cancel_all(found, reason=reason, as_json=as_json))
    return 0
