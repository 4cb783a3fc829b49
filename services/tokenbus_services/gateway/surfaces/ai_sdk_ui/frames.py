"""Frames of `WebSocketChatTransport`, which carries the UI message streams of many chats over one WebSocket. Pure.

https://ai-sdk.dev/docs/reference/ai-sdk-ui/websocket-chat-transport
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from tokenbus_services.gateway.surfaces.ai_sdk_ui.parts import DONE
from tokenbus_services.gateway.surfaces.contract import GatewayRequest

RequestId = Annotated[str, Meta(min_length=1, max_length=256)]
_encode = msgspec.json.Encoder().encode
_DATA = b"data: "
_END = b"\n\n"


class Send(msgspec.Struct, frozen=True, kw_only=True, tag="send", rename="camel"):
    """Answer a chat."""

    kind: ClassVar[str] = "SEND"
    request_id: RequestId
    id: str
    trigger: Literal["submit-message", "regenerate-message"]
    message_id: str | None = None
    messages: list[Any]
    headers: dict[str, str] = {}
    body: dict[str, Any] = {}
    metadata: Any = None

    def asked(self, headers: Mapping[str, str], query: Mapping[str, str]) -> GatewayRequest:
        """The request that `DefaultChatTransport` would have posted."""
        body: dict[str, Any] = {**self.body, "id": self.id, "trigger": self.trigger, "messages": self.messages}
        if self.message_id is not None:
            body["messageId"] = self.message_id
        if self.metadata is not None:
            body.setdefault("metadata", self.metadata)
        return GatewayRequest(body=_encode(body), headers=headers, query=query)


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag="resume", rename="camel"):
    """Send the chat's open answer again, from the chunk after this one on."""

    kind: ClassVar[str] = "RESUME"
    request_id: RequestId
    id: str
    last_sequence: Annotated[int, Meta(ge=0)] | None = None
    headers: dict[str, str] = {}
    body: dict[str, Any] = {}
    metadata: Any = None


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort", rename="camel"):
    """The client has stopped the answer to one of its requests."""

    request_id: RequestId


ClientFrame = Send | Resume | Abort
_decoder = msgspec.json.Decoder(Send | Resume | Abort)


def decode(data: bytes) -> ClientFrame:
    """Decode a frame of a client. Raises msgspec.DecodeError, RecursionError."""
    return _decoder.decode(data)


def frame(kind: Literal["start", "end", "no-active"], request: str) -> bytes:
    return _encode({"type": kind, "requestId": request})


def error(request: str, text: str) -> bytes:
    """The end of a request that has no answer. The client shows the text to its user."""
    return _encode({"type": "error", "requestId": request, "errorText": text})


class ChunkFrames:
    """Numbers the parts of one answer. Numbers are a function of the run's log, as the parts are."""

    def __init__(self, request: str, after: int = -1) -> None:
        """``after``: the last number that the client has."""
        self._head = b'{"type":"chunk","requestId":%b,"sequence":' % _encode(request)
        self._after = after
        self._next = 0

    def of(self, parts: list[bytes]) -> list[bytes]:
        """The frames of these parts of `UiStream`."""
        frames: list[bytes] = []
        for part in parts:
            if part == DONE:
                continue
            number, self._next = self._next, self._next + 1
            if number > self._after:
                chunk = part.removeprefix(_DATA).removesuffix(_END)
                frames.append(b'%b%d,"chunk":%b}' % (self._head, number, chunk))
        return frames
