"""Chooses the server for a command: the one in the settings, or that of `tokenbus up` in the same place."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tokenbus.bus.server.url import URL_ENV, URL_FILE_ENV, parse_url
from tokenbus.client.local_up import running_in
from tokenbus.errors import ServerUnavailable, SettingsError
from tokenbus_services import settings as configuration
from tokenbus_services.settings import Settings

if TYPE_CHECKING:
    from tokenbus import Client
    from tokenbus.bus.keys import Keys
    from tokenbus.bus.server.server import Server


def with_server(settings: Settings) -> Settings:
    """Return the settings with a `redis_url`. Raises SettingsError if no server is found."""
    if settings.redis_url:
        return settings
    directory = Path(settings.data_dir)
    running = running_in(directory)
    if running is None or running.redis_url is None:
        problem = (
            f"not set, nor is redis_url ({_settings_in_use()}), and no `tokenbus up` runs with its data in "
            f"{directory.resolve()}: start one (`tokenbus up --mock` needs no key), use the directory of the one that "
            "runs, or set the address of a server"
        )
        raise SettingsError("environment", "TOKENBUS_REDIS_URL", problem)
    blobs = settings.blobs
    if blobs.service_url is None:
        blobs = msgspec.structs.replace(blobs, service_url=running.blobs_url)
    return msgspec.structs.replace(settings, redis_url=running.redis_url, blobs=blobs)


def _settings_in_use() -> str:
    path = os.environ.get("TOKENBUS_CONFIG")
    return f"settings: {Path(path).resolve()}" if path else f"no settings file in {Path.cwd()}"


def advice_on(error: ServerUnavailable) -> str:
    """Return where the address of that server was set, to be added to the error; empty for any other server."""
    try:
        given = configuration.load()
        settings = with_server(given)
    except SettingsError:
        return ""
    assert settings.redis_url
    if parse_url(settings.redis_url).safe != error.server:
        return ""
    if not given.redis_url:
        source = f"that of the `tokenbus up` with its data in {Path(settings.data_dir).resolve()}"
    elif os.environ.get(URL_ENV) or os.environ.get(URL_FILE_ENV):
        source = f"{URL_ENV} in the environment"
    else:
        source = f"redis_url in {Path(os.environ['TOKENBUS_CONFIG']).resolve()}"
    return f". The address is {source}: start that server, or change the address"


def server_name() -> str:
    """The server of the settings, without its password. Raises SettingsError."""
    return parse_url(with_server(configuration.load()).redis_url or "").safe


def has_mock_provider() -> bool:
    """Whether the deployment is a `tokenbus up --mock` in the same place."""
    settings = configuration.load()
    running = None if settings.redis_url else running_in(Path(settings.data_dir))
    return running is not None and running.mock


def client() -> Client:
    """Create a client of the deployment in the settings. Raises SettingsError."""
    from tokenbus import Client  # a worker imports this module, and has no client
    from tokenbus.client.client import read_archive
    from tokenbus_services.blobs.client import archive_of

    settings = with_server(configuration.load())
    made = Client(
        settings.redis_url,
        prefix=settings.prefix,
        max_waiting=settings.limits.inbound_entries,
        max_request_bytes=settings.limits.request_bytes,
    )
    read_archive(made, lambda: archive_of(settings.blobs))
    return made


@asynccontextmanager
async def deployment() -> AsyncGenerator[tuple[Settings, Server, Keys]]:
    """Connect to the deployment in the settings. Raises SettingsError, and the errors of `Deployment.keys`."""
    from tokenbus.bus.server.server import Server  # as in `client`
    from tokenbus.client.deployment import Deployment

    settings = with_server(configuration.load())
    assert settings.redis_url
    async with Server(settings.redis_url) as server:
        yield settings, server, await Deployment(server, settings.prefix, None).keys()
