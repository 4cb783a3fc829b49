"""The surface of `useChat`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, cast

from tokenbus.events.public import PublicEvent
from tokenbus_services.gateway.problem import Problem
from tokenbus_services.gateway.surfaces.ai_sdk_ui import parts
from tokenbus_services.gateway.surfaces.ai_sdk_ui.encoder import UiStream
from tokenbus_services.gateway.surfaces.ai_sdk_ui.request import translate, version
from tokenbus_services.gateway.surfaces.contract import (
    Answer,
    Encoder,
    GatewayNote,
    GatewayRequest,
    Surface,
    Translated,
    TranslationRules,
    WholeAnswer,
)


class AiSdkUiSurface(Surface):
    """The AI SDK's UI message stream."""

    name: ClassVar[str] = "ai_sdk_ui"
    media_type: ClassVar[str] = "text/event-stream"
    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"
    stream_headers: ClassVar[Mapping[str, str]] = {
        "cache-control": "no-cache",
        "connection": "keep-alive",
        "x-vercel-ai-ui-message-stream": "v1",
        "x-accel-buffering": "no",
    }

    def translate(self, request: GatewayRequest, rules: TranslationRules) -> Translated:
        """See `Surface.translate`."""
        return translate(request, rules)

    def encoder(self, request: GatewayRequest | None, note: GatewayNote, run: str) -> Encoder:
        """See `Surface.encoder`. A client that joins may ask for another version than the one that began."""
        has_version = request is not None and "ui" in request.query
        return UiStream(
            run,
            model=note.model,
            message_id=str(note.echo.get("message_id", run)),
            ui=version(request) if has_version and request else cast("int", note.echo.get("ui", 5)),
            bus_tools=frozenset(cast("list[str]", note.echo.get("bus_tools", []))),
        )

    def whole(self, note: GatewayNote, run: str) -> WholeAnswer:
        """See `Surface.whole`. Clients know the stream only, so it is sent at once."""
        return _WholeStream(self, note, run)

    def refusal(self, problem: Problem) -> Answer:
        """See `Surface.refusal`. `useChat` shows the body's text to its user."""
        at_fault = problem.kind in ("invalid_request", "not_found") and problem.run is None
        not_allowed = problem.status in (401, 403)  # by this gateway: a provider's refusal has another status
        text = problem.message if at_fault or not_allowed else parts.SENTENCES[problem.kind]
        return Answer(status=problem.status, body=text.encode(), media_type="text/plain; charset=utf-8")


class _WholeStream(WholeAnswer):
    def __init__(self, surface: AiSdkUiSurface, note: GatewayNote, run: str) -> None:
        self._encoder = surface.encoder(None, note, run)
        self._out: list[bytes] = []

    def feed(self, event: PublicEvent) -> Answer | None:
        """See `WholeAnswer.feed`."""
        data = self._encoder.feed(event)
        self._out += data
        if not data or data[-1] != parts.DONE:
            return None
        return Answer(
            status=200,
            body=b"".join(self._out),
            headers=AiSdkUiSurface.stream_headers,
            media_type=AiSdkUiSurface.media_type,
        )
