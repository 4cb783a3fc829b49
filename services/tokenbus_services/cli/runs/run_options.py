"""The options by which commands choose runs; `RunChoice` says what they mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from tokenbus_services.cli.runs.completion import provider_names

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
    """Add the options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
