"""What Open Responses (openresponses.org, 2026-04-24) demands of a response and of each event of its stream.

Written from the specification's schema: a field without a default is required there, and fields that it does not name
are allowed, as there. `parse_event` and `parse_response` raise msgspec.ValidationError.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Index = Annotated[int, Meta(ge=0)]


class Part(Struct, tag_field="type", kw_only=True):
    """A piece of content."""


class UrlCitation(Struct, tag_field="type", tag="url_citation", kw_only=True):
    url: str
    start_index: int
    end_index: int
    title: str


class OutputText(Part, tag="output_text", kw_only=True):
    text: str
    annotations: list[UrlCitation]
    logprobs: list[dict[str, Any]] = []


class SummaryText(Part, tag="summary_text", kw_only=True):
    text: str


class ReasoningText(Part, tag="reasoning_text", kw_only=True):
    text: str


class Refusal(Part, tag="refusal", kw_only=True):
    refusal: str


class InputText(Part, tag="input_text", kw_only=True):
    text: str


class InputImage(Part, tag="input_image", kw_only=True):
    image_url: str | None
    detail: Literal["low", "high", "auto"]


class InputFile(Part, tag="input_file", kw_only=True):
    filename: str | msgspec.UnsetType = msgspec.UNSET
    file_url: str | msgspec.UnsetType = msgspec.UNSET


AnyPart = OutputText | SummaryText | ReasoningText | Refusal | InputText | InputImage | InputFile


class Item(Struct, tag_field="type", kw_only=True):
    """An item of a response's output."""

    id: str


class Message(Item, tag="message", kw_only=True):
    status: ItemStatus
    role: Literal["user", "assistant", "system", "developer"]
    content: list[AnyPart]


class FunctionCall(Item, tag="function_call", kw_only=True):
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class FunctionCallOutput(Item, tag="function_call_output", kw_only=True):
    call_id: str
    output: str | list[InputText | InputImage | InputFile]
    status: ItemStatus


class Reasoning(Item, tag="reasoning", kw_only=True):
    summary: list[AnyPart]
    content: list[AnyPart] | msgspec.UnsetType = msgspec.UNSET
    encrypted_content: str | msgspec.UnsetType = msgspec.UNSET


class Compaction(Item, tag="compaction", kw_only=True):
    encrypted_content: str


AnyItem = Message | FunctionCall | FunctionCallOutput | Reasoning | Compaction


class Reason(Struct):
    reason: str


class Error(Struct):
    code: str
    message: str


class FunctionTool(Struct, tag_field="type", tag="function", kw_only=True):
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class FunctionToolChoice(Struct, tag_field="type", tag="function", kw_only=True):
    name: str | msgspec.UnsetType = msgspec.UNSET


class PlainText(Struct, tag_field="type", tag="text"):
    pass


class JsonObject(Struct, tag_field="type", tag="json_object"):
    pass


class JsonSchema(Struct, tag_field="type", tag="json_schema", kw_only=True):
    name: str
    description: str | None
    schema: dict[str, Any] | None
    """The published schema says null alone, which no server can mean that repeats the request."""
    strict: bool


class Text(Struct, kw_only=True):
    format: PlainText | JsonObject | JsonSchema
    verbosity: Literal["low", "medium", "high"] | msgspec.UnsetType = msgspec.UNSET


class ReasoningSettings(Struct, kw_only=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None
    """The schema describes `minimal` without listing it, and is older than `max`."""
    summary: Literal["concise", "detailed", "auto"] | None


class InputDetails(Struct):
    cached_tokens: int


class OutputDetails(Struct):
    reasoning_tokens: int


class Usage(Struct, kw_only=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails
    output_tokens_details: OutputDetails


class Response(Struct, kw_only=True):
    """`ResponseResource`: all of these fields are required."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    incomplete_details: Reason | None
    model: str
    previous_response_id: str | None
    instructions: str | None
    output: list[AnyItem]
    error: Error | None
    tools: list[FunctionTool]
    tool_choice: Literal["none", "auto", "required"] | FunctionToolChoice
    truncation: Literal["auto", "disabled"]
    parallel_tool_calls: bool
    text: Text
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    temperature: float
    reasoning: ReasoningSettings | None
    usage: Usage | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    store: bool
    background: bool
    service_tier: str
    metadata: Any
    safety_identifier: str | None
    prompt_cache_key: str | None


class Event(Struct, tag_field="type", kw_only=True):
    sequence_number: Index


class OfResponse(Event, kw_only=True):
    response: Response


class Created(OfResponse, tag="response.created"):
    pass


class Queued(OfResponse, tag="response.queued"):
    pass


class InProgress(OfResponse, tag="response.in_progress"):
    pass


class Completed(OfResponse, tag="response.completed"):
    pass


class Failed(OfResponse, tag="response.failed"):
    pass


class Incomplete(OfResponse, tag="response.incomplete"):
    pass


class ItemAdded(Event, tag="response.output_item.added", kw_only=True):
    output_index: Index
    item: AnyItem | None


class ItemDone(Event, tag="response.output_item.done", kw_only=True):
    output_index: Index
    item: AnyItem | None


class OfItem(Event, kw_only=True):
    item_id: str
    output_index: Index


class PartAdded(OfItem, tag="response.content_part.added", kw_only=True):
    content_index: Index
    part: AnyPart


class PartDone(OfItem, tag="response.content_part.done", kw_only=True):
    content_index: Index
    part: AnyPart


class TextDelta(OfItem, tag="response.output_text.delta", kw_only=True):
    content_index: Index
    delta: str


class AnnotationAdded(OfItem, tag="response.output_text.annotation.added", kw_only=True):
    content_index: Index
    annotation_index: Index
    annotation: UrlCitation


class TextDone(OfItem, tag="response.output_text.done", kw_only=True):
    content_index: Index
    text: str


class RefusalDelta(OfItem, tag="response.refusal.delta", kw_only=True):
    content_index: Index
    delta: str


class RefusalDone(OfItem, tag="response.refusal.done", kw_only=True):
    content_index: Index
    refusal: str


class SummaryPartAdded(OfItem, tag="response.reasoning_summary_part.added", kw_only=True):
    summary_index: Index
    part: AnyPart


class SummaryPartDone(OfItem, tag="response.reasoning_summary_part.done", kw_only=True):
    summary_index: Index
    part: AnyPart


class SummaryDelta(OfItem, tag="response.reasoning_summary_text.delta", kw_only=True):
    summary_index: Index
    delta: str


class SummaryDone(OfItem, tag="response.reasoning_summary_text.done", kw_only=True):
    summary_index: Index
    text: str


class ArgumentsDelta(OfItem, tag="response.function_call_arguments.delta", kw_only=True):
    delta: str


class ArgumentsDone(OfItem, tag="response.function_call_arguments.done", kw_only=True):
    arguments: str


class ErrorFields(Struct, kw_only=True):
    type: str
    code: str | None
    message: str
    param: str | None


class ErrorEvent(Event, tag="error", kw_only=True):
    error: ErrorFields


AnyEvent = (
    Created
    | Queued
    | InProgress
    | Completed
    | Failed
    | Incomplete
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | AnnotationAdded
    | TextDone
    | RefusalDelta
    | RefusalDone
    | SummaryPartAdded
    | SummaryPartDone
    | SummaryDelta
    | SummaryDone
    | ArgumentsDelta
    | ArgumentsDone
    | ErrorEvent
)
_event = msgspec.json.Decoder(AnyEvent)
_response = msgspec.json.Decoder(Response)


def parse_event(data: bytes) -> AnyEvent:
    return _event.decode(data)


def parse_response(body: bytes) -> Response:
    return _response.decode(body)
