"""The surfaces by name, and where their routes are made.

Each surface has a module `<surface>.py` with ``routes(gateway: Gateway) -> list[BaseRoute]``. To add one, write
that module and list it here, beside `settings.gateway.SurfaceName`.
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from starlette.routing import BaseRoute

from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.http_request import AsgiApp
from tokenbus_services.gateway.keys.directory import KeyDirectory
from tokenbus_services.gateway.routes import models as routes_models
from tokenbus_services.gateway.service import GatewayPart
from tokenbus_services.settings import Settings, SurfaceName

SURFACES: tuple[SurfaceName, ...] = (
    "openai_chat",
    "openai_responses",
    "native",
    "anthropic_messages",
    "gemini",
    "openai_images",
    "ai_sdk_ui",
    "ag_ui",
    "durable_streams",
)
"""In the order in which their routes are tried, one after the other: first those that most clients ask."""


class _Routes(Protocol):
    def routes(self, gateway: Gateway) -> list[BaseRoute]: ...


class _Console(Protocol):
    def create(
        self, settings: Settings, gateway: Gateway, directory: KeyDirectory | None
    ) -> tuple[AsgiApp, list[GatewayPart]]: ...


def console_of(
    settings: Settings, gateway: Gateway, directory: KeyDirectory | None
) -> tuple[AsgiApp, list[GatewayPart]]:
    """The console's app, and what works beside it. The console knows the gateway, so it is named here alone."""
    return cast(_Console, importlib.import_module("tokenbus_services.console.app")).create(settings, gateway, directory)


def routes_of(gateway: Gateway) -> list[BaseRoute]:
    """The routes of the surfaces that the settings turn on, and the list of models."""
    found: list[BaseRoute] = []
    for name in SURFACES:
        if name in gateway.settings.surfaces:
            module = importlib.import_module(f"tokenbus_services.gateway.routes.{name}")
            found += cast(_Routes, module).routes(gateway)
    return [*found, *routes_models.routes(gateway)]
