"""Anthropic's Messages API: `POST /v1/messages`, for clients of both header generations."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.events.waits import WaitKind
from tokenbus_services.gateway.surfaces.anthropic_messages.answer import MessagesStream, whole_message
from tokenbus_services.gateway.surfaces.anthropic_messages.content import read
from tokenbus_services.gateway.surfaces.contract import Answer, Encoder, GatewayNote, GatewayRequest, WholeAnswer
from tokenbus_services.gateway.surfaces.errors import anthropic_refusal
from tokenbus_services.gateway.surfaces.surface import Surface

_NEVER = "1970-01-01T00:00:00Z"
"""`created_at` of models: the API's own value for an unknown date."""


class AnthropicMessagesSurface(Surface):
    name = "anthropic_messages"
    door = "anthropic"
    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'
    paths = ("/anthropic/v1/messages", "/anthropic/v1/v1/messages", "/v1/messages", "/v1/v1/messages")
    """Clients add `/v1/messages` to their base URL, whether that ends in `/v1` or not."""
    read = staticmethod(read)
    refusal = staticmethod(anthropic_refusal)

    def waits_for(self, note: GatewayNote) -> frozenset[WaitKind]:
        """See `Surface.waits_for`."""
        return frozenset({"tool_result"})

    def encoder(self, request: GatewayRequest | None, note: GatewayNote, run: str) -> Encoder:
        return MessagesStream(note, run)

    def whole(self, note: GatewayNote, run: str) -> WholeAnswer:
        return whole_message(note, run)


def models_answer(names: Sequence[str]) -> Answer:
    """The answer of `GET /v1/models` in this API's form."""
    models = [_model(name) for name in names]
    page = {
        "data": models,
        "has_more": False,
        "first_id": names[0] if names else None,
        "last_id": names[-1] if names else None,
    }
    return Answer(status=200, body=msgspec.json.encode(page))


def model_answer(name: str) -> Answer:
    return Answer(status=200, body=msgspec.json.encode(_model(name)))


def _model(name: str) -> dict[str, object]:
    return {"type": "model", "id": name, "display_name": name, "created_at": _NEVER, "lifecycle": "active"}
