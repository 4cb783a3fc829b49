"""Turns the binary frames of AWS (`application/vnd.amazon.eventstream`) into the server-sent events that they hold.

A frame is its length, the length of its headers, a checksum of both, headers, a payload, and a checksum of all before:
https://docs.aws.amazon.com/transcribe/latest/dg/streaming-setting-up.html, "Event stream encoding". Bedrock puts each
event of a model into a frame `chunk`, as base64 (InvokeModelWithResponseStream), and an error into an exception.
"""

from __future__ import annotations

import struct
from zlib import crc32

import msgspec

from tokenbus.errors import Malformed, TooLarge
from tokenbus.providers.response.json_decode import read
from tokenbus.providers.response.sse import MAX_EVENT_BYTES

MEDIA_TYPE = "application/vnd.amazon.eventstream"
MAX_FRAME_BYTES = 2 * MAX_EVENT_BYTES
"""Maximum size of a frame: an event of the maximum size as base64."""

_PRELUDE = struct.Struct(">III")
_CRC = struct.Struct(">I")
_LENGTH = struct.Struct(">H")
_FIXED = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}
"""Sizes of header values by type; those of types 6 (bytes) and 7 (text) begin with their length."""
_TEXT = 7
_SIZED = (6, _TEXT)
_WHERE = "event-stream frame"


class _Chunk(msgspec.Struct):
    event: bytes = msgspec.field(name="bytes")


class _Problem(msgspec.Struct):
    message: str = ""
    capital: str = msgspec.field(name="Message", default="")


_chunk = msgspec.json.Decoder(_Chunk)
_problem = msgspec.json.Decoder(_Problem)


class AwsFrames:
    """Reads frames however their bytes are cut, in linear time; holds at most one frame."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Return the server-sent events of the frames that these bytes complete. Raises Malformed, TooLarge."""
        self._held += data
        events: list[bytes] = []
        at = 0
        with memoryview(self._held) as held:
            while size := _size(held, at):
                start, headers = at + _PRELUDE.size, _PRELUDE.unpack_from(held, at)[1]
                end = at + size - _CRC.size
                if crc32(held[at:end]) != _CRC.unpack_from(held, end)[0]:
                    raise Malformed(_WHERE, "its checksum is wrong")
                found = _headers(bytes(held[start : start + headers]))
                events.append(_event(found, bytes(held[start + headers : end])))
                at += size
        del self._held[:at]
        return b"".join(events)


def _size(held: memoryview, at: int) -> int:
    """The size of the frame that begins here; 0: it is not complete. Raises Malformed, TooLarge."""
    if len(held) - at < _PRELUDE.size:
        return 0
    size, headers, crc = _PRELUDE.unpack_from(held, at)
    if crc32(held[at : at + _PRELUDE.size - _CRC.size]) != crc:
        raise Malformed(_WHERE, "the checksum of its beginning is wrong")
    if size > MAX_FRAME_BYTES:
        raise TooLarge(_WHERE, size, MAX_FRAME_BYTES)
    if size < _PRELUDE.size + headers + _CRC.size:
        raise Malformed(_WHERE, "it is shorter than its headers")
    return size if len(held) - at >= size else 0


def _headers(data: bytes) -> dict[str, str]:
    """The headers that are texts. Raises Malformed."""
    found: dict[str, str] = {}
    at = 0
    try:
        while at < len(data):
            name = data[at + 1 : at + 1 + data[at]].decode()
            at += 1 + data[at]
            kind = data[at]
            at += 1
            if kind in _SIZED:
                (size,) = _LENGTH.unpack_from(data, at)
                at += _LENGTH.size
            else:
                size = _FIXED[kind]
            if at + size > len(data):
                raise Malformed(_WHERE, "a header is cut off")
            if kind == _TEXT:
                found[name] = data[at : at + size].decode()
            at += size
    except (IndexError, KeyError, UnicodeDecodeError, struct.error):
        raise Malformed(_WHERE, "its headers cannot be read") from None
    return found


def _event(headers: dict[str, str], payload: bytes) -> bytes:
    match headers.get(":message-type"):
        case "exception" | "error" as kind:
            code = headers.get(f":{kind}-{'type' if kind == 'exception' else 'code'}", kind)
            said = read(_problem, payload, _WHERE) if payload.startswith(b"{") else _Problem()
            message = said.message or said.capital or headers.get(":error-message", "")
            error = {"type": "error", "error": {"type": code, "message": message}}
            return b"event: error\ndata: %b\n\n" % msgspec.json.encode(error)
        case _:
            if headers.get(":event-type") == "chunk":
                payload = read(_chunk, payload, _WHERE).event
            return b"".join(b"data: %b\n" % line for line in payload.splitlines()) + b"\n"
