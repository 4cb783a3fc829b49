"""The services by name, and how to create the app of each."""

from __future__ import annotations

import importlib
from typing import Literal, get_args

from tokenbus_services.net.request_guard import PAGES, AsgiApp, RequestGuard
from tokenbus_services.settings import Settings

ServiceName = Literal[
    "fetcher", "normalizer", "parser", "pipeline", "tools", "blobs", "recorder", "webhooks", "policy", "gateway"
]
SERVICES: tuple[ServiceName, ...] = get_args(ServiceName)
CHAINED: frozenset[ServiceName] = frozenset(("fetcher", "normalizer", "parser"))
"""The services that one pipeline worker contains."""
CALLS_PROVIDERS: frozenset[ServiceName] = frozenset(("fetcher", "pipeline"))
"""The services that need provider keys."""

SERVES_HTTP: frozenset[ServiceName] = frozenset(("gateway", "blobs"))
"""The services whose work comes by HTTP."""

STOP_ORDER: tuple[tuple[ServiceName, ...], ...] = (
    ("gateway", *sorted(CALLS_PROVIDERS)),
    ("tools",),
    ("normalizer",),
    ("policy",),
    ("parser",),
    ("recorder", "webhooks"),
    ("blobs",),
)
"""What stops together, and in which order: doors and fetchers take nothing new and finish what streams, while the
services behind them carry it on to the logs.
"""


def services_of(settings: Settings, *, mock: bool = False) -> list[ServiceName]:
    """Return the services that a deployment with these settings needs. ``mock``: with the mock provider and its tool.

    Chained, that is no tool executor without a tool: each process is a quarter of the deployment's memory and start.
    """
    chained = settings.stages.chained
    idle: dict[ServiceName, bool] = {
        "recorder": not settings.needs_recorder,
        "webhooks": not settings.webhooks,
        "policy": not settings.policies,
        "gateway": settings.gateway is None,
        "pipeline": not chained,
        "tools": chained and not (mock or runs_tools(settings)),
    }
    return [s for s in SERVICES if not idle.get(s, False) and not (chained and s in CHAINED)]


def runs_tools(settings: Settings) -> bool:
    """Whether these settings have tools that the deployment itself runs."""
    return bool(settings.tools or settings.mcp)


def app_module(service: ServiceName) -> str:
    """Return the module whose `create` makes the service's app."""
    return f"tokenbus_services.{'policy_stage' if service == 'policy' else service}.app"


def create(service: ServiceName, settings: Settings) -> AsgiApp:
    """Create the ASGI app of one service, wrapped in its request guard. Raises SettingsError."""
    if service != "gateway":
        app = importlib.import_module(app_module(service)).create(settings)
        return RequestGuard(app, hosts=settings.host_names, private=("/blobs", "/archive", *PAGES))
    from tokenbus_services.gateway.app import create as create_gateway  # it has a guard of its own

    if settings.console and settings.console.enabled:
        from tokenbus_services.console.app import create as create_console

        return create_gateway(settings, create_console=create_console)
    return create_gateway(settings)
