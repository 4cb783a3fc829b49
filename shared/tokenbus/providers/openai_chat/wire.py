"""The JSON of Chat Completions, as far as it is needed. Any field may be missing or null: vendors omit a lot."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import msgspec
from msgspec import Raw

from tokenbus.providers.response.json_decode import Index
from tokenbus.providers.response.unknown_fields import NOTHING, Known, UnknownField, read_known


class Function(Known):
    """A tool call's name, and a fragment of its arguments: a string, or an object from nonconforming vendors."""

    name: str | None = None
    arguments: str | dict[str, Raw] | None = None


class CustomCall(Known):
    """A call of a custom tool, and a piece of its input."""

    name: str | None = None
    input: str | None = None


class CallDelta(Known):
    """A piece of a tool call."""

    index: Index | None = None
    id: str | None = None
    function: Function | None = None
    custom: CustomCall | None = None
    extra_content: Raw = NOTHING
    """Gemini's chat endpoint: thought signatures."""
    type: Raw = NOTHING


class ContentPart(Known):
    """A part of list content (Mistral)."""

    type: str = ""
    text: str | None = None
    thinking: list[ContentPart] | str | None = None
    closed: Raw = NOTHING


class Audio(Known):
    """A piece of the spoken answer, or all of it."""

    id: str | None = None
    data: str | None = None
    transcript: str | None = None
    expires_at: int | None = None


class Delta(Known):
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
    role: Raw = NOTHING


class Choice(Known):
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
    logprobs: Raw = NOTHING
    token_ids: Raw = NOTHING
    """vLLM: the tokens of this piece."""
    native_finish_reason: Raw = NOTHING
    """OpenRouter: the finish reason in the vendor's words."""
    content_filter_results: Raw = NOTHING
    """Azure."""


OF_CHOICES = ("logprobs", "token_ids", "native_finish_reason", "content_filter_results")
"""Fields of a choice that are passed on with its content."""
OF_PIECES = OF_CHOICES[:2]
"""Those that describe one piece of the content. The others are often repeated."""


class XGroq(Known):
    usage: dict[str, object] | None = None


class Chunk(Known):
    """One chunk, a whole response, or an error."""

    id: str | None = None
    object: str | None = None
    model: str | None = None
    choices: list[Choice] | msgspec.UnsetType | None = msgspec.UNSET
    usage: dict[str, Any] | None = None
    error: Any = None
    x_groq: XGroq | None = None
    created: Raw = NOTHING
    obfuscation: Raw = NOTHING
    system_fingerprint: Raw = NOTHING
    service_tier: Raw = NOTHING
    provider: Raw = NOTHING
    """OpenRouter: the vendor that answers."""
    citations: Raw = NOTHING
    """Perplexity, xAI."""
    search_results: Raw = NOTHING
    """Perplexity."""


ABOUT = {
    field: f"openai-chat.{field}"
    for field in ("system_fingerprint", "service_tier", "provider", "citations", "search_results")
}
"""Fields of a chunk that describe the answer; most vendors that have them repeat them in each chunk."""
SOURCES = (ABOUT["citations"], ABOUT["search_results"])
"""Those of them that belong to its text."""


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


raw_choices = msgspec.json.Decoder(RawChoices)
anything = msgspec.json.Decoder()
audio = msgspec.json.Decoder(Audio)
raw_items = msgspec.json.Decoder(list[Raw])
executed_tool = msgspec.json.Decoder(ExecutedTool)
image_item = msgspec.json.Decoder(ImageItem)


content_part = msgspec.json.Decoder(ContentPart)


def read_chunk(data: bytes, reasoning_fields: tuple[str, ...]) -> tuple[Chunk, list[UnknownField]]:
    """Decode a chunk, and its unknown fields. Raises Malformed."""
    decoder = _chunk_decoder(reasoning_fields)
    return read_known(decoder, decoder.type, data, "chunk")


@lru_cache(64)
def _chunk_decoder(reasoning_fields: tuple[str, ...]) -> msgspec.json.Decoder[Chunk]:
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
