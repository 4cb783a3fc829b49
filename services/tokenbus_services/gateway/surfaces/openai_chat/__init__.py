"""OpenAI's Chat Completions: `POST /v1/chat/completions`, streamed and whole."""

from __future__ import annotations

from tokenbus.events.waits import WaitKind
from tokenbus_services.gateway.surfaces.contract import GatewayNote, GatewayRequest, WholeAnswer
from tokenbus_services.gateway.surfaces.errors import openai_refusal
from tokenbus_services.gateway.surfaces.openai_chat.answer import ChatEncoder, whole_chat
from tokenbus_services.gateway.surfaces.openai_chat.messages import read
from tokenbus_services.gateway.surfaces.surface import Surface


class OpenAIChatSurface(Surface):
    """Chat Completions as the official clients of Python and JavaScript read it.

    No line of its streams has an `id:` or `event:`: the Python client takes what follows them for an empty chunk.
    """

    name = "openai_chat"
    door = "openai"
    inlines_media = True
    keep_alive = b": keep-alive\n\n"
    paths = ("/v1/chat/completions", "/chat/completions")
    """Clients that forget `/v1` in their base URL are answered too."""
    read = staticmethod(read)
    refusal = staticmethod(openai_refusal)

    def waits_for(self, note: GatewayNote) -> frozenset[WaitKind]:
        """See `Surface.waits_for`."""
        return frozenset({"tool_result"})

    def encoder(self, request: GatewayRequest | None, note: GatewayNote, run: str) -> ChatEncoder:
        return ChatEncoder(note, run)

    def whole(self, note: GatewayNote, run: str) -> WholeAnswer:
        return whole_chat(note, run)
