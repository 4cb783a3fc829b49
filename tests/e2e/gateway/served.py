"""What tests of the whole gateway share: the routes that it serves, the header of a key, and another gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute

from tests.services.cli.process import Command, running
from tokenbus.testing import LocalBus
from tokenbus_services.cli.service_registry import create
from tokenbus_services.gateway.forward.table import TABLE
from tokenbus_services.gateway.keys.key import NewKey
from tokenbus_services.gateway.routes.forwarded import paths_of
from tokenbus_services.settings import GatewaySettings, Settings
from tokenbus_services.settings.tables.gateway import ConsoleSettings

INNER = ("_routes", "_console", "app")
"""Attributes in which an ASGI wrapper of the gateway keeps what it wraps."""


def auth(key: NewKey | str) -> dict[str, str]:
    return {"authorization": f"Bearer {key if isinstance(key, str) else key.text}"}


def gateway_routes(*, console: bool = False) -> list[tuple[str, str]]:
    """Method and path of each route of a gateway with every surface; the method of a socket is WEBSOCKET."""
    table = ConsoleSettings() if console else None
    settings = msgspec.structs.replace(
        Settings(), redis_url="redis://127.0.0.1:1", gateway=GatewaySettings(), console=table
    )
    return list(_served_by(create("gateway", settings)))


def forwarded_routes() -> set[tuple[str, str]]:
    """Method and path of each forwarded path that is not only read."""
    found = {(path.method, route) for path in TABLE for route in paths_of(path)}
    return {(method, route) for method, route in found if method != "GET"}


def _served_by(app: Any) -> Iterator[tuple[str, str]]:
    if hasattr(app, "_routes"):  # beside it are the pages that every service has
        yield from _served_by(app._routes)
    elif hasattr(app, "router"):
        yield from _all(app.router.routes)
    else:
        inner = [getattr(app, name) for name in INNER if hasattr(app, name)]
        assert inner, f"a wrapper that this does not know: {app}"
        for each in inner:
            yield from _served_by(each)


def _all(routes: list[BaseRoute], prefix: str = "") -> Iterator[tuple[str, str]]:
    for route in routes:
        if isinstance(route, Mount):
            yield from _all(list(route.routes), prefix + route.path)
        elif isinstance(route, Route):
            for method in sorted((route.methods or {"GET"}) - {"HEAD", "OPTIONS"}):
                yield method, prefix + route.path
        else:
            assert isinstance(route, WebSocketRoute), f"a kind of route that this does not know: {route}"
            yield "WEBSOCKET", prefix + route.path


@asynccontextmanager
async def second_gateway(bus: LocalBus, directory: Path, settings: str) -> AsyncIterator[tuple[str, Command]]:
    """Another gateway of the same bus, in a process: its url, and the process."""
    provider = '[providers.anthropic]\napi = "anthropic"\nbase_url = "http://127.0.0.1:1"\napi_key_env = ""\n'
    config = directory / "tokenbus.toml"
    config.write_text(f'redis_url = "{bus.url}"\ndata_dir = "{directory}"\n{provider}{settings}')
    arguments = ("worker", "gateway", "--port", "0")
    async with running(directory / "gateway.log", *arguments, TOKENBUS_CONFIG=str(config)) as worker:
        yield (await worker.says("ready gateway")).split()[2], worker
