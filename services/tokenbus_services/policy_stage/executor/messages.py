"""Messages between a policy worker and its executors: length-prefixed msgpack."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from tokenbus.events.frames import PolicyVerdict
from tokenbus.policy.loading import PolicySpec

_LENGTH = struct.Struct("<I")


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of the fork server."""

    policies: dict[str, PolicySpec]
    calls: int
    """Maximum concurrent policy calls in one executor."""
    reassure_s: float
    memory_bytes: int
    """Memory limit of an executor, beyond its memory at startup."""
    redis_url: str
    prefix: str
    partitions: int
    run_ttl_ms: int
    path: list[str]
    """The module search path."""
    log_level: str
    secrets: list[str]


class Failing(msgspec.Struct, frozen=True, array_like=True):
    """A policy that is no longer called: its calls fail."""

    since: int
    """From this place on."""
    reason: str


class Open(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Judge a run, from its first draft on."""

    task: int
    run: str
    policies: tuple[str, ...]
    failing: dict[str, Failing] = {}


class Feed(msgspec.Struct, frozen=True, array_like=True, tag="feed"):
    """Further drafts of the run, in their original frames."""

    task: int
    frames: list[bytes]


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """The run needs no more verdicts."""

    task: int


ToExecutor = Open | Feed | Close


class Verdicts(msgspec.Struct, frozen=True, array_like=True, tag="said"):
    """Verdicts of a run's policies."""

    task: int
    seen: int
    """How many of the run's drafts they have seen."""
    steps: list[PolicyVerdict]


class WaitingForSlot(msgspec.Struct, frozen=True, array_like=True, tag="waits"):
    """The run is waiting for a slot."""

    task: int


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """All of the run has been judged, or its policies ended it."""

    task: int


class Defect(msgspec.Struct, frozen=True, array_like=True, tag="defect"):
    """An error that no policy caused."""

    task: int
    problem: str


class Overran(msgspec.Struct, frozen=True, array_like=True, tag="overran"):
    """A cancelled call of the policy is still running after its timeout."""

    task: int
    policy: str
    place: int


FromExecutor = Verdicts | WaitingForSlot | Finished | Defect | Overran

to_executor = msgspec.msgpack.Decoder(ToExecutor)
from_executor = msgspec.msgpack.Decoder(FromExecutor)
_encoder = msgspec.msgpack.Encoder()


def framed(message: msgspec.Struct) -> bytes:
    """Return the message in its wire form."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Splits received bytes into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the messages that are complete. Raises DecodeError for an invalid one."""
        self._buffer += data
        begin = 0
        while len(self._buffer) - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, begin)
            end = begin + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[begin + _LENGTH.size : end])
            begin = end
            yield self._decoder.decode(body)
        del self._buffer[:begin]
