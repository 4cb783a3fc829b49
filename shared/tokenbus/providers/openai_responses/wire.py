"""The JSON of the Responses API, as far as it is needed: one struct per event, selected by `type`.

The `type` in the JSON decides, never the SSE event name, which may be missing. Neither item ids nor indexes are
reliable keys: some vendors change ids from event to event (GitHub Copilot), others omit `output_index` (llama.cpp); see
`ItemTable`. A missing index inside an item is 0.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from msgspec import Raw

from tokenbus.errors import Malformed
from tokenbus.providers.response.json_decode import Index, read, tag_of
from tokenbus.providers.response.unknown_fields import NOTHING, Known, UnknownField, dropping, read_known

Arguments = str | dict[str, Raw] | None
"""A call's arguments: a string, or an object from nonconforming vendors."""


class Details(Known):
    """The JSON of `incomplete_details`."""

    reason: str | None = None


_REPEATED = dropping(
    "created_at completed_at background frequency_penalty instructions max_output_tokens max_tool_calls metadata "
    "output_text parallel_tool_calls presence_penalty previous_response_id prompt prompt_cache_key "
    "prompt_cache_retention reasoning safety_identifier store temperature text tool_choice top_logprobs top_p "
    "truncation user"
)
"""Times, settings of the request and repetitions of the output."""


class Response(_REPEATED):
    """The response object in the first and last events, or a response that was not streamed."""

    id: str | None = None
    object: str | None = None
    model: str | None = None
    status: str | None = None
    output: list[Raw] | None = None
    usage: dict[str, Any] | None = None
    error: Any = None
    incomplete_details: Details | None = None
    tools: Raw = NOTHING
    service_tier: Raw = NOTHING


class _Event(Known, tag_field="type"):
    sequence_number: Raw = NOTHING


class _Whole(_Event, kw_only=True):
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


class ErrorEvent(_Event, tag="error", forbid_unknown_fields=False):
    """Its fields are at the top level or in an `error` object, so it is read as raw JSON."""


class ItemEvent(_Event):
    """An event about an item or a part of it."""

    output_index: Index | None = None
    item_id: str | None = None
    obfuscation: Raw = NOTHING


class ItemAdded(ItemEvent, kw_only=True, tag="response.output_item.added"):
    item: Raw


class ItemDone(ItemEvent, kw_only=True, tag="response.output_item.done"):
    item: Raw


class _ContentEvent(ItemEvent, kw_only=True):
    content_index: Index = 0


class _SummaryEvent(ItemEvent, kw_only=True):
    summary_index: Index = 0


class TextDelta(_ContentEvent, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: Raw = NOTHING


class TextDone(_ContentEvent, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: Raw = NOTHING
    """Those of its deltas once more."""


class RefusalDelta(_ContentEvent, kw_only=True, tag="response.refusal.delta"):
    delta: str


class RefusalDone(_ContentEvent, kw_only=True, tag="response.refusal.done"):
    refusal: str


class AnnotationAdded(_ContentEvent, kw_only=True, tag="response.output_text.annotation.added"):
    annotation: Raw
    annotation_index: Raw = NOTHING


class PartAdded(_ContentEvent, tag="response.content_part.added"):
    part: Raw = NOTHING


class PartDone(_ContentEvent, tag="response.content_part.done"):
    part: Raw = NOTHING


class ReasoningDelta(_ContentEvent, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_ContentEvent, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class SummaryDelta(_SummaryEvent, kw_only=True, tag="response.reasoning_summary_text.delta"):
    delta: str


class SummaryDone(_SummaryEvent, kw_only=True, tag="response.reasoning_summary_text.done"):
    text: str


class SummaryPartAdded(_SummaryEvent, tag="response.reasoning_summary_part.added"):
    part: Raw = NOTHING


class SummaryPartDone(_SummaryEvent, tag="response.reasoning_summary_part.done"):
    part: Raw = NOTHING


class ArgumentsDelta(ItemEvent, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(ItemEvent, tag="response.function_call_arguments.done"):
    arguments: Arguments = None
    name: Raw = NOTHING


class InputDelta(ItemEvent, kw_only=True, tag="response.custom_tool_call_input.delta"):
    delta: str


class InputDone(ItemEvent, kw_only=True, tag="response.custom_tool_call_input.done"):
    input: str


class PartialImage(ItemEvent, kw_only=True, tag="response.image_generation_call.partial_image"):
    partial_image_b64: str
    output_format: str | None = None
    size: str | None = None
    quality: str | None = None
    partial_image_index: Raw = NOTHING
    background: Raw = NOTHING


class KeepAlive(_Event, tag="keepalive", forbid_unknown_fields=False):
    pass


class Ping(_Event, tag="ping", forbid_unknown_fields=False):
    pass


_Life = Created | InProgress | Queued | Completed | Incomplete | ResponseFailed | Cancelled
_Items = ItemAdded | ItemDone | PartAdded | PartDone | SummaryPartAdded | SummaryPartDone | AnnotationAdded
_Deltas = TextDelta | RefusalDelta | ReasoningDelta | SummaryDelta | ArgumentsDelta | InputDelta | PartialImage
_Wholes = TextDone | RefusalDone | ReasoningDone | SummaryDone | ArgumentsDone | InputDone
Event = _Life | _Items | _Deltas | _Wholes | ErrorEvent | KeepAlive | Ping


class Unknown(msgspec.Struct):
    """An event of unknown `type`."""

    type: str
    output_index: object = None
    item_id: object = None
    delta: object = None
    command_index: object = None
    """Of a shell's command, or its output."""


class ContentPart(Known):
    """A part of a message's content, or of a reasoning item's summary or content."""

    text: str | None = None
    refusal: str | None = None
    annotations: list[Raw] | None = None
    logprobs: Raw = NOTHING
    type: Raw = NOTHING


class Item(Known):
    """An output item. Its type determines which fields it has."""

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
    background: Raw = NOTHING
    action: Raw = NOTHING
    role: Raw = NOTHING
    # those that go back with the item
    phase: Raw = NOTHING
    caller: Raw = NOTHING
    namespace: Raw = NOTHING
    is_async: Raw = msgspec.field(default=NOTHING, name="async")


class _Named(msgspec.Struct):
    """The identifying fields of an item of unknown type."""

    type: str
    id: object = None
    call_id: object = None
    name: object = None


class NamedTool(msgspec.Struct):
    """A request tool as repeated in the response."""

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
raws = msgspec.json.Decoder(list[Raw])
fields = msgspec.json.Decoder(dict[str, Raw])

_TAGS = frozenset(str(struct.__struct_config__.tag) for struct in get_args(Event))
_ITEMS = frozenset({"message", "reasoning", "function_call", "custom_tool_call", "image_generation_call"})
"""Item types whose fields are decoded; all others pass through verbatim."""


def read_event(data: bytes) -> tuple[Event | Unknown | Response, list[UnknownField]]:
    """Decode one event or a whole response, and its unknown fields. Raises Malformed if it has a known type but the
    wrong structure.
    """
    try:
        return read_known(_event, Event, data, "event")
    except Malformed:
        kind = tag_of(data)
        if kind in _TAGS:
            raise
        return (read(_unknown, data, "event"), []) if kind else read_known(_response, Response, data, "event")


def read_item(data: bytes) -> tuple[Item, list[UnknownField]]:
    """Decode an item, and its unknown fields. Raises Malformed if it has a known type but the wrong structure."""
    named = read(_named, data, "item")
    if named.type in _ITEMS:
        return read_known(_item, Item, data, "item")
    ids = (name if isinstance(name, str) else None for name in (named.id, named.call_id, named.name))
    return Item(named.type, next(ids), call_id=next(ids), name=next(ids)), []
