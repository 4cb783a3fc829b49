"""The JSON of the Interactions API, as far as it is needed: events by `event_type`, steps and their content by `type`.

Read from the documents and the types of Google's SDK in November 2026; no stream was recorded.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from msgspec import Raw

from tokenbus.errors import Malformed
from tokenbus.providers.response.json_decode import Index, read, tag_of
from tokenbus.providers.response.unknown_fields import NOTHING, Known, UnknownField, dropping, read_known

Usage = dict[str, Any] | None


_REPEATED = dropping(
    "object created updated agent_config background environment generation_config input labels output_audio "
    "output_image output_text output_video previous_interaction_id response_format response_modalities "
    "safety_settings store system_instruction tools webhook_config"
)
"""Times, settings of the request and repetitions of the output."""


class Interaction(_REPEATED):
    """The interaction in the first and last events, or an answer that was not streamed."""

    id: str | None = None
    status: str | None = None
    model: str | None = None
    agent: str | None = None
    steps: list[Raw] | None = None
    usage: Usage = None
    errors: Raw = NOTHING
    error: Raw = NOTHING
    service_tier: Raw = NOTHING
    continuation_token: Raw = NOTHING


class _Event(Known, tag_field="event_type"):
    event_id: Raw = NOTHING


class Created(_Event, kw_only=True, tag="interaction.created"):
    interaction: Interaction


class Completed(_Event, kw_only=True, tag="interaction.completed"):
    interaction: Interaction


class StatusUpdate(_Event, tag="interaction.status_update"):
    interaction_id: str = ""
    status: str = ""
    continuation_token: Raw = NOTHING
    usage: Usage = None


class StepStart(_Event, kw_only=True, tag="step.start"):
    index: Index
    step: Raw


class Metadata(Known):
    """What comes with a delta beside it."""

    total_usage: Usage = None


class StepDelta(_Event, kw_only=True, tag="step.delta"):
    index: Index
    delta: Raw
    metadata: Metadata | None = None


class StepStop(_Event, kw_only=True, tag="step.stop"):
    index: Index
    usage: Usage = None
    step_usage: Raw = NOTHING


class ErrorEvent(_Event, tag="error", forbid_unknown_fields=False):
    """It is read as raw JSON."""


Event = Created | Completed | StatusUpdate | StepStart | StepDelta | StepStop | ErrorEvent


class Unknown(msgspec.Struct):
    """An event of unknown type."""

    event_type: str


class ModelOutput(Known, tag="model_output"):
    """A step: what the model says and makes."""

    content: list[Raw] | None = None
    error: Raw = NOTHING


class Thought(Known, tag="thought"):
    """A step: the summary of a thought, and the signature by which the model knows it again."""

    summary: list[Raw] | None = None
    signature: str | None = None


class FunctionCall(Known, tag="function_call"):
    """A step: a call of a tool of the client."""

    id: str | None = None
    name: str | None = None
    arguments: Raw = NOTHING
    signature: str | None = None


class Other(msgspec.Struct):
    """A step of another type: a tool that the provider runs, or its result."""

    type: str
    id: str | None = None
    call_id: str | None = None
    name: str | None = None


Step = ModelOutput | Thought | FunctionCall


class Text(Known, tag="text"):
    text: str = ""
    annotations: list[Raw] | None = None


class Image(Known, tag="image"):
    """An image, in the answer or by its address."""

    data: str | None = None
    mime_type: str = ""
    uri: str | None = None


class Audio(Known, tag="audio"):
    """A piece of sound."""

    data: str | None = None
    mime_type: str = ""
    uri: str | None = None
    sample_rate: int | None = None
    channels: int | None = None
    rate: int | None = None


class ThoughtSummary(Known, tag="thought_summary"):
    content: Raw = NOTHING


class ThoughtSignature(Known, tag="thought_signature"):
    signature: str | None = None


class Arguments(Known, tag="arguments_delta"):
    arguments: str | None = None


class Annotations(Known, tag="text_annotation_delta"):
    annotations: list[Raw] | None = None


Piece = Text | Image | Audio | ThoughtSummary | ThoughtSignature | Arguments | Annotations
"""An entry of a content list, or a delta."""

_event = msgspec.json.Decoder(Event)
_unknown = msgspec.json.Decoder(Unknown)
_interaction = msgspec.json.Decoder(Interaction)
_step = msgspec.json.Decoder(Step)
_other = msgspec.json.Decoder(Other)
_piece = msgspec.json.Decoder(Piece)
_text = msgspec.json.Decoder(Text)
anything = msgspec.json.Decoder()
fields = msgspec.json.Decoder(dict[str, Raw])

_EVENTS, _STEPS, _PIECES = (
    frozenset(str(struct.__struct_config__.tag) for struct in get_args(kinds)) for kinds in (Event, Step, Piece)
)


def read_event(data: bytes) -> tuple[Event | Unknown | Interaction, list[UnknownField]]:
    """Decode one event or a whole answer, and its unknown fields. Raises Malformed if it has a known type but the wrong
    structure.
    """
    try:
        return read_known(_event, Event, data, "event")
    except Malformed:
        kind = tag_of(data, "event_type")
        if kind in _EVENTS:
            raise
        return (read(_unknown, data, "event"), []) if kind else read_known(_interaction, Interaction, data, "event")


def read_step(data: bytes) -> tuple[Step | Other, list[UnknownField]]:
    """Decode a step, and its unknown fields. Raises Malformed."""
    if tag_of(data) in _STEPS:
        return read_known(_step, Step, data, "step")
    return read(_other, data, "step"), []


def read_piece(data: bytes) -> tuple[Piece | None, list[UnknownField]]:
    """Decode an entry of a content list or a delta; None: it is of another type. One without a type is text. Raises
    Malformed.
    """
    kind = tag_of(data)
    if kind in _PIECES:
        return read_known(_piece, Piece, data, "content")
    return (None, []) if kind else read_known(_text, Text, data, "content")
