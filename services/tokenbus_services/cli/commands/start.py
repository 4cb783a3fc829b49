"""Commands that run a deployment or a part of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tokenbus_services.cli.service_registry import SERVICES

if TYPE_CHECKING:
    from tokenbus_services.cli.service_registry import ServiceName


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
    """Run SERVICE (fetcher, normalizer, parser, pipeline, tools, policy, blobs, recorder or gateway) until a signal.

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
