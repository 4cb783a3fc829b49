"""Public events: what subscribers read from `visible`, `chunks`, `blocks`, `runs` and a run's log.

Each is one JSON object in the stream field ``__data__``. Every event carries ``run``, ``seq``, ``turn`` and
``attempt``; ``seq`` counts all public events of the run from 0 without a gap and is the cursor. Optional
fields are left out when unset; unknown fields are ignored on read.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.normalized import FinishReason
from tokenbus.events.usage import Usage

BlockKind = Literal["text", "thinking", "tool_call", "tool_result", "image"]
ToolCallPart = Literal["name", "id", "input"]


class ImageRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where an image is: by blob id, or inline where it lies in no blob; and what is known of how it was made."""

    media_type: str
    blob_id: str | None = None
    base64: str | None = None
    revised_prompt: str | None = None
    """What the provider made of the prompt."""
    prompt: str | None = None
    model: str | None = None
    """The model that made the image, which may be another than the one that asked for it."""
    size: str | None = None
    """In the provider's words, mostly ``WIDTHxHEIGHT``."""
    quality: str | None = None
    size_bytes: int | None = None
    width: int | None = None
    """In pixels, as the header of a stored PNG, JPEG, WebP or GIF says; height likewise."""
    height: int | None = None
    draft: bool | None = None
    """True: an image of the model's thinking, and no part of the answer."""


class Timing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Milliseconds since the run was accepted; None where it never came so far."""

    first_byte_ms: int | None = None
    first_visible_ms: int | None = None
    total_ms: int


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """What every public event carries."""

    run: str
    seq: int
    turn: int
    attempt: int


class Chunk(Event, frozen=True, kw_only=True, tag="chunk"):
    """A piece of one block's content. A block's chunks concatenate to exactly its content.

    For a tool call the pieces with ``tool_call_part == "input"`` concatenate to its ``arguments``.
    """

    block: int
    kind: BlockKind
    text: str
    visible: bool
    """Only where a person should hear or see it."""
    depth: int
    """Always 0: no block lies inside another. A call inside thinking ends that; it goes on as a new block."""
    tool_call_part: ToolCallPart | None = None
    tool_id: str | None = None
    tool_name: str | None = None


class BlockStarted(Event, frozen=True, kw_only=True, tag="block_start"):
    """A block begins; its chunks follow."""

    block: int
    kind: BlockKind
    tool_id: str | None = None
    tool_name: str | None = None
    prompt: str | None = None
    """image: what it is made from, where that is known before it."""


class ImagePreview(Event, frozen=True, kw_only=True, tag="image_preview"):
    """How far an image is; between its block's start and end. The next one, and the image itself, replace it."""

    block: int
    kind: Literal["image"]
    index: int
    """From 0 within the block."""
    image: ImageRef


class BlockComplete(Event, frozen=True, kw_only=True, tag="block_complete"):
    """A block ends. ``cut`` says that its content is only what came before the stream broke off."""

    block: int
    kind: BlockKind
    content: str | None = None
    """text, thinking, tool_result: the whole content."""
    tool_id: str | None = None
    tool_name: str | None = None
    arguments: str | None = None
    """tool_call: the raw argument string, as the model wrote it."""
    input: dict[str, object] | None = None
    """tool_call: ``arguments`` parsed; absent with ``input_error`` where that is no JSON object."""
    input_error: str | None = None
    is_error: bool | None = None
    """tool_result: True where the tool gave an error."""
    signature: str | None = None
    opaque: dict[str, str] | None = None
    """What the provider wants back with the block, by name, beside its signature; ``api`` and ``provider`` say whose it
    is. `Response.messages` puts it where it belongs."""
    opaque_blobs: dict[str, str] | None = None
    """The same where it is large: ids of blobs that hold the values."""
    image: ImageRef | None = None
    blob_id: str | None = None
    """tool_result: where the whole result lies when it was too large for the bus."""
    images: list[ImageRef] | None = None
    """tool_result: the images in it."""
    cut: bool | None = None
    provider_extra: list[dict[str, object]] | None = None


class ToolProgress(Event, frozen=True, kw_only=True, tag="tool_progress"):
    """How far a tool's call is, in the tool's own words; after the call's block, and before its result.

    Told as it comes, and not all of it: a newer one replaces those before it. It is no part of any block.
    """

    block: int
    """The call's."""
    tool_id: str
    tool_name: str
    progress: float
    """Rises from one to the next; of what, the tool knows."""
    total: float | None = None
    """What ``progress`` will have come to at the end, where the tool knows."""
    message: str | None = None


class ProviderModel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A configured provider, and a model as requests name it."""

    provider: str
    model: str


class Started(Event, frozen=True, kw_only=True, tag="started"):
    """The run was accepted; its first event."""

    provider: str
    model: str
    metadata: dict[str, object] | None = None
    fallback: list[ProviderModel] | None = None
    """Who is asked, one after the other, when a turn fails before anything visible of it was emitted."""
    notes: list[str] | None = None
    """What of the request has no effect, and why; a sentence each."""
    participant: str | None = None
    """The name under which the model speaks, if the request gave one."""


class Retrying(Event, frozen=True, kw_only=True, tag="retrying"):
    """An attempt failed, and the next one follows. Blocks from ``drop_from`` on are void; none of them was heard."""

    error: ErrorInfo
    next_attempt: int
    delay_ms: int
    drop_from: int
    continues: bool | None = None
    """True: the next attempt goes on from what was heard, in the block that is open. Often there is nothing to drop,
    and ``drop_from`` is a number that no block has yet."""
    fallback: ProviderModel | None = None
    """Who makes the next attempt, and the run's turns from then on; None: the same provider and model as before."""


class Restarted(Event, frozen=True, kw_only=True, tag="restarted"):
    """An attempt failed after visible text, and the turn starts over. Blocks from ``drop_from`` on are void."""

    error: ErrorInfo
    next_attempt: int
    delay_ms: int
    drop_from: int


class UsageReported(Event, frozen=True, kw_only=True, tag="usage"):
    """Token counts of the turn just ended, or of an attempt that another goes on from, and of the run so far."""

    usage: Usage
    total: Usage
    model: str | None = None
    """The model that answered, as the provider names it: often one version of what was asked for."""
    response_id: str | None = None
    """The provider's id of its answer: what its support and its own lists go by."""
    provider: str | None = None
    """The configured provider that answered, in a run that has a fallback."""


class RunEnd(Event, frozen=True, kw_only=True):
    """What all terminal events carry."""

    finish: FinishReason
    timing: Timing
    finish_raw: str | None = None
    usage: Usage | None = None
    """Sum over the run's turns and attempts, those that failed or were cut included; what the provider told of them."""
    provider: str | None = None
    """Who was asked last, of a run that has fallbacks."""
    model: str | None = None
    """The model of the last answer, as its provider names it."""
    response_id: str | None = None
    """The provider's id of the last answer: its support and its own lists go by it."""
    provider_extra: list[dict[str, object]] | None = None


class Completed(RunEnd, frozen=True, kw_only=True, tag="completed"):
    """The provider finished, and so did the run."""

    stop_string: str | None = None
    """The stop string that ended the last turn, where one did and its provider says so or tokenbus found it."""


class Incomplete(RunEnd, frozen=True, kw_only=True, tag="incomplete"):
    """The stream was cut short: what came before stands, the rest never came."""

    reason: str
    error: ErrorInfo | None = None


class RunFailedEvent(RunEnd, frozen=True, kw_only=True, tag="failed"):
    """The run ended in an error."""

    error: ErrorInfo


class Cancelled(RunEnd, frozen=True, kw_only=True, tag="cancelled"):
    """The run was cancelled."""

    reason: str | None = None
    heard_through: int | None = None
    """The last ``seq`` that the listener heard, as the canceller told it."""


class UnknownEvent(Event, frozen=True, kw_only=True, tag="unknown"):
    """An event of a type that this version of tokenbus does not know, or with a value that it does not: a newer one
    wrote it. Its `seq` is one of the run's; who does not know what it means passes over it.

    It is never written: here it stands for what was.
    """

    event_type: str
    """Its own ``type``."""
    fields: dict[str, object]
    """All of it, as it was written."""


BlockEvent = BlockStarted | ImagePreview | BlockComplete
TerminalEvent = Completed | Incomplete | RunFailedEvent | Cancelled
RunEvent = Started | Retrying | Restarted | UsageReported | TerminalEvent
PublicEvent = Chunk | BlockEvent | ToolProgress | RunEvent | UnknownEvent

ChunkTopicEvent = Chunk | UnknownEvent
"""What can come on the topics `visible` and `chunks`."""
BlockTopicEvent = BlockEvent | ToolProgress | UnknownEvent
"""What can come on the topic `blocks`."""
RunTopicEvent = RunEvent | UnknownEvent
"""What can come on the topic `runs`."""

TERMINAL = (Completed, Incomplete, RunFailedEvent, Cancelled)

_decoder = msgspec.json.Decoder(PublicEvent)
encode = msgspec.json.Encoder().encode


def decode(data: bytes) -> PublicEvent:
    """One public event from its JSON. Raises msgspec.ValidationError or msgspec.DecodeError."""
    return _decoder.decode(data)
