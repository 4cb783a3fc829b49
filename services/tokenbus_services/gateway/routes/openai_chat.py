"""Routes of Chat Completions. Clients that forget `/v1` in their base URL are answered too."""

from __future__ import annotations

from starlette.routing import BaseRoute

from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.surfaces.openai_chat import OpenAIChatSurface

PATHS = ("/v1/chat/completions", "/chat/completions")


def routes(gateway: Gateway) -> list[BaseRoute]:
    """The routes of this surface."""
    surface = OpenAIChatSurface()
    return [gateway.post(path, surface) for path in PATHS]
