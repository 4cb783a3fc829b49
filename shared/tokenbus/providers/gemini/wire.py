"""What streamGenerateContent says, as far as it is needed. Everything may be missing: default values are left out."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from tokenbus.providers.response.json_decode import Index

NOTHING = Raw(b"")
"""An absent field that is kept as it is."""


class _Camel(msgspec.Struct, rename="camel"):
    """Base: fields are in camelCase on the wire."""


class PartialArg(_Camel):
    """A piece of a call's arguments (Vertex): a value, or a piece of a string, at a place."""

    json_path: str = ""
    string_value: str | None = None
    number_value: Raw = NOTHING
    bool_value: bool | None = None
    null_value: Raw = NOTHING


class FunctionCall(_Camel):
    """A call, whole; or a piece of one whose arguments are streamed, which names it in the first alone."""

    id: str | None = None
    name: str | None = None
    args: Raw = NOTHING
    partial_args: list[PartialArg] | None = None
    will_continue: bool | None = None


class Blob(_Camel):
    """Media inside of the answer."""

    mime_type: str = ""
    data: str = ""


class Part(_Camel):
    """A part of the answer. One without a name here has at most the fields of a thought, and is read again as it is."""

    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    function_call: FunctionCall | None = None
    inline_data: Blob | None = None


class Content(msgspec.Struct):
    """What a candidate adds."""

    parts: list[Part] | None = None


class Candidate(_Camel):
    """One candidate's share of a chunk."""

    index: Index | None = None
    content: Content | None = None
    finish_reason: str | None = None
    finish_message: str | None = None
    safety_ratings: Raw = NOTHING
    grounding_metadata: Raw = NOTHING
    citation_metadata: Raw = NOTHING
    url_context_metadata: Raw = NOTHING


class Feedback(_Camel):
    """What became of the prompt."""

    block_reason: str | None = None


class Chunk(_Camel):
    """One chunk, a whole response, or an error."""

    response_id: str | None = None
    model_version: str | None = None
    candidates: list[Candidate] | msgspec.UnsetType | None = msgspec.UNSET
    usage_metadata: Raw = NOTHING
    prompt_feedback: Feedback | None = None
    error: Any = None


class RawChunk(_Camel):
    """A chunk, for what stands in it without a name here."""

    candidates: list[Raw] | None = None
    prompt_feedback: Raw = NOTHING


class RawContent(msgspec.Struct):
    """Content, for parts without a name here."""

    parts: list[Raw] | None = None


class RawCandidate(msgspec.Struct):
    """A candidate, for the same."""

    content: RawContent | None = None


chunk = msgspec.json.Decoder(Chunk)
raw_chunk = msgspec.json.Decoder(RawChunk)
raw_candidate = msgspec.json.Decoder(RawCandidate)
fields = msgspec.json.Decoder(dict[str, Raw])
arguments = msgspec.json.Decoder(dict[str, Raw])
anything = msgspec.json.Decoder()
usage = msgspec.json.Decoder(dict[str, Any])
