"""What Chat Completions says, as far as it is needed. Everything may be missing or null: vendors leave out much."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import msgspec
from msgspec import Raw

from tokenbus.providers.response.json_decode import Index

NOTHING = Raw(b"")
"""An absent field that is kept as it is."""


class Function(msgspec.Struct):
    """A tool call's name, and a fragment of its arguments: a string, or an object from vendors that know no better."""

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
    """A part of content that is a list (Mistral)."""

    type: str = ""
    text: str | None = None
    thinking: list[ContentPart] | str | None = None


class Delta(msgspec.Struct):
    """What a chunk adds to the message, or a whole message. Fields of reasoning have any form."""

    content: str | list[Raw] | None = None
    refusal: str | None = None
    reasoning_content: object = None
    reasoning: object = None
    reasoning_details: object = None
    tool_calls: list[CallDelta] | None = None
    function_call: Function | None = None
    annotations: Raw = NOTHING
    executed_tools: Raw = NOTHING
    """Groq: tools that ran on its side."""
    images: Raw = NOTHING
    audio: Raw = NOTHING


class Choice(msgspec.Struct):
    """One choice: streamed it has a delta, whole a message. Some vendors send both; then the delta is what is new."""

    index: Index | None = None
    delta: Delta | None = None
    message: Delta | None = None
    text: str | None = None
    """Completions: the text, or what is new of it. Some send it idle beside a delta."""
    finish_reason: str | None = None
    stop_reason: object = None
    """vLLM: the stop string."""
    matched_stop: object = None
    """SGLang: the stop string."""


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
    """A chunk, for what stands in it without a name here."""

    choices: list[Raw] | None = None


class ImageUrl(msgspec.Struct):
    url: str = ""


class ImageItem(msgspec.Struct):
    """An image of the answer (OpenRouter)."""

    image_url: ImageUrl | None = None


content_part = msgspec.json.Decoder(ContentPart)
raw_choices = msgspec.json.Decoder(RawChoices)
anything = msgspec.json.Decoder()
raw_items = msgspec.json.Decoder(list[Raw])
image_item = msgspec.json.Decoder(ImageItem)


@lru_cache(64)
def chunk_decoder(reasoning_fields: tuple[str, ...]) -> msgspec.json.Decoder[Chunk]:
    """The decoder of a vendor's chunks, whatever it calls the fields of its reasoning."""
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
