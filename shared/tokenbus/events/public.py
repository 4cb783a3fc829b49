"""Public events: what subscribers read from `visible`, `chunks`, `blocks`, `runs` and a run's log.

Each is one JSON object in the stream field ``__data__``. Every event has ``run``, ``seq``, ``turn`` and ``attempt``;
``seq`` counts all public events of the run from 0 without gaps and is the cursor; those of a session's run also have
``session``. Unset optional fields are omitted;
unknown fields are ignored on read.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.normalized import FinishReason
from tokenbus.events.usage import Usage
from tokenbus.events.waits import Door, OnDeadline, Verdict, WaitKind

BlockKind = Literal["text", "thinking", "tool_call", "tool_result", "image", "audio", "server_tool"]
ToolCallPart = Literal["name", "id", "input"]


class ImageRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An image by blob id, or inline if it is not in a blob, and what is known about how it was made."""

    media_type: str
    blob_id: str | None = None
    base64: str | None = None
    revised_prompt: str | None = None
    """The prompt as rewritten by the provider."""
    prompt: str | None = None
    model: str | None = None
    """The model that generated the image; may differ from the model that requested it."""
    size: str | None = None
    """In the provider's terms, usually ``WIDTHxHEIGHT``."""
    quality: str | None = None
    size_bytes: int | None = None
    width: int | None = None
    """Pixels, from the header of a stored PNG, JPEG, WebP or GIF; likewise the height."""
    height: int | None = None
    draft: bool | None = None
    """True: the image is part of the model's thinking, not of the answer."""


class AudioRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sound by blob id, or inline if it is not in a blob."""

    media_type: str
    """From the sound's header if the provider does not say; ``audio/pcm`` if there is none."""
    blob_id: str | None = None
    base64: str | None = None
    size_bytes: int | None = None
    audio_id: str | None = None
    """The provider's id of the sound, for a later request to the same provider."""
    expires_at: int | None = None
    """Unix time until which the provider knows the id."""


class Timing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Milliseconds since the run was accepted; None if that point was never reached."""

    first_byte_ms: int | None = None
    first_visible_ms: int | None = None
    total_ms: int


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Fields of every public event."""

    run: str
    seq: int
    turn: int
    attempt: int
    session: str | None = None
    """The name of the session that the run is of, within its tenant."""


class Chunk(Event, frozen=True, kw_only=True, tag="chunk"):
    """A piece of one block's content. A block's chunks concatenate to exactly its content.

    For a tool call, the pieces with ``tool_call_part == "input"`` concatenate to its ``arguments``.
    """

    block: int
    kind: BlockKind
    text: str
    visible: bool
    """True only for content meant for people to see or hear."""
    depth: int
    """Of the run in its tree: 0 for a run that a client began, 1 for one that a call of it began, and so on."""
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
    """image: its prompt, if known in advance."""
    free_text: bool | None = None
    """tool_call: True if the input is free text and not JSON."""
    item: str | None = None
    """server_tool: the provider's type of the item, ``<api>.<type>``. ``tool_name`` and ``tool_id``, the same for a
    tool and its result, are set if it is one.
    """
    phase: str | None = None
    """text: what the provider says it is: `commentary`, on what the model does next, or `final_answer`."""


class ImagePreview(Event, frozen=True, kw_only=True, tag="image_preview"):
    """A preview of an unfinished image, between its block's start and end. The next preview, or the image, replaces
    it.
    """

    block: int
    kind: Literal["image"]
    index: int
    """Counts from 0 within the block."""
    image: ImageRef


class BlockProgress(Event, frozen=True, kw_only=True, tag="block_progress"):
    """What the provider says of a tool that it runs, between the start and the end of the tool's block."""

    block: int
    kind: BlockKind
    status: str
    """In the provider's words: ``in_progress``, ``searching``, ``interpreting``, ``generating``."""
    tool_id: str | None = None
    tool_name: str | None = None


class BlockComplete(Event, frozen=True, kw_only=True, tag="block_complete"):
    """A block ends. ``cut`` means that the stream broke off and the content is incomplete."""

    block: int
    kind: BlockKind
    content: str | None = None
    """text, thinking, tool_result: the whole content. audio: its transcript. server_tool: the item, as the provider's
    JSON.
    """
    tool_id: str | None = None
    tool_name: str | None = None
    arguments: str | None = None
    """tool_call: the raw argument string, as the model wrote it."""
    input: dict[str, object] | None = None
    """tool_call: ``arguments`` parsed. If they are not a JSON object it is absent and ``input_error`` is set."""
    input_error: str | None = None
    free_text: bool | None = None
    """tool_call: True if ``arguments`` is free text for a tool with a `format`; then there is no ``input``."""
    is_error: bool | None = None
    """tool_result: True if the tool returned an error."""
    signature: str | None = None
    opaque: dict[str, str] | None = None
    """Data to send back to the provider with the block, by name, in addition to its signature. ``api`` and ``provider``
    name its origin. `Response.messages` puts it where it belongs.
    """
    opaque_blobs: dict[str, str] | None = None
    """The same for large values: ids of blobs that hold them."""
    item: str | None = None
    """server_tool: the provider's type of the item, ``<api>.<type>``."""
    phase: str | None = None
    """As in `block_start`."""
    image: ImageRef | None = None
    audio: AudioRef | None = None
    """audio: the sound. Absent if it was cut off, or if a policy changed what it says."""
    blob_id: str | None = None
    """tool_result: the blob with the whole result, if it was too large for the bus."""
    images: list[ImageRef] | None = None
    """tool_result: the images in it."""
    cut: bool | None = None
    provider_extra: list[dict[str, object]] | None = None


class ToolProgress(Event, frozen=True, kw_only=True, tag="tool_progress"):
    """A tool call's progress, as reported by the tool; after the call's block and before its result.

    Best effort: not every report is published, and a newer one replaces those before it. It is not part of any block.
    """

    block: int
    """The call's block."""
    tool_id: str
    tool_name: str
    progress: float
    """Rises from one report to the next; the tool defines its unit."""
    total: float | None = None
    """The final value of ``progress``, if the tool knows it."""
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
    """Providers to try in turn if a turn fails before any of its visible text was emitted; with ``on_failure``
    `continue` also later, those that can continue a text.
    """
    notes: list[str] | None = None
    """Parts of the request that have no effect, and why; one sentence each."""
    participant: str | None = None
    """The model's participant name, if the request gave one."""
    parent: str | None = None
    """The run whose tool call began this run; its id and the block of the call make this run's id."""


class Answering(Event, frozen=True, kw_only=True, tag="answering"):
    """The provider began to answer, before the attempt's first block. Left out if it names neither model nor id."""

    model: str | None = None
    """The model that answers, as the provider names it: often a version of the requested one."""
    response_id: str | None = None
    """The provider's id of its response, for its support and logs."""
    provider: str | None = None
    """The configured provider that answers, for a run with fallbacks."""


class Retrying(Event, frozen=True, kw_only=True, tag="retrying"):
    """An attempt failed, and another follows. Blocks from ``drop_from`` on are void; none of them was visible."""

    error: ErrorInfo
    next_attempt: int
    delay_ms: int
    drop_from: int
    continues: bool | None = None
    """True: the next attempt continues the emitted text, in the open block. Often there is nothing to drop, and
    ``drop_from`` is a number that no block has yet.
    """
    fallback: ProviderModel | None = None
    """The provider and model of the next attempt and of the run's later turns; None: unchanged. With ``continues``, it
    goes on with the text of the one before.
    """


class Restarted(Event, frozen=True, kw_only=True, tag="restarted"):
    """An attempt failed after visible text, and the turn starts over. Blocks from ``drop_from`` on are void."""

    error: ErrorInfo
    next_attempt: int
    delay_ms: int
    drop_from: int


class Waiting(Event, frozen=True, kw_only=True, tag="waiting"):
    """The run waits for somebody: for leave to run a call, for an answer, or for the result of a client's tool.

    `Resumed` follows when that ends, unless the run ends first. Several may be open at once.
    """

    wait: str
    """Names it within the run."""
    what: WaitKind
    block: int
    """The call's block."""
    tool_id: str
    tool_name: str
    deadline_ms: int
    """Unix time in ms at which it decides itself, as ``on_deadline`` says."""
    on_deadline: OnDeadline = "deny"
    arguments: str | None = None
    """Of the call, as it would run: JSON, or the text of a tool whose input is free text."""
    schema: dict[str, object] | None = None
    """JSON Schema of what decides it: edited arguments, an answer's content, a result."""
    text: str | None = None
    """The question."""
    url: str | None = None
    """A page on which the question is answered, instead of ``schema``."""
    tenant: str | None = None
    """Whose clients may decide."""


class Resumed(Event, frozen=True, kw_only=True, tag="resumed"):
    """What the run waited for was decided, and by whom. Later decisions on it change nothing."""

    wait: str
    what: WaitKind
    block: int
    tool_id: str
    tool_name: str
    decision: Verdict
    decision_id: str
    by: str | None = None
    """Who decided, as the door knows it."""
    door: Door
    at_ms: int
    reason: str | None = None
    """Of a denial."""
    arguments: str | None = None
    """With which the call runs instead of its own: JSON."""
    content: str | None = None
    """Of an answer: JSON."""


class ChildStarted(Event, frozen=True, kw_only=True, tag="child_started"):
    """A tool call begins a child run. If the run ends first, the child may never begin."""

    block: int
    """The call's block."""
    tool_id: str
    tool_name: str
    child: str
    """The child run's id."""


class ChildEnded(Event, frozen=True, kw_only=True, tag="child_ended"):
    """A child run has ended, and its text is the result of its call, which follows."""

    block: int
    tool_id: str
    tool_name: str
    child: str
    status: Literal["completed", "incomplete", "failed", "cancelled", "lost"]
    """``lost``: it ended, but nothing of it was left to read."""
    error: ErrorInfo | None = None


class UsageReported(Event, frozen=True, kw_only=True, tag="usage"):
    """Token counts of the turn just ended, or of an attempt that another continues, and of the run so far."""

    usage: Usage
    total: Usage
    model: str | None = None
    """The model that answered, as the provider names it: often a version of the requested one."""
    response_id: str | None = None
    """The provider's id of its response, for its support and logs."""
    provider: str | None = None
    """The configured provider that answered, for a run with fallbacks."""


class RunEnd(Event, frozen=True, kw_only=True):
    """Fields of all terminal events."""

    finish: FinishReason
    timing: Timing
    finish_raw: str | None = None
    usage: Usage | None = None
    """Sum over the run's turns and attempts, including failed ones, as far as the provider reported it."""
    provider: str | None = None
    """The last provider called, for a run with fallbacks."""
    model: str | None = None
    """The model of the last response, as its provider names it."""
    response_id: str | None = None
    """The provider's id of the last response, for its support and logs."""
    provider_extra: list[dict[str, object]] | None = None


class Completed(RunEnd, frozen=True, kw_only=True, tag="completed"):
    """The provider finished, and so did the run."""

    stop_string: str | None = None
    """The stop string that ended the last turn, if there was one and the provider or tokenbus identified it."""


class Incomplete(RunEnd, frozen=True, kw_only=True, tag="incomplete"):
    """The stream was cut off: the earlier output stands, the rest never came."""

    reason: str
    error: ErrorInfo | None = None


class RunFailedEvent(RunEnd, frozen=True, kw_only=True, tag="failed"):
    """The run ended in an error."""

    error: ErrorInfo


class Cancelled(RunEnd, frozen=True, kw_only=True, tag="cancelled"):
    """The run was cancelled."""

    reason: str | None = None
    heard_through: int | None = None
    """The last ``seq`` that the listener heard, as reported by the client that cancelled. What came after it is not
    part of `Response.messages`.
    """
    heard_characters: int | None = None
    """How many characters of that event's text the listener heard; None: all of them."""


class UnknownEvent(Event, frozen=True, kw_only=True, tag="unknown"):
    """An event with a type or value that this version of tokenbus does not know, written by a newer version.

    Its `seq` counts like any other; readers that do not understand it skip it. It is never written: it stands for the
    event that was read.
    """

    event_type: str
    """The event's actual ``type``."""
    fields: dict[str, object]
    """All its fields, as written."""


BlockEvent = BlockStarted | ImagePreview | BlockProgress | BlockComplete
TerminalEvent = Completed | Incomplete | RunFailedEvent | Cancelled
ChildEvent = ChildStarted | ChildEnded
RunEvent = Started | Answering | Retrying | Restarted | Waiting | Resumed | ChildEvent | UsageReported | TerminalEvent
PublicEvent = Chunk | BlockEvent | ToolProgress | RunEvent | UnknownEvent

ChunkTopicEvent = Chunk | UnknownEvent
"""Event types of the topics `visible` and `chunks`."""
BlockTopicEvent = BlockEvent | ToolProgress | UnknownEvent
"""Event types of the topic `blocks`."""
RunTopicEvent = RunEvent | UnknownEvent
"""Event types of the topic `runs`."""

TERMINAL = (Completed, Incomplete, RunFailedEvent, Cancelled)

_decoder = msgspec.json.Decoder(PublicEvent)
encode = msgspec.json.Encoder().encode


def decode(data: bytes) -> PublicEvent:
    """Decode one public event from JSON. Raises msgspec.ValidationError or msgspec.DecodeError."""
    return _decoder.decode(data)


def blobs_of(event: PublicEvent) -> set[str]:
    """Ids of the blobs that the event names, in the fields that are for such ids. A text names none."""
    match event:
        case ImagePreview(image=image):
            named = [image.blob_id]
        case BlockComplete():
            images = [event.image, *(event.images or ())]
            named = [
                event.blob_id,
                event.audio and event.audio.blob_id,
                *(event.opaque_blobs or {}).values(),
                *(one.blob_id for one in images if one),
            ]
        case _:
            return set()
    return {blob_id for blob_id in named if blob_id}
