"""The JSON of streamGenerateContent, as far as it is needed. Any field may be missing: defaults are omitted."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from tokenbus.providers.response.json_decode import Index, read
from tokenbus.providers.response.unknown_fields import NOTHING, Known


class _Camel(Known, rename="camel"):
    """Base: field names are camelCase on the wire."""


class PartialArg(_Camel):
    """A piece of a call's arguments (Vertex): a value or part of a string, with its path."""

    json_path: str = ""
    string_value: str | None = None
    number_value: Raw = NOTHING
    bool_value: bool | None = None
    null_value: Raw = NOTHING
    will_continue: Raw = NOTHING


class FunctionCall(_Camel):
    """A complete call, or a piece of a streamed one. Only the first piece has the name."""

    id: str | None = None
    name: str | None = None
    args: Raw = NOTHING
    partial_args: list[PartialArg] | None = None
    will_continue: bool | None = None


class Blob(_Camel):
    """Media in the answer."""

    mime_type: str = ""
    data: str = ""


class Part(_Camel):
    """A part of the answer. Unknown part types have at most the thought fields; they are read again as raw JSON."""

    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    function_call: FunctionCall | None = None
    inline_data: Blob | None = None


class Tool(_Camel, forbid_unknown_fields=False):
    """What names a tool that the provider runs, in a part of its call or result."""

    id: str | None = None
    tool_type: str | None = None


class Content(Known):
    """Content that a candidate adds."""

    parts: list[Part] | None = None
    role: Raw = NOTHING


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
    logprobs_result: Raw = NOTHING
    avg_logprobs: Raw = NOTHING
    token_count: Raw = NOTHING


class Feedback(_Camel, forbid_unknown_fields=False):
    """Feedback on the prompt. It is kept as a whole."""

    block_reason: str | None = None


class Chunk(_Camel):
    """One chunk, a whole response, or an error."""

    response_id: str | None = None
    model_version: str | None = None
    candidates: list[Candidate] | msgspec.UnsetType | None = msgspec.UNSET
    usage_metadata: Raw = NOTHING
    prompt_feedback: Feedback | None = None
    error: Any = None
    create_time: Raw = NOTHING


class RawChunk(_Camel, forbid_unknown_fields=False):
    """A chunk with raw fields, for unknown content."""

    candidates: list[Raw] | None = None
    prompt_feedback: Raw = NOTHING


class RawContent(msgspec.Struct):
    """Content with raw parts, for unknown part types."""

    parts: list[Raw] | None = None


class RawCandidate(msgspec.Struct):
    content: RawContent | None = None


chunk = msgspec.json.Decoder(Chunk)
tool = msgspec.json.Decoder(Tool)
raw_chunk = msgspec.json.Decoder(RawChunk)
raw_candidate = msgspec.json.Decoder(RawCandidate)
fields = msgspec.json.Decoder(dict[str, Raw])
anything = msgspec.json.Decoder()
usage = msgspec.json.Decoder(dict[str, Any])


def candidate_in(data: bytes, place: int) -> Raw:
    """A candidate of a chunk as raw JSON."""
    return (read(raw_chunk, data, "chunk").candidates or [])[place]


def part_in(data: bytes, place: int, i: int) -> Raw:
    """A part of a candidate as raw JSON."""
    content = read(raw_candidate, bytes(candidate_in(data, place)), "candidate").content
    return ((content and content.parts) or [])[i]
