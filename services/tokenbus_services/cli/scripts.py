"""`tokenbus scripts`: loads the bus's scripts, for users who may only run them by SHA-1."""

from __future__ import annotations

import asyncio
import sys

from redis.exceptions import RedisError

from tokenbus.bus.scripts.script import LuaScript, all_scripts
from tokenbus.bus.server.server import Server, translated
from tokenbus_services import settings as configuration
from tokenbus_services.cli.connect import with_server
from tokenbus_services.cli.signals import stop_on_signal

PAUSE_S = 1.0
"""Pause between two checks of what the server knows."""


def show() -> None:
    """Print the scripts, one per line."""
    for one in all_scripts():
        print(one.sha, one.name)


async def load_scripts(*, keep: bool) -> None:
    """Load missing scripts on the server, or on each master of a Cluster; with ``keep``, repeat until a signal.

    Raises ServerUnavailable if the server cannot be reached at first, and its error if the user lacks the permission.
    """
    every = all_scripts()
    settings = with_server(configuration.load())
    assert settings.redis_url
    async with Server(settings.redis_url) as server:
        with translated(server):
            loaded = await _load_missing(server, every)
        stop = stop_on_signal() if keep else None  # before it reports ready: it may be stopped at once
        print(f"{loaded} of {len(every)} scripts loaded, the others were there", flush=True)
        if stop is None:
            return
        while not stop.is_set():
            try:
                if loaded := await _load_missing(server, every):
                    print(f"{loaded} of {len(every)} scripts loaded again", flush=True)
            except (RedisError, OSError) as e:
                print(f"not now: {e}", file=sys.stderr, flush=True)
            try:
                async with asyncio.timeout(PAUSE_S):
                    await stop.wait()
            except TimeoutError:
                pass


async def _load_missing(server: Server, every: list[LuaScript]) -> int:
    known: list[bool] = await server.client.script_exists(*(one.sha for one in every))
    missing = [one for one, there in zip(every, known, strict=True) if not there]
    for one in missing:
        await server.client.script_load(one.text)
    return len(missing)
