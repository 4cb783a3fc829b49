"""The JSON of Chat Completions, as far as it is needed. Any field may be missing or null: vendors omit a lot."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import msgspec
from msgspec import Raw

from tokenbus.providers.response.json_decode import Index

NOTHING = Raw(b"")
"""An absent field of raw JSON."""


class Function(msgspec.Struct):
    """A tool call's name, and a fragment of its arguments: a string, or an object from nonconforming vendors."""

    name: str | None = None
    arguments: str | dict[str, Raw] | None = None


class CallDelta(msgspec.Struct):
    """A piece of a tool call."""

    index: Index | None = None
    id: str | None = None
    function: Function | None = None
    extra_content: Raw = NOTHING
    """Gemini's chat endpoint: thought signatures."""


class ContentPart(msgspec.Struct):
    """A part of list content (Mistral)."""

    type: str = ""
    text: str | None = None
    thinking: list[ContentPart] | str | None = None


class Delta(msgspec.Struct):
    """What a chunk adds to the message, or a whole message. Reasoning fields may have any type."""

    content: str | list[Raw] | None = None
    refusal: str | None = None
    reasoning_content: object = None
    reasoning: object = None
    reasoning_details: object = None
    tool_calls: list[CallDelta] | None = None
    function_call: Function | None = None
    annotations: Raw = NOTHING
    executed_tools: Raw = NOTHING
    """Groq: tools that ran on its servers."""
    images: Raw = NOTHING
    audio: Raw = NOTHING


class Choice(msgspec.Struct):
    """One choice: streamed with a delta, whole with a message. If a vendor sends both, the delta holds what is new."""

    index: Index | None = None
    delta: Delta | None = None
    message: Delta | None = None
    text: str | None = None
    """Completions: the text, or its new part. Some vendors send it, unused, next to a delta."""
    finish_reason: str | None = None
    stop_reason: object = None
    """vLLM: the matched stop string."""
    matched_stop: object = None
    """SGLang: the matched stop string."""


class XGroq(msgspec.Struct):
    usage: dict[str, object] | None = None


class Chunk(msgspec.Struct):
    """One chunk, a whole response, or an error."""

    id: str | None = None
    object: str | None = None
    model: str | None = None
    choices: list[Choice] | msgspec.UnsetType | None = msgspec.UNSET
    usage: dict[str, Any] | None = None
    error: Any = None
    x_groq: XGroq | None = None


class RawChoices(msgspec.Struct):
    """A chunk with raw choices, for unknown content."""

    choices: list[Raw] | None = None


class ExecutedTool(msgspec.Struct):
    """What names a tool that ran on the vendor's servers."""

    name: str | None = None
    type: str | None = None


class ImageUrl(msgspec.Struct):
    url: str = ""


class ImageItem(msgspec.Struct):
    """An image in the answer (OpenRouter)."""

    image_url: ImageUrl | None = None


content_part = msgspec.json.Decoder(ContentPart)
raw_choices = msgspec.json.Decoder(RawChoices)
anything = msgspec.json.Decoder()
raw_items = msgspec.json.Decoder(list[Raw])
executed_tool = msgspec.json.Decoder(ExecutedTool)
image_item = msgspec.json.Decoder(ImageItem)


@lru_cache(64)
def chunk_decoder(reasoning_fields: tuple[str, ...]) -> msgspec.json.Decoder[Chunk]:
    """Return a chunk decoder that includes the vendor's reasoning fields."""
    more = [(name, object, None) for name in reasoning_fields if name not in Delta.__struct_fields__]
    if not more:
        return msgspec.json.Decoder(Chunk)
    delta = msgspec.defstruct("VendorDelta", more, bases=(Delta,))
    choice = msgspec.defstruct(
        "VendorChoice", [("delta", delta | None, None), ("message", delta | None, None)], bases=(Choice,)
    )
    chunk = msgspec.defstruct(
        "VendorChunk", [("choices", list[choice] | msgspec.UnsetType | None, msgspec.UNSET)], bases=(Chunk,)
    )
    return msgspec.json.Decoder(cast("type[Chunk]", chunk))
