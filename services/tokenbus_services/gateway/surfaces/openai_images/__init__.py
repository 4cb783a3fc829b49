"""OpenAI's Images API, `POST /v1/images/generations`: a prompt in, images out. Pure."""

from __future__ import annotations

from tokenbus_services.gateway.surfaces.contract import GatewayNote, GatewayRequest, WholeAnswer
from tokenbus_services.gateway.surfaces.errors import openai_refusal
from tokenbus_services.gateway.surfaces.openai_images.images import ImageStream, WholeImages
from tokenbus_services.gateway.surfaces.openai_images.request import read
from tokenbus_services.gateway.surfaces.surface import Surface


class OpenAIImagesSurface(Surface):
    """Images of a prompt."""

    name = "openai_images"
    keep_alive = b": keep-alive\n\n"
    paths = ("/v1/images/generations",)
    read = staticmethod(read)
    refusal = staticmethod(openai_refusal)

    def encoder(self, request: GatewayRequest | None, note: GatewayNote, run: str) -> ImageStream:
        return ImageStream(note, run)

    def whole(self, note: GatewayNote, run: str) -> WholeAnswer:
        return WholeImages(note, run)
