"""What a worker, its fork server and its executors send each other: length-prefixed msgpack."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

COMMAND = struct.Struct("<cQ")
"""Sent to the fork server: `FORK`, with the executor's socket, page and pipe, or `KILL` and the executor's id."""
FORK, KILL = b"F", b"K"
FORK_FDS = 3
_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to the fork server."""

    service: str
    memory_bytes: int
    """Memory limit of an executor, beyond its memory at startup."""
    path: list[str]
    """The module search path."""
    log_level: str
    secrets: list[str]
    work: bytes
    """What its executors do; the room that uses them knows the form."""


def framed(message: object) -> bytes:
    """Return the message in its wire form."""
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


class TooLong(Exception):
    """A message is longer than it may be, or what was received is none."""


class Frames:
    """Splits received bytes into messages."""

    def __init__(self, most: int = 2**32) -> None:
        """``most``: maximum bytes of a message."""
        self._most = most
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that are complete. Raises TooLong."""
        self._buffer += data
        begin = 0
        while len(self._buffer) - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, begin)
            if length > self._most:
                raise TooLong(f"a message of {length} bytes; the limit is {self._most}")
            end = begin + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[begin + _LENGTH.size : end])
            begin = end
            yield body
        del self._buffer[:begin]
