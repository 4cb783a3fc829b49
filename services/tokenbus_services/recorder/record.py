"""A debug record: all that a run's outcome came from, and the outcome. Pure but for the blob store that it goes to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar, cast

import msgspec

from tokenbus.blobs import BlobLoader, BlobRef, parse_blob_id
from tokenbus.core.blob_refs import refs
from tokenbus.errors import BlobRefused, Malformed
from tokenbus.events.frames import RawFrame, TapedFrame, decode_raw, decode_taken
from tokenbus.events.public import PublicEvent
from tokenbus.storage import restore_from_storage, sanitize_for_storage

T = TypeVar("T")

MEDIA_TYPE = "application/json"
_PATHS = ("/frames", "/tape")
"""These go to the blob store whole, however small: nobody reads them in place."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded run. As JSON, ``frames`` and ``tape`` are base64."""

    format: Literal[1] = 1
    run: str
    accepted_ms: int
    request: dict[str, Any]
    """As it was accepted, with the tools that the deployment added."""
    history: dict[str, list[dict[str, Any]]] = {}
    """By turn, the messages that it added to the conversation."""
    frames: bytes
    """msgpack: a list of the raw frames as they lay on the bus, those of an attempt in their order."""
    tape: bytes
    """msgpack: a list of what the parser took, in its order."""
    events: list[dict[str, Any]]
    """The run's log: its public events."""
    truncated: bool = False
    """The raw stream was longer than what may be kept."""

    def raw_frames(self) -> list[RawFrame]:
        """The raw stream. Raises Malformed."""
        return [_decoded(decode_raw, frame, "raw frame") for frame in _list_of_bytes(self.frames, "raw stream")]

    def taken(self) -> list[TapedFrame]:
        """What the parser took. Raises Malformed."""
        return [_decoded(decode_taken, piece, "tape") for piece in _list_of_bytes(self.tape, "tape")]

    def public_events(self) -> list[PublicEvent]:
        """The run's log. Raises Malformed."""
        try:
            return msgspec.convert(self.events, list[PublicEvent])
        except msgspec.ValidationError as e:
            raise Malformed(f"record of {self.run}", f"events: {e}") from None

    def media(self) -> set[str]:
        """The ids of the blobs that request, history and events name: images, documents, long tool results."""
        return set(_blob_ids([self.request, self.history, self.events]))


def packed(pieces: list[bytes]) -> bytes:
    """A list of encoded frames, as a record holds it."""
    return msgspec.msgpack.encode(pieces)


class Stored(msgspec.Struct, frozen=True):
    """A record in the blob store."""

    ref: BlobRef
    parts: set[str]
    """The blobs that it refers to."""


async def store(record: Record, blobs: BlobLoader) -> Stored:
    """Put a record into the blob store; the same record is the same blobs. Raises NotStorable, BlobError."""
    kept = await sanitize_for_storage(msgspec.to_builtins(record), blobs, paths=_PATHS)
    ref = await blobs.store(msgspec.json.encode(kept), MEDIA_TYPE)
    return Stored(ref, refs(kept))


async def load(blob_id: str, blobs: BlobLoader) -> Record:
    """A record out of the blob store. Raises BlobError, NotStorable, Malformed."""
    try:
        kept = msgspec.json.decode(await blobs.load(blob_id))
    except msgspec.DecodeError as e:
        raise Malformed(f"record {blob_id}", str(e)) from None
    return from_builtins(await restore_from_storage(kept, blobs), f"record {blob_id}")


def from_builtins(value: object, where: str) -> Record:
    """A record from plain JSON. Raises Malformed."""
    try:
        return msgspec.convert(value, Record)
    except msgspec.ValidationError as e:
        raise Malformed(where, f"this is no record: {e}") from None


def _list_of_bytes(data: bytes, where: str) -> list[bytes]:
    return _decoded(msgspec.msgpack.Decoder(list[bytes]).decode, data, where)


def _decoded(decode: Callable[[bytes], T], data: bytes, where: str) -> T:
    try:
        return decode(data)
    except msgspec.DecodeError as e:
        raise Malformed(where, str(e)) from None


def _blob_ids(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for item in cast("list[Any]", value):
            yield from _blob_ids(item)
    elif isinstance(value, dict):
        for name, item in cast("dict[str, Any]", value).items():
            if name == "blob_id" and isinstance(item, str):
                try:
                    parse_blob_id(item)
                except BlobRefused:
                    continue  # somebody's own member of that name
                yield item
            else:
                yield from _blob_ids(item)
