"""Commands about runs: publish, show and stop them; their debug records and dead letters."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import click

from tokenbus.bus.keys import TOPICS
from tokenbus_services.cli.runs.completion import provider_names, run_ids

if TYPE_CHECKING:
    from tokenbus.bus.keys import SubscribedTopic
    from tokenbus.events.requests import WhenBusy

C = TypeVar("C", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--state",
        "states",
        multiple=True,
        help="open (queued, running), ended (completed, incomplete, failed, cancelled), or a single state. Repeatable.",
    ),
    click.option("--tenant", help="Only runs of this tenant."),
    click.option("--provider", shell_complete=provider_names, help="Only runs whose last provider was this one."),
    click.option("--older-than", metavar="AGE", help="Only runs older than this: 90s, 10m, 1h, 2d."),
    click.option("--prefix", help="Only runs whose id begins with this."),
)


def run_options(command: C) -> C:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


json_events = click.option("--json", "as_json", is_flag=True, help="Print one JSON event per line, as on the bus.")
json_lines = click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")


def agreed(question: str) -> bool:
    """The user's answer at the terminal. Raises UsageError if stdin is not a terminal."""
    if not sys.stdin.isatty():
        raise click.UsageError("Needs --yes, because there is no terminal to ask at.")
    return click.confirm(question, err=True)


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
    """Show new events of all runs on TOPIC (visible, chunks, blocks, runs, decisions or sessions)."""
    from tokenbus_services.cli.runs.send import tail

    asyncio.run(tail(topic, runs=runs, kinds=kinds, **how))


@click.command()
@run_options
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Maximum number of runs to show.")
@click.option("--oldest-first", is_flag=True, help="Default: the newest first.")
@click.option("--archived", is_flag=True, help="Also runs that only the archive has.")
@json_lines
def runs(limit: int, oldest_first: bool, archived: bool, as_json: bool, **choice: Any) -> None:
    """List open and ended runs: id, state, age, tenant, provider, model, and how they ended.

    The age is the time since the acceptance of an open run, or since the end of an ended one. Ended runs are listed
    for as long as they are kept (retention.finished_run_s; with --archived: archive.keep_s).
    """
    from tokenbus_services.cli.runs.list_runs import RunChoice, listing

    chosen = RunChoice(**choice)
    asyncio.run(listing(chosen, limit=limit, oldest_first=oldest_first, archived=archived, as_json=as_json))


@click.command()
@click.argument("name", required=False)
@click.option(
    "--provider",
    shell_complete=provider_names,
    help="Name of a configured provider. Default under `tokenbus up --mock`: the mock provider.",
)
@click.option("--model", help="Model of the provider.")
@click.option("--system", help="The system prompt.")
@click.option("--tool", "tools", multiple=True, help="Name of a declared tool that the model may call. Repeatable.")
@click.option("--as", "me", metavar="AUTHOR", help="Your name in the conversation. Default: that of your account.")
@click.option("--tenant", default="", help="The tenant that the session belongs to.")
@click.option(
    "--when-busy",
    type=click.Choice(["steer", "enqueue", "interrupt", "reject"]),
    default="steer",
    show_default=True,
    help="For a new session: what becomes of a message that is typed while the model speaks.",
)
def chat(
    name: str | None,
    tools: tuple[str, ...],
    me: str | None,
    tenant: str,
    when_busy: WhenBusy,
    **options: str | None,
) -> int:
    """Talk with a model in the terminal, in the session NAME; without it, in a new one.

    You may type while the model speaks. Ctrl-C interrupts the answer, and leaves at an empty line. The session stays:
    `tokenbus chat NAME` goes on with it, also in two terminals at once. `/help` lists what else you can type.

    If stdin is no terminal, each line of it is a message; the answers go to stdout. Exit code: that of the last answer.
    """
    from tokenbus_services.cli.chat.command import chat

    return asyncio.run(chat(name, options, tools=tools, me=me, tenant=tenant, when_busy=when_busy))


@click.command()
@click.argument("run", shell_complete=run_ids)
@click.option("--after", metavar="SEQ", help="Show only the events after this seq; with --tree, after this cursor.")
@click.option("--tree", is_flag=True, help="Show the events of all child runs below RUN too, in one order.")
@json_events
def follow(run: str, after: str | None, tree: bool, as_json: bool) -> int:
    """Show all events of RUN, stored and live, to its end.

    With --tree and --json, each event has the `path` to its run and the `cursor` behind it.

    Exit code: 0 completed, 4 incomplete, 5 failed, 6 cancelled.
    """
    from tokenbus_services.cli.runs.send import follow, follow_tree

    if tree:
        return asyncio.run(follow_tree(run, after=after, as_json=as_json))
    if after is not None and not (after.isdecimal() or after == "-1"):
        raise click.BadParameter("must be the seq of an event", param_hint="--after")
    return asyncio.run(follow(run, after=-1 if after is None else int(after), as_json=as_json))


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
    from tokenbus_services.cli.runs.list_runs import RunChoice, cancel, cancel_all, open_runs

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
