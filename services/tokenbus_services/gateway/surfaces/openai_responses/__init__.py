"""The Responses API as a surface of the gateway."""

from __future__ import annotations

from tokenbus_services.gateway.problem import invalid
from tokenbus_services.gateway.surfaces.contract import Encoder, GatewayNote, GatewayRequest, WholeAnswer
from tokenbus_services.gateway.surfaces.errors import openai_refusal
from tokenbus_services.gateway.surfaces.openai_responses.request import read
from tokenbus_services.gateway.surfaces.openai_responses.response_log import ResponseStream, WholeResponse
from tokenbus_services.gateway.surfaces.surface import Surface


class OpenAIResponsesSurface(Surface):
    """`POST /v1/responses` and its streams. `GET` with ``starting_after`` continues after that number."""

    name = "openai_responses"
    inlines_media = True
    keep_alive = b": keep-alive\n\n"
    read = staticmethod(read)
    refusal = staticmethod(openai_refusal)

    def encoder(self, request: GatewayRequest | None, note: GatewayNote, run: str, part: int = 0) -> Encoder:
        """``part``: see `Parts`."""
        return ResponseStream(note, run, after=starting_after(request) if request else -1, part=part)

    def whole(self, note: GatewayNote, run: str, part: int = 0) -> WholeAnswer:
        return WholeResponse(note, run, part)


def starting_after(request: GatewayRequest) -> int:
    """The `sequence_number` after which a stream continues; -1: its beginning. Raises Refusal."""
    text = request.query.get("starting_after")
    if text is None:
        return -1
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise invalid("starting_after", "must be a whole number from 0")
    return int(text)
