"""What the Responses API says, as far as it is needed: one struct per event, told apart by `type`.

The JSON `type` decides, never the event's name, which may be missing. Neither ids nor indexes of items are sound keys:
some vendors change ids from event to event (GitHub Copilot), others leave `output_index` out (llama.cpp); see
`tokenbus.providers.openai_responses.item_table`. An index inside of an item that is left out is 0.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from msgspec import Raw

from tokenbus.errors import Malformed
from tokenbus.providers.response.json_decode import Index, read, tag_of

NOTHING = Raw(b"")
"""An absent field that is kept as it is."""

Arguments = str | dict[str, Raw] | None
"""A call's arguments: a string, or an object from vendors that know no better."""


class Details(msgspec.Struct):
    """`incomplete_details`."""

    reason: str | None = None


class Response(msgspec.Struct):
    """The response as the first events and the last one have it, and a response that was not streamed."""

    id: str | None = None
    object: str | None = None
    model: str | None = None
    status: str | None = None
    output: list[Raw] | None = None
    usage: dict[str, Any] | None = None
    error: Any = None
    incomplete_details: Details | None = None
    tools: Raw = NOTHING


class _Event(msgspec.Struct, tag_field="type"):
    """Base of the events."""


class _Whole(_Event):
    response: Response


class Created(_Whole, tag="response.created"):
    pass


class InProgress(_Whole, tag="response.in_progress"):
    pass


class Queued(_Whole, tag="response.queued"):
    pass


class Completed(_Whole, tag="response.completed"):
    pass


class Incomplete(_Whole, tag="response.incomplete"):
    pass


class ResponseFailed(_Whole, tag="response.failed"):
    pass


class Cancelled(_Whole, tag="response.cancelled"):
    pass


class ErrorEvent(_Event, tag="error"):
    """Its fields are at top level, or in an `error`: it is read as a whole."""


class OfItem(_Event):
    """An event about an item, or a part of it."""

    output_index: Index | None = None
    item_id: str | None = None


class ItemAdded(OfItem, kw_only=True, tag="response.output_item.added"):
    item: Raw


class ItemDone(OfItem, kw_only=True, tag="response.output_item.done"):
    item: Raw


class _OfContent(OfItem, kw_only=True):
    content_index: Index = 0


class _OfSummary(OfItem, kw_only=True):
    summary_index: Index = 0


class TextDelta(_OfContent, kw_only=True, tag="response.output_text.delta"):
    delta: str


class TextDone(_OfContent, kw_only=True, tag="response.output_text.done"):
    text: str


class RefusalDelta(_OfContent, kw_only=True, tag="response.refusal.delta"):
    delta: str


class RefusalDone(_OfContent, kw_only=True, tag="response.refusal.done"):
    refusal: str


class AnnotationAdded(_OfContent, kw_only=True, tag="response.output_text.annotation.added"):
    annotation: Raw


class PartAdded(_OfContent, tag="response.content_part.added"):
    pass


class PartDone(_OfContent, tag="response.content_part.done"):
    part: Raw = NOTHING


class ReasoningDelta(_OfContent, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_OfContent, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class SummaryDelta(_OfSummary, kw_only=True, tag="response.reasoning_summary_text.delta"):
    delta: str


class SummaryDone(_OfSummary, kw_only=True, tag="response.reasoning_summary_text.done"):
    text: str


class SummaryPartAdded(_OfSummary, tag="response.reasoning_summary_part.added"):
    pass


class SummaryPartDone(_OfSummary, tag="response.reasoning_summary_part.done"):
    part: Raw = NOTHING


class ArgumentsDelta(OfItem, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(OfItem, tag="response.function_call_arguments.done"):
    arguments: Arguments = None


class InputDelta(OfItem, kw_only=True, tag="response.custom_tool_call_input.delta"):
    delta: str


class InputDone(OfItem, kw_only=True, tag="response.custom_tool_call_input.done"):
    input: str


class PartialImage(OfItem, kw_only=True, tag="response.image_generation_call.partial_image"):
    partial_image_b64: str
    output_format: str | None = None
    size: str | None = None
    quality: str | None = None


class KeepAlive(_Event, tag="keepalive"):
    pass


class Ping(_Event, tag="ping"):
    pass


Event = (
    Created
    | InProgress
    | Queued
    | Completed
    | Incomplete
    | ResponseFailed
    | Cancelled
    | ErrorEvent
    | KeepAlive
    | Ping
    | PartAdded
    | SummaryPartAdded
    | ItemAdded
    | ItemDone
    | TextDelta
    | TextDone
    | RefusalDelta
    | RefusalDone
    | AnnotationAdded
    | PartDone
    | ReasoningDelta
    | ReasoningDone
    | SummaryDelta
    | SummaryDone
    | SummaryPartDone
    | ArgumentsDelta
    | ArgumentsDone
    | InputDelta
    | InputDone
    | PartialImage
)


class Unknown(msgspec.Struct):
    """An event whose `type` has no struct here."""

    type: str
    output_index: object = None
    item_id: object = None


class ContentPart(msgspec.Struct):
    """A part of a message's content, or of a reasoning's summary or content."""

    text: str | None = None
    refusal: str | None = None
    annotations: list[Raw] | None = None


class Item(msgspec.Struct):
    """An item of the output; which fields it has depends on its type."""

    type: str
    id: str | None = None
    status: str | None = None
    content: list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Arguments = None
    input: str | None = None
    result: str | None = None
    output_format: str | None = None
    revised_prompt: str | None = None
    size: str | None = None
    quality: str | None = None


class _Named(msgspec.Struct):
    """Of an item without a name here: what tells it from others."""

    type: str
    id: object = None
    call_id: object = None


class NamedTool(msgspec.Struct):
    """A tool of the request, as the response repeats it."""

    type: str = ""
    name: str = ""
    model: str | None = None


_event = msgspec.json.Decoder(Event)
_unknown = msgspec.json.Decoder(Unknown)
_response = msgspec.json.Decoder(Response)
_item = msgspec.json.Decoder(Item)
_named = msgspec.json.Decoder(_Named)
content_part = msgspec.json.Decoder(ContentPart)
anything = msgspec.json.Decoder()
named_tools = msgspec.json.Decoder(list[NamedTool])
fields = msgspec.json.Decoder(dict[str, Raw])

_TAGS = frozenset(str(struct.__struct_config__.tag) for struct in get_args(Event))
_ITEMS = frozenset({"message", "reasoning", "function_call", "custom_tool_call", "image_generation_call"})
"""Types of items whose fields are read; all others go through as they are."""


def read_event(data: bytes) -> Event | Unknown | Response:
    """One event, or a whole response. Raises Malformed where it is of a known type and breaks its form."""
    try:
        return read(_event, data, "event")
    except Malformed:
        kind = tag_of(data)
        if kind in _TAGS:
            raise
        return read(_unknown, data, "event") if kind else read(_response, data, "event")


def read_item(data: bytes) -> Item:
    """An item. Raises Malformed where it is of a known type and breaks its form."""
    named = read(_named, data, "item")
    if named.type in _ITEMS:
        return read(_item, data, "item")
    ids = (name if isinstance(name, str) else None for name in (named.id, named.call_id))
    return Item(named.type, next(ids), call_id=next(ids))
