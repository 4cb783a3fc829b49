"""Normalised provider events: what a decoder makes of one attempt's bytes, the same for every provider.

``block`` is the decoder's own ordinal of a content region within the attempt, from 0 in order of first
appearance, with gaps where thinking is looked for inside of the text. Several blocks may be open at once. Every
attempt ends with exactly one of `Done`, `Failed` and `Cut`, and nothing follows it.

Wire form: array-like msgpack, tagged; see frames.py.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.usage import Usage

FinishReason = Literal["stop", "length", "tool_use", "content_filter", "pause", "error", "unknown"]
OpenKind = Literal["text", "thinking", "image"]


class _Normal(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of the family: small arrays, the tag first."""


class Start(_Normal, frozen=True, tag="start"):
    """The provider began to answer. The first event of an attempt that got as far.

    A second one says that the provider began its message anew (Anthropic may): the blocks before it are void.
    """

    model: str
    provider_id: str = ""
    """The provider's id of the response."""
    void_before: int = 0
    """Blocks and items below this ordinal are void, whether closed or still open; 0 but for a message begun anew."""
    api: str = ""
    """The API that the provider speaks, and the provider's name in the settings: whose opaque data it is. Empty where
    an older fetcher did not say."""
    provider: str = ""


class BlockStart(_Normal, frozen=True, tag="open"):
    """A text, thinking or image region begins. Tool calls begin with `ToolCallStart`."""

    block: int
    kind: OpenKind
    prompt: str = ""
    """image: what it is made from, where that is known before it."""


class TextDelta(_Normal, frozen=True, tag="text"):
    """A piece of a text block, never empty."""

    block: int
    text: str


class RefusalDelta(_Normal, frozen=True, tag="refusal"):
    """A piece of a text block in which the model declines; shown as text, never empty."""

    block: int
    text: str


class ThinkingDelta(_Normal, frozen=True, tag="thinking"):
    """A piece of a thinking block, never empty, never visible."""

    block: int
    text: str


class BlockStop(_Normal, frozen=True, tag="close"):
    """The text, thinking or image region is complete."""

    block: int


class ToolCallStart(_Normal, frozen=True, tag="call"):
    """A tool call begins; id and name are both known by now and never change."""

    block: int
    tool_id: str
    name: str
    derived: bool = False
    """The provider sent no id: this one is distinct within the attempt alone."""


class ToolCallDelta(_Normal, frozen=True, tag="args"):
    """A fragment of the raw argument string; fragments concatenate to it exactly, nothing repaired."""

    block: int
    fragment: str


class ToolCallDone(_Normal, frozen=True, tag="called"):
    """The provider completed the call. Without it the call was cut and must never run."""

    block: int
    problem: str = ""
    """What is wrong with the call's form: it is told with the call, and the call never runs."""


class Opaque(_Normal, frozen=True, tag="opaque"):
    """Provider data of a block that must go back to it untouched with the next turn.

    Known names: ``signature``, ``redacted``, ``encrypted``, ``thought_signature``, ``item_id``; ``citations``,
    ``reasoning_details``, ``extra_content``, ``fields`` (the provider's further fields of the block) as JSON text.
    Values of one name replace each other; one may come after its block's end.
    """

    block: int
    name: str
    value: str
    blob_id: str = ""
    """Where the value lies as well, if it is too large for a public event."""


class Image(_Normal, frozen=True, tag="image"):
    """An image of an open image block: a preview or the final one, its bytes as base64 or in a blob.

    What is not known of it is empty.
    """

    block: int
    media_type: str
    base64: str
    """Empty where the bytes lie in a blob."""
    final: bool
    revised_prompt: str = ""
    draft: bool = False
    """It belongs to the model's thinking, and is no part of the answer."""
    prompt: str = ""
    model: str = ""
    size: str = ""
    """In the provider's words, mostly ``WIDTHxHEIGHT``."""
    quality: str = ""
    blob_id: str = ""
    size_bytes: int = 0
    """Of the image itself; 0: not counted."""
    width: int = 0
    """In pixels, as the image's own header says; 0: not known. So is the height."""
    height: int = 0


class Extra(_Normal, frozen=True, tag="extra"):
    """Something with no name here (server-run tools, citations, unknown events), kept as the provider's JSON.

    With ``block`` set it belongs to that block; without, to the turn. ``ordinal`` >= 0 marks a content item
    that stands at that place among the attempt's blocks (it took an ordinal as a block does) and must be
    sent back there.
    """

    name: str
    json: str
    block: int | None = None
    ordinal: int = -1


class UsageSeen(_Normal, frozen=True, tag="usage"):
    """Counts known so far: last non-null value per field, never summed."""

    usage: Usage


class Done(_Normal, frozen=True, tag="done"):
    """The provider's own terminal event. All blocks that it completed were closed before."""

    finish: FinishReason
    finish_raw: str = ""
    usage: Usage | None = None
    stop_string: str = ""
    """The stop string that ended the turn, where the provider says so."""


class Failed(_Normal, frozen=True, tag="failed"):
    """The attempt ended in an error, the provider's or ours."""

    error: ErrorInfo


class Cut(_Normal, frozen=True, tag="cut"):
    """The stream ended without the provider's terminal event, or its worker was lost."""

    reason: str
    error: ErrorInfo | None = None
    """What broke it off, where more is known than that it ended."""


Normalized = (
    Start
    | BlockStart
    | TextDelta
    | RefusalDelta
    | ThinkingDelta
    | BlockStop
    | ToolCallStart
    | ToolCallDelta
    | ToolCallDone
    | Opaque
    | Image
    | Extra
    | UsageSeen
    | Done
    | Failed
    | Cut
)
Terminal = Done | Failed | Cut
