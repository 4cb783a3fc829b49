"""Normalized provider events: the decoded output of one attempt, in the same form for every provider.

``block`` is the decoder's ordinal of a content region within the attempt, from 0 in order of first appearance, with
gaps if inline thinking is extracted. Several blocks may be open at once. Every attempt ends with exactly one of `Done`,
`Failed` and `Cut`, and nothing follows it.

Wire form: array-like msgpack, tagged; see frames.py.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.usage import Usage

FinishReason = Literal["stop", "length", "tool_use", "content_filter", "pause", "requires_action", "error", "unknown"]
OpenKind = Literal["text", "thinking", "image", "audio"]


class _Normal(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of the family: small arrays, the tag first."""


class Start(_Normal, frozen=True, tag="start"):
    """The provider began to answer. The first event of any attempt that got this far.

    A second one means that the provider restarted its message (Anthropic may do so): the earlier blocks are void.
    """

    model: str
    provider_id: str = ""
    """The provider's id of the response."""
    void_before: int = 0
    """Blocks and items below this ordinal are void, closed or not; 0 unless the message was restarted."""
    api: str = ""
    """API and configured name of the provider: the origin of the opaque data."""
    provider: str = ""
    called_ms: int = 0
    """Unix time when the provider was called; 0: unknown."""
    request_id: str = ""
    """The provider's id of the call."""
    steers: bool = False
    """The call takes in messages of its session while the answer comes."""


class BlockStart(_Normal, frozen=True, tag="open"):
    """A text, thinking, image or audio region begins. Tool calls begin with `ToolCallStart`."""

    block: int
    kind: OpenKind
    prompt: str = ""
    """image: its prompt, if known in advance."""
    phase: str = ""
    """text: what the provider says the text is, such as ``commentary``."""


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


class TranscriptDelta(_Normal, frozen=True, tag="transcript"):
    """A piece of what an audio block says, never empty."""

    block: int
    text: str


class BlockStop(_Normal, frozen=True, tag="close"):
    """The text, thinking, image or audio region is complete."""

    block: int


class ToolCallStart(_Normal, frozen=True, tag="call"):
    """A tool call begins. Its id and name are known and never change."""

    block: int
    tool_id: str
    name: str
    derived: bool = False
    """The provider sent no id; this one is unique only within the attempt."""
    free_text: bool = False
    """Its input is free text, not JSON."""


class ToolCallDelta(_Normal, frozen=True, tag="args"):
    """A fragment of the raw argument string, or of an item's JSON. The fragments concatenate to it exactly; nothing is
    repaired.
    """

    block: int
    fragment: str


class ToolCallDone(_Normal, frozen=True, tag="called"):
    """The provider completed the call. Without this event the call was cut off and must never run."""

    block: int
    problem: str = ""
    """What is wrong with the call's syntax. It is published with the call, and the call never runs."""


class ItemStart(_Normal, frozen=True, tag="item"):
    """An item of the provider's own begins: a tool that it runs itself, the tool's result, or other content without a
    kind of ours. `ToolCallDelta` brings its JSON, and `BlockStop` ends it. It goes back to the provider at its place.
    """

    block: int
    item: str
    """The provider's type of the item: ``<api>.<type>``."""
    tool_name: str = ""
    """The tool that runs, or whose result it is; empty if it is none."""
    tool_id: str = ""
    """The same for a tool and its result."""


class ApprovalAsked(_Normal, frozen=True, tag="asks"):
    """The item of this block is a call that the provider runs once somebody has allowed it, in the next turn."""

    block: int
    tool_id: str
    name: str
    arguments: str
    """JSON, as the provider wrote it."""
    server: str
    """Whose tool it is, as the request named it."""
    item: str
    """The provider's type of the item that answers: ``<api>.<type>``."""
    allow: str
    """That item's JSON, if it may run."""
    deny: str
    """The same if it may not; a reason is added as ``reason``."""


class ItemProgress(_Normal, frozen=True, tag="progress"):
    """The provider reports how far its tool is, before the item's block ends."""

    block: int
    status: str
    """In the provider's words: ``in_progress``, ``searching``, ``generating``."""


class Opaque(_Normal, frozen=True, tag="opaque"):
    """Provider data of a block that must be sent back unchanged with the next turn.

    Known names: ``signature``, ``redacted``, ``encrypted``, ``thought_signature``, ``item_id``; ``citations``,
    ``reasoning_details``, ``extra_content``, ``fields`` (the provider's additional fields of the block) as JSON text. A
    later value of a name replaces the earlier one; a value may come after its block's end.
    """

    block: int
    name: str
    value: str
    blob_id: str = ""
    """The blob with the value, if it is too large for a public event."""


class Image(_Normal, frozen=True, tag="image"):
    """An image of an open image block: a preview or the final one, as base64 or in a blob.

    Unknown properties are empty.
    """

    block: int
    media_type: str
    base64: str
    """Empty if the bytes are in a blob."""
    final: bool
    revised_prompt: str = ""
    draft: bool = False
    """It belongs to the model's thinking and is not part of the answer."""
    prompt: str = ""
    model: str = ""
    size: str = ""
    """In the provider's terms, usually ``WIDTHxHEIGHT``."""
    quality: str = ""
    blob_id: str = ""
    size_bytes: int = 0
    """Size of the image itself; 0: unknown."""
    width: int = 0
    """Pixels, from the image's header; 0: unknown. The same applies to the height."""
    height: int = 0


class Audio(_Normal, frozen=True, tag="audio"):
    """The whole sound of an open audio block, as base64 or in a blob."""

    block: int
    media_type: str
    base64: str
    """Empty if the bytes are in a blob."""
    audio_id: str = ""
    """The provider's id, for as long as it keeps the sound."""
    expires_at: int = 0
    """Unix time until which the id is valid; 0: unknown."""
    blob_id: str = ""
    size_bytes: int = 0
    """Size of the sound itself; 0: unknown."""


class Extra(_Normal, frozen=True, tag="extra"):
    """Data without an event of its own (citations, unknown events), kept as the provider's JSON.

    With ``block`` it belongs to that block, otherwise to the turn.
    """

    name: str
    json: str
    block: int | None = None


class UsageSeen(_Normal, frozen=True, tag="usage"):
    """Counts known so far: the last non-null value per field, never summed."""

    usage: Usage


class Done(_Normal, frozen=True, tag="done"):
    """The provider's own terminal event. All blocks that it completed were closed before."""

    finish: FinishReason
    finish_raw: str = ""
    usage: Usage | None = None
    stop_string: str = ""
    """The stop string that ended the turn, if the provider reports it."""


class Failed(_Normal, frozen=True, tag="failed"):
    """The attempt ended in an error, the provider's or ours."""

    error: ErrorInfo
    called_ms: int = 0
    """As in `Start`."""


class Cut(_Normal, frozen=True, tag="cut"):
    """The stream ended without the provider's terminal event, or its worker was lost."""

    reason: str
    error: ErrorInfo | None = None
    """What cut it off, if known."""
    called_ms: int = 0
    """As in `Start`."""


Normalized = (
    Start
    | BlockStart
    | TextDelta
    | RefusalDelta
    | ThinkingDelta
    | TranscriptDelta
    | BlockStop
    | ToolCallStart
    | ToolCallDelta
    | ToolCallDone
    | ItemStart
    | ApprovalAsked
    | ItemProgress
    | Opaque
    | Image
    | Audio
    | Extra
    | UsageSeen
    | Done
    | Failed
    | Cut
)
Terminal = Done | Failed | Cut
