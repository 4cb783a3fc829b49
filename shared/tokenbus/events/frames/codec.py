"""Frames to msgpack and back. What a newer version added stays undecoded, for readers to skip."""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from tokenbus.events.frames.raw import RawFrame, RawItem
from tokenbus.events.frames.run_events import BusEvent, EventFrame, TapedFrame
from tokenbus.events.frames.work import Control, Drafts, ProviderJob, ToolWork, TurnWork
from tokenbus.events.requests import Message

_encode = msgspec.msgpack.Encoder().encode
raw_decoder = msgspec.msgpack.Decoder(RawFrame)
event_decoder = msgspec.msgpack.Decoder(EventFrame)
turn_decoder = msgspec.msgpack.Decoder(TurnWork)
job_decoder = msgspec.msgpack.Decoder(ProviderJob)
tool_decoder = msgspec.msgpack.Decoder(ToolWork)
drafts_decoder = msgspec.msgpack.Decoder(Drafts)
control_decoder = msgspec.msgpack.Decoder(Control)
history_decoder = msgspec.msgpack.Decoder(list[Message])
_item_decoder = msgspec.msgpack.Decoder(RawItem)
_bus_event_decoder = msgspec.msgpack.Decoder(BusEvent)
_tag_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])


class _LooseRaw(msgspec.Struct, frozen=True, array_like=True):
    turn: int
    attempt: int
    n: int
    at_ms: int
    items: list[msgspec.Raw]


class _LooseEvents(msgspec.Struct, frozen=True, array_like=True):
    turn: int
    attempt: int
    at_ms: int
    events: list[msgspec.Raw]


class _LooseTaken(msgspec.Struct, frozen=True, array_like=True):
    frame: msgspec.Raw
    events: int


_loose_raw = msgspec.msgpack.Decoder(_LooseRaw)
_loose_events = msgspec.msgpack.Decoder(_LooseEvents)
_loose_taken = msgspec.msgpack.Decoder(_LooseTaken)


def decode_raw(data: bytes) -> RawFrame:
    """Decode a frame. Items of a kind added by a newer version stay `msgspec.Raw`, for readers to skip.

    Raises msgspec's ValidationError and DecodeError for an invalid frame.
    """
    try:
        return raw_decoder.decode(data)
    except msgspec.ValidationError:
        loose = _loose_raw.decode(data)
        items: list[Any] = [_known(item, _item_decoder, RawItem) for item in loose.items]
        return RawFrame(loose.turn, loose.attempt, loose.n, loose.at_ms, items)


def decode_events(data: bytes | msgspec.Raw) -> EventFrame:
    """Decode a frame. Events of a kind added by a newer version stay `msgspec.Raw`, to be skipped and rewritten
    unchanged.

    Raises msgspec's ValidationError and DecodeError for an invalid frame.
    """
    try:
        return event_decoder.decode(data)
    except msgspec.ValidationError:
        loose = _loose_events.decode(data)
        events: list[Any] = [_known(event, _bus_event_decoder, BusEvent) for event in loose.events]
        return EventFrame(loose.turn, loose.attempt, loose.at_ms, events)


def decode_taken(data: bytes) -> TapedFrame:
    """Decode a tape entry; see `decode_events`."""
    loose = _loose_taken.decode(data)
    return TapedFrame(decode_events(loose.frame), loose.events)


def is_known(item: object) -> bool:
    """Whether this version knows the item's or event's kind; otherwise a newer version wrote it."""
    return not isinstance(item, msgspec.Raw)


def _known(item: msgspec.Raw, decoder: msgspec.msgpack.Decoder[Any], kinds: Any) -> object:
    try:
        return decoder.decode(item)
    except msgspec.ValidationError:
        try:
            tag = msgspec.msgpack.decode(_tag_decoder.decode(item)[0], type=str)
        except (msgspec.DecodeError, IndexError):
            tag = None
        if tag is None or any(kind.__struct_config__.tag == tag for kind in get_args(kinds)):
            raise
        return msgspec.Raw(bytes(item))


def encode(
    frame: RawFrame | EventFrame | TapedFrame | Drafts | TurnWork | ToolWork | ProviderJob | Control | list[Message],
) -> bytes:
    """Encode a frame as msgpack."""
    return _encode(frame)
