"""The commands and their options. What each does is imported when it is called, so that every start is quick."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from tokenbus import __version__
from tokenbus.bus.keys import DEFAULT_PARTITIONS, MAX_PARTITIONS, TOPICS
from tokenbus_services.cli import exit_codes as ending
from tokenbus_services.cli.run_options import run_options
from tokenbus_services.cli.service_registry import SERVICES

if TYPE_CHECKING:
    from tokenbus.bus.keys import SubscribedTopic
    from tokenbus_services.cli.service_registry import ServiceName

_json = click.option("--json", "as_json", is_flag=True, help="One JSON event a line, as on the bus.")
_lines = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command, and end the process with its exit code (see `ending`)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale that cannot write a character must not end a command
    try:
        status = tokenbus.main(arguments, prog_name="tokenbus", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as e:
        context = e.ctx if isinstance(e, click.UsageError) else None
        ending.print_error(e.format_message() + (f" (see: {context.command_path} --help)" if context else ""))
        status = e.exit_code
    except (KeyboardInterrupt, click.Abort):
        status = ending.INTERRUPTED
    except BrokenPipeError:
        status = ending.abandon_stdout()
    except Exception as e:
        status = ending.report(e)
    sys.exit(status)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.option("-v", "--verbose", is_flag=True, help="Log everything, and show where an error came from.")
@click.pass_context
def tokenbus(context: click.Context, verbose: bool) -> None:
    """A message bus for language-model output.

    Settings come from the file that TOKENBUS_CONFIG names, else from the tokenbus.toml of the working directory, and
    from the environment (TOKENBUS_REDIS_URL, …).
    """
    from tokenbus_services.settings.find_file import use_file_here

    if verbose:
        os.environ["TOKENBUS_LOG_LEVEL"] = "debug"  # for the services that this command starts, too
    if (file := use_file_here(os.environ)) and context.invoked_subcommand in ("up", "worker"):
        click.echo(f"settings: {file}, of the working directory, for TOKENBUS_CONFIG is not set", err=True)


@tokenbus.command()
@click.argument("service", type=click.Choice(SERVICES), metavar="SERVICE")
@click.option("--host", help="Address of its HTTP pages; else http.host of the settings.")
@click.option("--port", type=click.IntRange(0, 65_535), help="Port, 0 for any free one; else the settings' one.")
@click.option("--mock-url", metavar="URL", help="Add the providers mock-…, which ask the mock provider at URL.")
@click.option("--console", is_flag=True, help="gateway: serve the console, also without a table [console].")
def worker(service: ServiceName, host: str | None, port: int | None, mock_url: str | None, console: bool) -> None:
    """Run SERVICE (fetcher, normalizer, parser, pipeline, tools, policy, blobs, recorder or gateway) until a signal.

    SIGTERM and Ctrl-C stop it in order; a second one ends it at once. Prints "ready SERVICE URL" when it can work.
    """
    from tokenbus_services.cli.worker.command import run

    run(service, host=host, port=port, mock_url=mock_url, console=console)


@tokenbus.command()
@click.option(
    "--scale",
    "scales",
    multiple=True,
    metavar="SERVICE=N",
    help="Workers of a service, 1 by default. May be repeated.",
)
@click.option("--services", metavar="NAME,…", help="Only these services.")
@click.option(
    "--data", type=click.Path(file_okay=False, path_type=Path), help="Data directory; else data_dir, .tokenbus."
)
@click.option(
    "--mock",
    "mock_provider",
    is_flag=True,
    help="Run the mock provider too, which needs no key: the providers mock-anthropic, mock-openai-chat, "
    "mock-openai-responses and mock-gemini.",
)
@click.option(
    "--chained",
    is_flag=True,
    help="Run fetcher, normalizer and parser as one process, the pipeline; else as stages.chained says.",
)
def up(scales: tuple[str, ...], services: str | None, data: Path | None, mock_provider: bool, chained: bool) -> None:
    """Run a server and all services as child processes until Ctrl-C.

    The server is one of its own unless TOKENBUS_REDIS_URL names another. Commands, and clients that are given no URL,
    find it from the same directory. Prints "ready" when all services are; a service that dies is started again.
    """
    from tokenbus_services.cli.up.command import run

    run(scales=scales, services=services, data=data, mock_provider=mock_provider, chained=chained)


@tokenbus.command()
@click.option(
    "--provider",
    help="Use the real API (anthropic, openai-chat, openai-responses, gemini) with the key in the environment.",
)
@click.option("--model", help="Its model; each API has a default.")
@click.option("--keep", is_flag=True, help="Keep the directory with settings, logs and data, and say where it is.")
def demo(provider: str | None, model: str | None, keep: bool) -> int:
    """Everything on this machine: one request with a tool, its text as it streams, then stop.

    Needs no key: a mock provider answers.
    """
    from tokenbus_services.cli.demo.command import run

    return run(provider=provider, model=model, keep=keep)


@tokenbus.command()
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
@_json
def send(
    file: BinaryIO | None, tools: tuple[str, ...], follow: bool, as_json: bool, **options: str | int | None
) -> int:
    """Publish a request and print the id of its run.

    FILE holds the request as JSON (- for stdin); without it, the options make one. Under `tokenbus up --mock` it needs
    neither: then the demo's question is sent, and its run shown.
    """
    from tokenbus_services.cli.send import send

    return asyncio.run(send(file, options, tools=tools, follow=follow, as_json=as_json))


@tokenbus.command()
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
@_json
def tail(topic: SubscribedTopic, runs: tuple[str, ...], kinds: tuple[str, ...], **how: Any) -> None:
    """Show the events of TOPIC (visible, chunks, blocks, runs or decisions), of all runs, from now on."""
    from tokenbus_services.cli.tail import tail

    asyncio.run(tail(topic, runs=runs, kinds=kinds, **how))


@tokenbus.command()
@run_options
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Show so many at the most.")
@click.option("--oldest-first", is_flag=True, help="Else the newest first.")
@_lines
def runs(limit: int, oldest_first: bool, as_json: bool, **choice: Any) -> None:
    """List runs, open and ended: id, state, age, tenant, provider and model, how they ended.

    The age of an open run counts from its acceptance, that of an ended one from its end. Ended runs are listed for as
    long as they are kept (retention.finished_run_s).
    """
    from tokenbus_services.cli.run_choice import RunChoice
    from tokenbus_services.cli.runs import listing

    asyncio.run(listing(RunChoice(**choice), limit=limit, oldest_first=oldest_first, as_json=as_json))


@tokenbus.command()
@click.argument("run")
@click.option("--after", type=click.IntRange(-1), default=-1, help="Only the events after this seq.")
@_json
def follow(run: str, after: int, as_json: bool) -> int:
    """Show RUN to its end, stored and live.

    Exit code: 0 completed, 4 incomplete, 5 failed, 6 cancelled.
    """
    from tokenbus_services.cli.follow import follow

    return asyncio.run(follow(run, after=after, as_json=as_json))


@tokenbus.command()
@click.argument("run", required=False)
@click.option("--reason", help="Told in the run's last event.")
@run_options
@click.option("--yes", is_flag=True, help="Of runs chosen by options: do not ask.")
@_lines
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
    elif yes or _agreed(f"Cancel {len(found)} run{'s' if len(found) > 1 else ''}?"):
        asyncio.run(cancel_all(found, reason=reason, as_json=as_json))
    return 0


@tokenbus.command()
@click.option("--every", "every_s", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Seconds.")
@click.option("--once", is_flag=True, help="Look once, at what happens meanwhile.")
@_lines
def top(every_s: float, once: bool, as_json: bool) -> None:
    """Show the deployment at work, until Ctrl-C: workers, partitions, lag, rates, open runs."""
    from tokenbus_services.cli.top.command import top

    asyncio.run(top(every_s=every_s, once=once, as_json=as_json))


@tokenbus.command()
@click.argument("number", type=click.IntRange(1, MAX_PARTITIONS), required=False)
@click.option("--wait", "wait_s", type=click.FloatRange(1), default=60, show_default=True, help="Seconds for workers.")
@click.option("--abandon", is_flag=True, help="Take back a change that was announced and not finished.")
@click.option("--forget", is_flag=True, help="Look for no more runs of earlier numbers; refused while some are kept.")
@_lines
def repartition(number: int | None, wait_s: float, abandon: bool, forget: bool, as_json: bool) -> None:
    """Change the number of partitions to NUMBER while the deployment works; without NUMBER, show it.

    New runs take the new number. Runs that began before go on where they are, and everybody finds both.
    """
    from tokenbus_services.cli import repartition

    if (number is not None) + abandon + forget > 1:
        raise click.UsageError("NUMBER, --abandon and --forget exclude each other.", click.get_current_context())
    if number is not None:
        asyncio.run(repartition.run(number, wait_s=wait_s, as_json=as_json))
    elif abandon:
        asyncio.run(repartition.give_up(as_json=as_json))
    elif forget:
        asyncio.run(repartition.forget(as_json=as_json))
    else:
        asyncio.run(repartition.show(as_json=as_json))


@tokenbus.command()
@click.option("--partitions", type=click.IntRange(1, MAX_PARTITIONS), default=DEFAULT_PARTITIONS, show_default=True)
@click.option("--nodes", type=click.IntRange(1, 1000), required=True, help="Masters of the Cluster.")
@_lines
def slots(partitions: int, nodes: int, as_json: bool) -> None:
    """Show how evenly partitions lie on the nodes of a Cluster, and which numbers lie evenly.

    Asks no server: each node is taken to have an equal range of slots, as `--cluster create` gives them.
    """
    from tokenbus_services.cli.slots import show

    show(partitions, nodes, as_json=as_json)


@tokenbus.command()
@click.option("--keep", is_flag=True, help="Go on until Ctrl-C: load them again where the server has forgotten them.")
@click.option("--list", "listing", is_flag=True, help="Only show them, as name and SHA-1; no server is asked.")
def scripts(keep: bool, listing: bool) -> None:
    """Load the bus's scripts into the server.

    Needed only where users of the server may run no others: deploy/acl.
    """
    from tokenbus_services.cli.scripts import load_scripts, show

    if listing:
        show()
    else:
        asyncio.run(load_scripts(keep=keep))


@tokenbus.group()
def dead() -> None:
    """What could not be worked: entries of the dead stream, with reason, origin and bytes."""


def _entries(context: click.Context, parameter: click.Parameter, values: tuple[str, ...] | str) -> Any:
    for value in [values] if isinstance(values, str) else values:
        if not re.fullmatch(r"[0-9]+-[0-9]+", value, re.ASCII) or any(int(n) >= 2**64 for n in value.split("-")):
            raise click.BadParameter(f"{value!r} is no id of an entry; `tokenbus dead list` shows them.")
    return values


def _some_or_all(entries: tuple[str, ...], everything: bool) -> tuple[str, ...]:
    if bool(entries) == everything:
        raise click.UsageError("Name entries, or all with --all.", click.get_current_context())
    return entries


@dead.command("list")
@click.option("--most", type=click.IntRange(1), default=50, show_default=True, help="So many, the newest first.")
@_lines
def dead_list(most: int, as_json: bool) -> None:
    """Show the newest entries."""
    from tokenbus_services.cli.dead.command import listing

    asyncio.run(listing(most=most, as_json=as_json))


@dead.command("show")
@click.argument("entry", callback=_entries)
@click.option("--raw", is_flag=True, help="Its bytes alone, as they are; not onto a terminal.")
@_lines
def dead_show(entry: str, raw: bool, as_json: bool) -> None:
    """Show ENTRY whole: reason, origin and bytes."""
    from tokenbus_services.cli.dead.command import show

    asyncio.run(show(entry, as_json=as_json, raw=raw))


@dead.command("retry")
@click.argument("entries", nargs=-1, callback=_entries, metavar="[ENTRY]…")
@click.option("--all", "everything", is_flag=True, help="All entries.")
@_lines
def dead_retry(entries: tuple[str, ...], everything: bool, as_json: bool) -> int:
    """Send the request behind each ENTRY again, as a new run, and take the entry away.

    Sending it twice starts one run only. An entry from which no request can be made stays, and the reason is printed.

    Exit code: 1 where an entry stays.
    """
    from tokenbus_services.cli.dead.command import retry

    return asyncio.run(retry(_some_or_all(entries, everything), as_json=as_json))


@dead.command("drop")
@click.argument("entries", nargs=-1, callback=_entries, metavar="[ENTRY]…")
@click.option("--all", "everything", is_flag=True, help="All entries; asks first.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_lines
def dead_drop(entries: tuple[str, ...], everything: bool, yes: bool, as_json: bool) -> None:
    """Delete each ENTRY."""
    from tokenbus_services.cli.dead.command import count, drop

    chosen = _some_or_all(entries, everything)
    if everything and not yes and not _agreed(f"Delete {asyncio.run(count())} dead entries for good?"):
        return
    asyncio.run(drop(chosen, as_json=as_json))


def _agreed(question: str) -> bool:
    """What the person at the terminal says. Raises UsageError if nobody is there to ask."""
    if not sys.stdin.isatty():
        raise click.UsageError("Needs --yes, for there is no terminal to ask at.")
    return click.confirm(question, err=True)


@tokenbus.group(invoke_without_command=True)
@click.pass_context
@_lines
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


@tokenbus.command()
@click.argument("run", required=False)
@click.option("--file", type=click.Path(dir_okay=False, path_type=Path), help="An exported record, in place of RUN.")
@_json
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


@tokenbus.command()
@click.option("--json", "as_json", is_flag=True, help="The findings as one JSON array.")
@click.option("--providers", "ask_providers", is_flag=True, help="Ask each provider's address too; no key is sent.")
def doctor(as_json: bool, ask_providers: bool) -> int:
    """Look at settings, server, workers and queues, and say what is wrong and what to do.

    Exit code: 0 all well, 1 something is wrong.
    """
    from tokenbus_services.cli.doctor.command import run

    return run(as_json=as_json, ask_providers=ask_providers)


@tokenbus.command()
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="The findings as one JSON array.")
def check(file: Path | None, as_json: bool) -> int:
    """Check the settings in FILE, else those that services would use here: values, names, ports, addresses, secrets.

    Tools, policies, blob loaders and plug-ins are imported, but not called. Asks no server.

    Exit code: 0 all well, 1 something is wrong.
    """
    from tokenbus_services.cli.doctor.check_file import run

    return run(file, as_json=as_json)


@tokenbus.group()
def keys() -> None:
    """Keys of the gateway's clients. A key is shown once, when it is made; only its hash is kept."""


def _roles(context: click.Context, option: click.Parameter, text: str | None) -> tuple[str, ...]:
    """The roles, which `rules_from` checks."""
    return tuple(role.strip() for role in (text or "").split(",") if role.strip())


_lifetime = click.option("--days", type=click.FloatRange(min=0, min_open=True), help="Lifetime; else without end.")


@keys.command("create")
@click.argument("name")
@click.option("--tenant", default="", help="Whose runs they are; else the key's id.")
@click.option("--model", "models", multiple=True, help="A model or alias that it may use (repeatable; * for any text).")
@click.option("--surface", "surfaces", multiple=True, help="A protocol that it may use (repeatable).")
@click.option("--policy", "policies", multiple=True, help="A policy that judges all of its runs (repeatable).")
@click.option("--max-tokens", type=click.IntRange(1), help="Largest max_tokens of a request.")
@click.option("--rpm", "rpm_limit", type=click.IntRange(1), help="Requests per minute.")
@click.option("--tpm", "tpm_limit", type=click.IntRange(1), help="Tokens per minute.")
@click.option("--parallel", "max_parallel_requests", type=click.IntRange(1), help="Answers in progress at once.")
@click.option("--budget", "max_budget", type=click.FloatRange(min=0, min_open=True), help="Spend per --per, or in all.")
@click.option("--per", "budget_duration", type=click.Choice(["day", "week", "month"]), help="Period of the budget.")
@click.option(
    "--console",
    callback=_roles,
    metavar="ROLE,…",
    help="What it may do in the console: see_runs, see_content, act, admin.",
)
@click.option("--operator", is_flag=True, help="May see the runs of all tenants.")
@click.option("--settings", "in_settings", is_flag=True, help="Print a table for the settings, and store nothing.")
@_lifetime
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def keys_create(name: str, in_settings: bool, days: float | None, as_json: bool, **rules: Any) -> None:
    """Make a key for the client NAME, and print it."""
    from tokenbus_services.cli.keys.command import create, for_settings, rules_from

    if in_settings:
        for_settings(name, rules_from(rules))
    else:
        lifetime_s = None if days is None else days * 86_400
        asyncio.run(create(rules_from(rules), name=name, lifetime_s=lifetime_s, as_json=as_json))


@keys.command("list")
@_lines
def keys_list(as_json: bool) -> None:
    """List all keys: those of the settings, and those that commands and the admin API made."""
    from tokenbus_services.cli.keys.command import listing

    asyncio.run(listing(as_json=as_json))


@keys.command("rotate")
@click.argument("key_id", metavar="KEY")
@click.option("--grace-hours", type=click.FloatRange(min=0), default=24.0, help="How long earlier keys stay valid.")
@_lifetime
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def keys_rotate(key_id: str, grace_hours: float, days: float | None, as_json: bool) -> None:
    """Make a further key with the id KEY, and print it. Limits, budget and spend go on."""
    from tokenbus_services.cli.keys.command import rotate

    lifetime_s = None if days is None else days * 86_400
    asyncio.run(rotate(key_id, grace_s=grace_hours * 3600, lifetime_s=lifetime_s, as_json=as_json))


@keys.command("revoke")
@click.argument("key_id", metavar="KEY")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def keys_revoke(key_id: str, as_json: bool) -> None:
    """Refuse the key with the id KEY from now on. Its open runs go on."""
    from tokenbus_services.cli.keys.command import revoke

    asyncio.run(revoke(key_id, as_json=as_json))


@tokenbus.command()
@click.argument("key_id", metavar="[KEY]", required=False)
@click.option("--days", type=click.IntRange(1, 366), default=30, show_default=True, help="Days to add up.")
@_lines
def spend(key_id: str | None, days: int, as_json: bool) -> None:
    """Show what the key with the id KEY, or each key, spent. Exact in --json: by day, and by price."""
    from tokenbus_services.cli.spend.command import show

    asyncio.run(show(key_id=key_id, days=days, as_json=as_json))
