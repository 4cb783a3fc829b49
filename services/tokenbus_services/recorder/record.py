"""A debug record: everything that determined a run's outcome, and the outcome. Pure, except for the blob store."""

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
"""Always stored as blobs, in any size, because nothing reads them in place."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded run. In JSON, ``frames`` and ``tape`` are base64."""

    format: Literal[1] = 1
    run: str
    accepted_ms: int
    request: dict[str, Any]
    """As accepted, including the tools that the deployment added."""
    history: dict[str, list[dict[str, Any]]] = {}
    """By turn: the messages that it added to the conversation."""
    frames: bytes
    """msgpack: a list of the raw frames as on the bus; those of an attempt are in order."""
    tape: bytes
    """msgpack: a list of the frames that the parser applied, in order."""
    events: list[dict[str, Any]]
    """The run's log: its public events."""
    truncated: bool = False
    """The raw stream exceeded its size limit."""

    def raw_frames(self) -> list[RawFrame]:
        """The raw stream. Raises Malformed."""
        return [_decoded(decode_raw, frame, "raw frame") for frame in _list_of_bytes(self.frames, "raw stream")]

    def taken(self) -> list[TapedFrame]:
        """The frames that the parser applied. Raises Malformed."""
        return [_decoded(decode_taken, piece, "tape") for piece in _list_of_bytes(self.tape, "tape")]

    def public_events(self) -> list[PublicEvent]:
        """The run's log. Raises Malformed."""
        try:
            return msgspec.convert(self.events, list[PublicEvent])
        except msgspec.ValidationError as e:
            raise Malformed(f"record of {self.run}", f"events: {e}") from None

    def media(self) -> set[str]:
        """Ids of the blobs referenced by request, history and events: images, documents, long tool results."""
        return set(_blob_ids([self.request, self.history, self.events]))


def packed(pieces: list[bytes]) -> bytes:
    """Pack encoded frames into one list, as stored in a record."""
    return msgspec.msgpack.encode(pieces)


class Stored(msgspec.Struct, frozen=True):
    ref: BlobRef
    parts: set[str]
    """The blobs that it refers to."""


async def store(record: Record, blobs: BlobLoader) -> Stored:
    """Put a record into the blob store; the same record gives the same blobs. Raises NotStorable, BlobError."""
    kept = await sanitize_for_storage(msgspec.to_builtins(record), blobs, paths=_PATHS)
    ref = await blobs.store(msgspec.json.encode(kept), MEDIA_TYPE)
    return Stored(ref, refs(kept))


async def load(blob_id: str, blobs: BlobLoader) -> Record:
    """Load a record from the blob store. Raises BlobError, NotStorable, Malformed."""
    try:
        kept = msgspec.json.decode(await blobs.load(blob_id))
    except msgspec.DecodeError as e:
        raise Malformed(f"record {blob_id}", str(e)) from None
    return from_builtins(await restore_from_storage(kept, blobs), f"record {blob_id}")


class Outline(msgspec.Struct, frozen=True):
    """What a record says without the provider's bytes: what was asked, and the run's log."""

    run: str
    accepted_ms: int
    request: dict[str, Any]
    events: list[PublicEvent]


async def load_outline(blob_id: str, blobs: BlobLoader) -> Outline:
    """Load that part of a record alone. Raises BlobError, NotStorable, Malformed."""
    where = f"record {blob_id}"
    try:
        kept: dict[str, Any] = msgspec.json.decode(await blobs.load(blob_id), type=dict[str, Any])
        seen = {name: kept[name] for name in Outline.__struct_fields__}
        return msgspec.convert(await restore_from_storage(seen, blobs), Outline)
    except (msgspec.DecodeError, KeyError) as e:
        raise Malformed(where, str(e)) from None


def from_builtins(value: object, where: str) -> Record:
    """Convert plain JSON to a record. Raises Malformed."""
    try:
        return msgspec.convert(value, Record)
    except msgspec.ValidationError as e:
        raise Malformed(where, f"not a record: {e}") from None


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
                    continue  # a user's own field of that name
                yield item
            else:
                yield from _blob_ids(item)
