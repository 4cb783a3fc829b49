"""Commands that publish, show and stop runs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from tokenbus.bus.keys import TOPICS
from tokenbus_services.cli.commands.options import agreed, json_events, json_lines
from tokenbus_services.cli.run_options import run_options

if TYPE_CHECKING:
    from tokenbus.bus.keys import SubscribedTopic


@click.command()
@click.argument("file", required=False, type=click.File("rb"))
@click.option("--provider", help="Name of a configured provider; under `tokenbus up --mock`, the mock provider.")
@click.option("--model", help="Its model.")
@click.option("--text", help="The user's message.")
@click.option("--system", help="The system prompt.")
@click.option(
    "--tool", "tools", multiple=True, help="Name of a declared tool that the model may call; may be repeated."
)
@click.option("--max-tokens", type=click.IntRange(1))
@click.option("--id", help="The run's id; sent again, it is the same run.")
@click.option("--follow", is_flag=True, help="Show the run as it streams; its id goes to stderr.")
@json_events
def send(
    file: BinaryIO | None, tools: tuple[str, ...], follow: bool, as_json: bool, **options: str | int | None
) -> int:
    """Publish a request and print the id of its run.

    FILE holds the request as JSON (- for stdin); without it, the options make one. Under `tokenbus up --mock` it needs
    neither: then the demo's question is sent, and its run shown.
    """
    from tokenbus_services.cli.send import send

    return asyncio.run(send(file, options, tools=tools, follow=follow, as_json=as_json))


@click.command()
@click.argument("topic", type=click.Choice(TOPICS), metavar="TOPIC")
@click.option("--group", help="Share the events with other workers of this group.")
@click.option(
    "--from",
    "begin",
    type=click.Choice(["now", "start"]),
    default="now",
    help="start: first everything that is kept (of a group: if it is new).",
)
@click.option("--run", "runs", multiple=True, help="Only the events of this run; may be repeated.")
@click.option(
    "--kind", "kinds", multiple=True, help="Only this type of event (failed), or kind of block (text); may be repeated."
)
@json_events
def tail(topic: SubscribedTopic, runs: tuple[str, ...], kinds: tuple[str, ...], **how: Any) -> None:
    """Show the events of TOPIC (visible, chunks, blocks, runs or decisions), of all runs, from now on."""
    from tokenbus_services.cli.tail import tail

    asyncio.run(tail(topic, runs=runs, kinds=kinds, **how))


@click.command()
@run_options
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Show so many at the most.")
@click.option("--oldest-first", is_flag=True, help="Else the newest first.")
@json_lines
def runs(limit: int, oldest_first: bool, as_json: bool, **choice: Any) -> None:
    """List runs, open and ended: id, state, age, tenant, provider and model, how they ended.

    The age of an open run counts from its acceptance, that of an ended one from its end. Ended runs are listed for as
    long as they are kept (retention.finished_run_s).
    """
    from tokenbus_services.cli.run_choice import RunChoice
    from tokenbus_services.cli.runs import listing

    asyncio.run(listing(RunChoice(**choice), limit=limit, oldest_first=oldest_first, as_json=as_json))


@click.command()
@click.argument("run")
@click.option("--after", type=click.IntRange(-1), default=-1, help="Only the events after this seq.")
@json_events
def follow(run: str, after: int, as_json: bool) -> int:
    """Show RUN to its end, stored and live.

    Exit code: 0 completed, 4 incomplete, 5 failed, 6 cancelled.
    """
    from tokenbus_services.cli.follow import follow

    return asyncio.run(follow(run, after=after, as_json=as_json))


@click.command()
@click.argument("run", required=False)
@click.option("--reason", help="Told in the run's last event.")
@run_options
@click.option("--yes", is_flag=True, help="Of runs chosen by options: do not ask.")
@json_lines
def cancel(run: str | None, reason: str | None, yes: bool, as_json: bool, **choice: Any) -> int:
    """Stop RUN, at the provider too; or all open runs that the options choose, after asking.

    Exit code: 1 if RUN is unknown.
    """
    from tokenbus_services.cli.cancel import cancel, cancel_all, open_runs
    from tokenbus_services.cli.run_choice import RunChoice

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
