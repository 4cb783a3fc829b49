"""Responses over a WebSocket, which `response.steer` steers: https://developers.openai.com/api/docs/guides/steering.

A response that takes the input in ends `incomplete` with the reason `steered`, or completes. Its successor follows on
the same connection.
"""

from __future__ import annotations

import msgspec

from tokenbus.providers.api import SteerSeen

_NOT_SENT = ("stream", "stream_options", "background")
"""Fields of a call that the WebSocket refuses: there everything is streamed."""
_LAST = ("response.completed", "response.incomplete", "response.failed", "response.cancelled", "error")
_ERROR = 500
"""The status of an error that names none."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.Encoder().encode


class _Details(msgspec.Struct):
    reason: str | None = None


class _Response(msgspec.Struct):
    id: str = ""
    incomplete_details: _Details | None = None


class _Message(msgspec.Struct):
    type: str = ""
    response: _Response | None = None
    status: int = _ERROR


_message = msgspec.json.Decoder(_Message)


class ResponseSteering:
    """See `tokenbus.providers.api.SteerApi`."""

    def begin(self, body: bytes) -> bytes:
        """See `SteerApi.begin`."""
        fields = {name: value for name, value in _fields.decode(body).items() if name not in _NOT_SENT}
        return _encode({"type": "response.create", **fields})

    def steer(self, response: str, body: bytes) -> bytes:
        """See `SteerApi.steer`."""
        steered = _fields.decode(body)["input"]
        return _encode({"type": "response.steer", "previous_response_id": response, "input": steered})

    def read(self, message: bytes) -> SteerSeen:
        """See `SteerApi.read`."""
        try:
            event = _message.decode(message)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return SteerSeen(passes=True)
        if event.type.startswith("response.steer."):
            return SteerSeen(refused=event.type == "response.steer.failed")
        response = event.response or _Response()
        details = response.incomplete_details
        return SteerSeen(
            passes=True,
            response=response.id,
            over=event.type in _LAST,
            steered=event.type == "response.incomplete" and details is not None and details.reason == "steered",
            status=event.status if event.type == "error" else 0,
        )

    def ended(self, response: str) -> bytes:
        """See `SteerApi.ended`."""
        end = {"id": response, "status": "incomplete", "incomplete_details": {"reason": "steered"}}
        return _encode({"type": "response.incomplete", "response": end})


steering = ResponseSteering()
