"""Completes names of providers and runs in a shell.

A shell shows what is printed, so no error ever gets out: without settings or a server nothing is completed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from tokenbus.errors import TokenbusError

if TYPE_CHECKING:
    import click

MOST_RUNS = 30
RUNS_WITHIN_S = 1.0
"""A shell waits for its completion, so a slow server completes nothing."""


def provider_names(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The configured providers; under `tokenbus up --mock` its mock providers too."""
    from tokenbus_services import settings as configuration
    from tokenbus_services.cli import connect, mock

    try:
        names = [*configuration.load().providers]
        if connect.has_mock_provider():
            names += mock.provider_names()
    except (TokenbusError, OSError):
        return []
    return sorted(name for name in names if name.startswith(incomplete))


def run_ids(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The newest runs of the deployment, open and ended."""
    try:
        return asyncio.run(asyncio.wait_for(_newest_runs(incomplete), RUNS_WITHIN_S))
    except (TokenbusError, RedisError, OSError, TimeoutError):
        return []


async def _newest_runs(prefix: str) -> list[str]:
    from tokenbus_services.cli import connect

    async with connect.client() as bus:
        return [info.run async for info in bus.runs(prefix=prefix or None, limit=MOST_RUNS)]
