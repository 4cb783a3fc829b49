"""The JSON of the Messages API, as far as it is needed: one struct per event, selected by `type`.

The `type` in the JSON decides, never the SSE event name, which may be missing.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec
from msgspec import Raw

from tokenbus.errors import Malformed
from tokenbus.providers.response.json_decode import Index, read, tag_of
from tokenbus.providers.response.unknown_fields import NOTHING, Known, UnknownField, read_known


class Message(Known):
    """A message. In `message_start` it is mostly empty, but it may already have content."""

    id: str | None = None
    model: str | None = None
    content: list[Raw] | None = None
    stop_reason: str | None = None
    stop_sequence: str | None = None
    stop_details: Raw = NOTHING
    container: Raw = NOTHING
    context_management: Raw = NOTHING
    usage: dict[str, object] | None = None
    role: Raw = NOTHING


class StartedMessage(Message):
    type: Raw = NOTHING


class WholeMessage(Message, tag_field="type", tag="message"):
    """A response that was not streamed."""


class _Event(Known, tag_field="type"):
    """Base of events, deltas and blocks."""


class MessageStart(_Event, tag="message_start"):
    message: StartedMessage


class BlockStart(_Event, tag="content_block_start"):
    index: Index
    content_block: Raw


class TextDelta(_Event, tag="text_delta"):
    text: str


class ThinkingDelta(_Event, tag="thinking_delta"):
    thinking: str


class InputDelta(_Event, tag="input_json_delta"):
    partial_json: str


class SignatureDelta(_Event, tag="signature_delta"):
    signature: str


class CitationsDelta(_Event, tag="citations_delta"):
    citation: Raw


Delta = TextDelta | ThinkingDelta | InputDelta | SignatureDelta | CitationsDelta


class BlockDelta(_Event, tag="content_block_delta"):
    index: Index
    delta: Delta


class UnknownDelta(msgspec.Struct):
    """A `content_block_delta` with a delta of unknown type."""

    index: Index
    delta: Raw


class BlockStop(_Event, tag="content_block_stop"):
    index: Index


class StopDelta(Known):
    stop_reason: str | None = None
    stop_sequence: str | None = None
    stop_details: Raw = NOTHING
    container: Raw = NOTHING


class MessageDelta(_Event, tag="message_delta"):
    delta: StopDelta
    usage: dict[str, object] | None = None
    context_management: Raw = NOTHING


class MessageStop(_Event, tag="message_stop"):
    pass


class Ping(_Event, tag="ping", forbid_unknown_fields=False):
    pass


class Error(_Event, tag="error", forbid_unknown_fields=False):
    error: object


class BareError(msgspec.Struct):
    """An error without a `type`, as gateways in front of the API send it."""

    error: object


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping | Error | WholeMessage


class TextBlock(_Event, tag="text"):
    text: str | None = None
    citations: list[Raw] | None = None


class ThinkingBlock(_Event, tag="thinking"):
    thinking: str | None = None
    signature: str | None = None


class RedactedBlock(_Event, tag="redacted_thinking"):
    data: str


class ToolUseBlock(_Event, tag="tool_use", forbid_unknown_fields=False):
    """A tool call. Fields not listed here are sent back with it."""

    id: str
    name: str
    input: Raw = NOTHING


Block = TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock


class Item(msgspec.Struct):
    """What names a block of a type without a struct here."""

    id: str | None = None
    tool_use_id: str | None = None
    name: str | None = None


class Unknown(msgspec.Struct):
    """An object of unknown `type`."""

    type: str


def _tags(*structs: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(str(struct.__struct_config__.tag) for struct in structs)


_event = msgspec.json.Decoder(Event)
_event_tags = _tags(
    MessageStart, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop, Ping, Error, WholeMessage
)
_block = msgspec.json.Decoder(Block)
_block_tags = _tags(TextBlock, ThinkingBlock, RedactedBlock, ToolUseBlock)
_item = msgspec.json.Decoder(Item)
_unknown_delta = msgspec.json.Decoder(UnknownDelta)
_bare_error = msgspec.json.Decoder(BareError)
_delta_tags = _tags(TextDelta, ThinkingDelta, InputDelta, SignatureDelta, CitationsDelta)


def read_event(data: bytes) -> tuple[Event | UnknownDelta | BareError | Unknown, list[UnknownField]]:
    """Decode one event, and its unknown fields. Raises Malformed if it has a known type but the wrong structure."""
    try:
        return read_known(_event, Event, data, "event")
    except Malformed:
        kind = tag_of(data)
        if kind == "content_block_delta":
            odd = read(_unknown_delta, data, "event")
            if tag_of(bytes(odd.delta)) not in {"", *_delta_tags}:
                return odd, []
        if not kind:
            with suppress(Malformed):
                return read(_bare_error, data, "event"), []
        if kind in _event_tags or not kind:
            raise
        return Unknown(kind), []


def read_item(data: bytes) -> Item:
    """Decode what names a block of unknown type. Raises Malformed."""
    return read(_item, data, "content block")


def read_block(data: bytes) -> tuple[Block | Unknown, list[UnknownField]]:
    """Decode one content block, and its unknown fields. Raises Malformed if it has a known type but the wrong
    structure.
    """
    try:
        return read_known(_block, Block, data, "content block")
    except Malformed:
        kind = tag_of(data)
        if kind in _block_tags or not kind:
            raise
        return Unknown(kind), []
