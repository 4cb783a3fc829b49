"""Commands that run a deployment or a part of it, watch it, and change it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tokenbus.bus.keys import DEFAULT_PARTITIONS, MAX_PARTITIONS
from tokenbus_services.cli.commands.runs import agreed, json_lines
from tokenbus_services.cli.service_registry import SERVICES

if TYPE_CHECKING:
    from tokenbus_services.cli.service_registry import ServiceName


@click.command()
@click.option(
    "--every", "every_s", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Seconds between samples."
)
@click.option("--once", is_flag=True, help="Take one sample and exit.")
@json_lines
def top(every_s: float, once: bool, as_json: bool) -> None:
    """Show workers, partitions, lag, rates and open runs, live until Ctrl-C. Arrow keys scroll the partitions."""
    from tokenbus_services.cli.top import top

    asyncio.run(top(every_s=every_s, once=once, as_json=as_json))


@click.command()
@click.argument("number", type=click.IntRange(1, MAX_PARTITIONS), required=False)
@click.option(
    "--wait", "wait_s", type=click.FloatRange(1), default=60, show_default=True, help="Seconds to wait for workers."
)
@click.option("--abandon", is_flag=True, help="Undo a change that was announced and not finished.")
@click.option("--forget", is_flag=True, help="Stop looking for runs of earlier numbers; refused while some are kept.")
@json_lines
def repartition(number: int | None, wait_s: float, abandon: bool, forget: bool, as_json: bool) -> None:
    """Change the number of partitions to NUMBER while the deployment runs. Without NUMBER, show it.

    New runs use the new number. Earlier runs stay in their partition; workers and clients find both.
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


@click.command()
@click.option("--partitions", type=click.IntRange(1, MAX_PARTITIONS), default=DEFAULT_PARTITIONS, show_default=True)
@click.option("--nodes", type=click.IntRange(1, 1000), required=True, help="Number of masters of the Cluster.")
@json_lines
def slots(partitions: int, nodes: int, as_json: bool) -> None:
    """Show how evenly partitions are spread over the nodes of a Cluster, and which numbers spread evenly.

    Needs no server. Assumes that each node has an equal range of slots, as `--cluster create` assigns them.
    """
    from tokenbus_services.cli.slots import show

    show(partitions, nodes, as_json=as_json)


@click.command()
@click.option("--keep", is_flag=True, help="Run until Ctrl-C, and load scripts again if the server has lost them.")
@click.option("--list", "listing", is_flag=True, help="Only list them by name and SHA-1. Needs no server.")
def scripts(keep: bool, listing: bool) -> None:
    """Load the bus's scripts into the server.

    Only needed if the server's users may not load scripts themselves: deploy/acl.
    """
    from tokenbus_services.cli.scripts import load_scripts, show

    if listing:
        show()
    else:
        asyncio.run(load_scripts(keep=keep))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="The findings as one JSON array.")
@click.option(
    "--providers",
    "ask_providers",
    is_flag=True,
    help="Also check that each provider's address answers; no key is sent.",
)
@click.option(
    "--keys",
    "try_keys",
    is_flag=True,
    help="Also ask each provider for its list of models, with its key; that costs nothing.",
)
def doctor(as_json: bool, ask_providers: bool, try_keys: bool) -> int:
    """Check settings, server, workers and queues; report what is wrong and what to do.

    Exit code: 0 if all is well, 1 if something is wrong.
    """
    from tokenbus_services.cli.doctor.command import run

    return run(as_json=as_json, ask_providers=ask_providers, try_keys=try_keys)


@click.command()
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="The findings as one JSON array.")
def check(file: Path | None, as_json: bool) -> int:
    """Check the settings in FILE (default: those that services would use here): values, names, ports, secrets.

    Tools, policies, blob loaders and plug-ins are imported, but not called. Needs no server.

    Exit code: 0 if all is well, 1 if something is wrong.
    """
    from tokenbus_services.cli.doctor.check_file import run

    return run(file, as_json=as_json)


def _name_settings() -> None:
    """Name the settings file that the command found by itself."""
    if file := click.get_current_context().obj:
        click.echo(f"settings: {file}, in the working directory, because TOKENBUS_CONFIG is not set", err=True)


@click.command()
@click.argument("service", type=click.Choice(SERVICES), metavar="SERVICE")
@click.option("--host", help="Address of its HTTP pages. Default: http.host in the settings.")
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    help="Port of its HTTP pages; 0: any free one. Default: as in the settings.",
)
@click.option("--mock-url", metavar="URL", help="Add the providers mock-…, which call the mock provider at URL.")
@click.option("--console", is_flag=True, help="gateway: serve the console, even without a table [console].")
def worker(service: ServiceName, host: str | None, port: int | None, mock_url: str | None, console: bool) -> None:
    """Run SERVICE (fetcher, normalizer, parser, pipeline, tools, policy, blobs, recorder, webhooks, gateway) until a
    signal.

    SIGTERM and Ctrl-C shut it down; a second one ends it at once. Prints "ready SERVICE URL" when it can work.
    """
    from tokenbus_services.cli.worker import run

    _name_settings()
    run(service, host=host, port=port, mock_url=mock_url, console=console)


@click.command()
@click.option(
    "--scale",
    "scales",
    multiple=True,
    metavar="SERVICE=N",
    help="Number of workers of a service; default 1. Repeatable.",
)
@click.option("--services", metavar="NAME,…", help="Only these services.")
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="Data directory. Default: data_dir in the settings, .tokenbus.",
)
@click.option(
    "--mock",
    "mock_provider",
    is_flag=True,
    help="Run the mock provider too, which needs no key: the providers mock-anthropic, mock-openai-chat, "
    "mock-openai-responses, mock-gemini and mock-gemini-interactions.",
)
@click.option(
    "--chained",
    is_flag=True,
    help="Run fetcher, normalizer and parser as one process, the pipeline, and a tool executor only if the settings "
    "or --mock have tools. Default: stages.chained in the settings.",
)
def up(scales: tuple[str, ...], services: str | None, data: Path | None, mock_provider: bool, chained: bool) -> None:
    """Run a server and all services as child processes until Ctrl-C.

    Starts its own server unless TOKENBUS_REDIS_URL is set. Commands and clients without a URL find that server if they
    run in the same directory. Prints "ready" when all services are ready, and restarts a service that exits.
    """
    from tokenbus_services.cli.up.command import run

    _name_settings()
    run(scales=scales, services=services, data=data, mock_provider=mock_provider, chained=chained)


@click.command()
@click.option(
    "--provider",
    help="Call the real API (anthropic, openai-chat, openai-responses, gemini) with the key from the environment.",
)
@click.option("--model", help="Model of that provider; each API has a default.")
@click.option("--keep", is_flag=True, help="Keep the directory with settings, logs and data, and print its path.")
def demo(provider: str | None, model: str | None, keep: bool) -> int:
    """Run everything on this machine, stream one request with a tool, then stop.

    Needs no key: a mock provider answers.
    """
    from tokenbus_services.cli.demo import run

    return run(provider=provider, model=model, keep=keep)


def _time_ms(context: click.Context, parameter: click.Parameter, value: datetime | None) -> int | None:
    """Unix time in ms. Times without a zone are UTC."""
    if value is None:
        return None
    return round((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp() * 1000)


_TIME = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%S%z"])


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]…")
@click.option("--session", metavar="NAME", help="A session, with all its runs.")
@click.option("--tenant", help="All of this tenant; with --session: the tenant of the session.")
@click.option("--since", "since_ms", type=_TIME, callback=_time_ms, help="Only what began then or later (UTC).")
@click.option("--until", "until_ms", type=_TIME, callback=_time_ms, help="Only what ended then or earlier (UTC).")
@click.option("--dry-run", is_flag=True, help="Delete nothing; show what there is.")
@click.option("--rewrite", is_flag=True, help="Let the server rewrite its append-only file, which has it until then.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def erase(runs: tuple[str, ...], dry_run: bool, rewrite: bool, yes: bool, as_json: bool, **choice: Any) -> int:
    """Delete each RUN, a session, or all of a tenant or a time: request, events, log, history, record, blobs, notes.

    Open runs stay: cancel them first. A blob stays that another run names. Then everything is searched again, the
    command prints what is left and where, and an entry of the audit says who erased what.

    Exit code: 0 if nothing is left, 1 if something is.
    """
    from tokenbus_services.cli.erase import Choice, run

    chosen = Choice(runs=runs, **choice)
    times = chosen.since_ms is not None or chosen.until_ms is not None
    if not (runs or chosen.session or chosen.tenant or times):
        raise click.UsageError("Name runs, --session, --tenant or a time.", click.get_current_context())
    if runs and (chosen.session or chosen.tenant or times):
        raise click.UsageError("Runs exclude all other choices.", click.get_current_context())
    if not (dry_run or yes or agreed("Delete this permanently?")):
        return 0
    return asyncio.run(run(chosen, dry_run=dry_run, rewrite=rewrite, as_json=as_json))


@click.command()
@click.option("--most", type=click.IntRange(1), default=50, show_default=True, help="Maximum entries, newest first.")
@json_lines
def audit(most: int, as_json: bool) -> None:
    """Show who changed what, and over which door: commands, the console, the admin API, or a surface of the gateway.

    Entries are of cancels, erasures, decisions, sessions, keys, dead letters and partitions.
    """
    from tokenbus_services.cli.audit import show

    asyncio.run(show(most=most, as_json=as_json))
