"""The surfaces by name, and where their routes are made.

Each surface has a module `http_<surface>.py` with ``routes(gateway: Gateway) -> list[BaseRoute]``. To add one, write
that module and list it here, beside `settings.gateway.SurfaceName`.
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from starlette.routing import BaseRoute

from tokenbus_services.gateway import http_models
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.settings import SurfaceName

SURFACES: tuple[SurfaceName, ...] = (
    "native",
    "anthropic_messages",
    "gemini",
    "openai_chat",
    "openai_responses",
    "openai_images",
    "ai_sdk_ui",
    "ag_ui",
    "durable_streams",
)
"""In the order in which their routes are tried."""


class _Routes(Protocol):
    def routes(self, gateway: Gateway) -> list[BaseRoute]: ...


def routes_of(gateway: Gateway) -> list[BaseRoute]:
    """The routes of the surfaces that the settings turn on, and the list of models."""
    found: list[BaseRoute] = []
    for name in SURFACES:
        if name in gateway.settings.surfaces:
            module = importlib.import_module(f"tokenbus_services.gateway.http_{name}")
            found += cast(_Routes, module).routes(gateway)
    return [*found, *http_models.routes(gateway)]
