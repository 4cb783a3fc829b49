"""The AI SDK's UI message stream, which `useChat` reads. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from tokenbus.events.waits import WaitKind
from tokenbus_services.gateway.problem import Problem
from tokenbus_services.gateway.surfaces.ai_sdk_ui.encoder import UiStream
from tokenbus_services.gateway.surfaces.ai_sdk_ui.request import UiEcho, read, version
from tokenbus_services.gateway.surfaces.contract import Answer, Encoder, GatewayNote, GatewayRequest
from tokenbus_services.gateway.surfaces.errors import sentence_of
from tokenbus_services.gateway.surfaces.surface import Surface

__all__ = ["AiSdkUiSurface"]


class AiSdkUiSurface(Surface):
    """The AI SDK's UI message stream."""

    name = "ai_sdk_ui"
    media_type = "text/event-stream"
    keep_alive = b": keep-alive\n\n"
    stream_headers: ClassVar[Mapping[str, str]] = {
        "cache-control": "no-cache",
        "connection": "keep-alive",
        "x-vercel-ai-ui-message-stream": "v1",
        "x-accel-buffering": "no",
    }
    read = staticmethod(read)

    def waits_for(self, note: GatewayNote) -> frozenset[WaitKind]:
        """See `Surface.waits_for`. Version 5 fails on a part that asks for an approval."""
        return frozenset({"tool_result"} if msgspec.convert(note.echo, UiEcho).ui < 6 else {"tool_result", "approval"})

    def encoder(self, request: GatewayRequest | None, note: GatewayNote, run: str) -> Encoder:
        """See `Surface.encoder`. A client that joins may ask for another version than the one that began."""
        return self.joining(request, note, run, after=-1)

    def joining(self, request: GatewayRequest | None, note: GatewayNote, run: str, *, after: int) -> Encoder:
        """An encoder for a client that has the run up to the seq ``after``."""
        echo = msgspec.convert(note.echo, UiEcho)
        return UiStream(
            run,
            model=note.model,
            message_id=echo.message_id or run,
            ui=version(request) if request is not None and "ui" in request.query else echo.ui,
            bus_tools=frozenset(echo.named),
            client_tools=frozenset(echo.client),
            after=after,
        )

    @staticmethod
    def refusal(problem: Problem) -> Answer:
        """See `Surface.refusal`. `useChat` shows the body's text to its user."""
        at_fault = problem.kind in ("invalid_request", "not_found") and problem.run is None
        not_allowed = problem.status in (401, 403)  # by this gateway: a provider's refusal has another status
        text = problem.message if at_fault or not_allowed else sentence_of(problem)
        return Answer(status=problem.status, body=text.encode(), media_type="text/plain; charset=utf-8")
