"""What a policy worker and its executors say to each other: msgpack, each message with its length before it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from tokenbus.events.frames import PolicyVerdict
from tokenbus.policy.loading import PolicySpec

_LENGTH = struct.Struct("<I")


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What the process must know from which executors are forked."""

    policies: dict[str, PolicySpec]
    calls: int
    """Calls of policies that run at once in one executor."""
    reassure_s: float
    memory_bytes: int
    """What an executor may have beyond what it had at its start."""
    redis_url: str
    prefix: str
    partitions: int
    run_ttl_ms: int
    path: list[str]
    """Where modules are found."""
    log_level: str
    secrets: list[str]


class Failing(msgspec.Struct, frozen=True, array_like=True):
    """A policy that is called no more: its calls fail."""

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
    """Further drafts of the run, as the frames in which they came."""

    task: int
    frames: list[bytes]


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """The run needs no judgement any more."""

    task: int


ToExecutor = Open | Feed | Close


class Said(msgspec.Struct, frozen=True, array_like=True, tag="said"):
    """What policies said."""

    task: int
    seen: int
    """Drafts of the run that they have had by now."""
    steps: list[PolicyVerdict]


class Waits(msgspec.Struct, frozen=True, array_like=True, tag="waits"):
    """The run waits for its turn."""

    task: int


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """All of the run is judged, or its policies ended it."""

    task: int


class Defect(msgspec.Struct, frozen=True, array_like=True, tag="defect"):
    """Something failed that is no policy's doing."""

    task: int
    problem: str


class Overran(msgspec.Struct, frozen=True, array_like=True, tag="overran"):
    """A call of the policy goes on past its timeout, though it was cancelled."""

    task: int
    policy: str
    place: int


FromExecutor = Said | Waits | Finished | Defect | Overran

to_executor = msgspec.msgpack.Decoder(ToExecutor)
from_executor = msgspec.msgpack.Decoder(FromExecutor)
_encoder = msgspec.msgpack.Encoder()


def framed(message: msgspec.Struct) -> bytes:
    """The message as it is sent."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts what is received into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that are whole by now. Raises DecodeError for what is none."""
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
