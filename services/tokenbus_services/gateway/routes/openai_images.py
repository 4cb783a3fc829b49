"""Routes of the Images API."""

from __future__ import annotations

from starlette.routing import BaseRoute

from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.surfaces.openai_images.surface import OpenAIImagesSurface


def routes(gateway: Gateway) -> list[BaseRoute]:
    """The routes of this surface."""
    return [gateway.post("/v1/images/generations", OpenAIImagesSurface())]
