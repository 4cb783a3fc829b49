"""Internal wire: what lies on `raw`, `events`, `turns`, `tools` and `control`.

An entry's fields are run ids, each value one msgpack frame of that run: so one entry carries many runs of
one batch, and a frame that does not decode harms its own run alone. All structs are array-like; a new field
goes to the end with a default, so that older readers still read.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.normalized import Normalized
from tokenbus.events.public import PublicEvent
from tokenbus.events.quirks import ApiName, Quirks
from tokenbus.events.requests import Message, OnFailure


class _Item(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of tagged items."""


# --- raw: fetcher to normalizer -----------------------------------------------------------------------------


class ImagesAsked(msgspec.Struct, frozen=True, array_like=True):
    """How the request asked for images: what an answer does not repeat of it, and how they are handed on."""

    inline: bool = False
    """As base64, and not in blobs."""
    prompt: str = ""
    model: str = ""
    size: str = ""
    quality: str = ""
    moved: str = ""
    """The secret in the placeholders of moved images (`tokenbus.core.image_placeholder`); empty if none was moved."""


class Opened(_Item, frozen=True, tag="open"):
    """The provider answered: how to read what follows. The first item of an attempt that got an answer."""

    api: ApiName
    status: int
    headers: dict[str, str]
    """Lower-case names; only those a decoder may need, never a secret."""
    stream: bool
    quirks: Quirks
    """As they were at the call, so that a replay reads the same."""
    images: ImagesAsked = ImagesAsked()
    provider: str = ""
    """Its name in the settings."""


class Data(_Item, frozen=True, tag="data"):
    """Bytes of the body, as they were read."""

    data: bytes


class Ended(_Item, frozen=True, tag="end"):
    """The call is over. ``error`` is what happened here (timeout, network, missing key); None: the body ended."""

    error: ErrorInfo | None = None


class Lost(_Item, frozen=True, tag="lost"):
    """Nobody works on this attempt any more: its worker died, or the run was cancelled or ended."""

    reason: str


class Noted(_Item, frozen=True, tag="note"):
    """Something that building the request had to mend; passed on to the run's end as provider_extra."""

    text: str


RawItem = Opened | Data | Ended | Lost | Noted

ANY_FRAME = -1
"""Frame number of an end written by another than the attempt's fetcher, who cannot know the number."""


class RawFrame(msgspec.Struct, frozen=True, array_like=True):
    """What one flush carries of one attempt. ``n`` counts the attempt's frames from 0: a gap shows a loss."""

    turn: int
    attempt: int
    n: int
    at_ms: int
    """Unix time of the flush."""
    items: list[RawItem]


# --- events: normalizer, intake and tools to parser -----------------------------------------------------------


class Rules(msgspec.Struct, frozen=True, array_like=True):
    """The settings in force when the run was accepted, so that a replay decides the same."""

    max_attempts: int = 4
    """Tries of one turn that ended in a provider's error, the first included."""
    max_losses: int = 20
    """Tries of one turn whose worker was lost."""
    base_delay_ms: int = 500
    max_delay_ms: int = 30_000
    block_chars: int = 16 * 2**20
    """Most characters of one block."""
    run_events: int = 500_000
    """Most events of the run, as its provider and its tools sent them."""
    turn_bytes: int = 64 * 2**20
    """Most bytes of events of one turn, all of its attempts together."""
    run_bytes: int = 256 * 2**20
    """Most bytes of events of the run."""


class TextReading(msgspec.Struct, frozen=True, array_like=True):
    """How the text that a model continues (prefill mode) is read, as it was settled when the run was accepted."""

    stops: tuple[str, ...] = ()
    """Stop strings that count in text at top level, whether the provider was told of them or not."""
    types: dict[str, dict[str, list[str]]] = {}
    """By tool and parameter: the JSON types of parameters that are not plain text."""
    inside: str = ""
    """The tag of thinking that the prompt itself opened."""
    thinking: tuple[str, ...] = ("thinking",)
    """Names of the tags that hold thinking."""
    end_of_turn: str = ""
    """The token that ends the turn wherever it stands; empty: none."""
    follows_a_name: bool = False
    """The text begins after ``Name:``, so the blank at its beginning is no part of it."""


class Policing(msgspec.Struct, frozen=True, array_like=True):
    """The policies of a run, as they were settled when it was accepted."""

    names: tuple[str, ...]
    """In the order in which they come; tables of the deployment's settings."""
    on_error: Literal["pass", "block"] = "block"
    """What becomes of the run where no policy worker answers."""
    patience_ms: int = 60_000
    """So long without an answer counts as that."""


class FallbackPlan(msgspec.Struct, frozen=True, array_like=True):
    """A provider and a model to ask when those before them failed, as it was decided when the run was accepted."""

    provider: str
    model: str
    reading: TextReading | None = None
    """As `Accepted.reading`, for this provider."""
    continues: bool = False
    """As `Accepted.continues`, for this provider and model."""


class Accepted(_Item, frozen=True, kw_only=True, tag="accepted"):
    """A run begins: what the parser must know of its request."""

    provider: str
    model: str
    on_failure: OnFailure
    max_tool_depth: int
    rules: Rules
    tools: list[str]
    """Names on the run's list; a call to another never runs."""
    tool_timeout_s: float | None = None
    metadata: dict[str, object] | None = None
    reading: TextReading | None = None
    """Prefill mode: how the model's text is read; None in chat mode."""
    continues: bool = False
    """Provider and model can go on from a partial text (`on_failure` continue)."""
    deadline_ms: int = 0
    """Unix time at which the run fails, whatever it does; 0: never."""
    stops: tuple[str, ...] = ()
    """Chat mode: the request's stop strings, which end the turn whether its provider was told of them or not."""
    record: bool = False
    """The run is recorded: what the parser takes of it goes on its tape, and the recorder is told of its end."""
    policing: Policing | None = None
    """Policies that judge the run before anybody hears of it; None: there are none."""
    visible: bool = True
    """Its text is visible."""
    fallback: tuple[FallbackPlan, ...] = ()
    """In the order in which they are asked."""
    notes: tuple[str, ...] = ()
    """What intake has to say about the request; in the run's `started`."""
    participant: str | None = None
    """The name under which the model speaks."""


class Rejected(_Item, frozen=True, tag="rejected"):
    """A request with an id that could not be taken: the run ends `failed`."""

    error: ErrorInfo
    provider: str = ""
    model: str = ""


class CancelAsked(_Item, frozen=True, tag="cancel"):
    """Somebody cancelled the run."""

    reason: str | None = None
    heard_through: int | None = None


class ResultImage(msgspec.Struct, frozen=True, array_like=True):
    """An image that a tool gave. The model sees it where its bytes or their number are here; a subscriber finds it by
    bytes or blob."""

    media_type: str
    base64: str = ""
    blob_id: str | None = None
    size_bytes: int = 0
    """Of a blob that the model is to see."""


class ToolReturned(_Item, frozen=True, tag="tool_result"):
    """One tool call's result; ``block`` is the call's public block."""

    block: int
    content: str
    is_error: bool
    blob_id: str | None = None
    images: list[ResultImage] = []


class ToolReported(_Item, frozen=True, tag="tool_progress"):
    """How far the call of this public block is, as its tool says; it stays open."""

    block: int
    progress: float
    """A finite number, for JSON has no other."""
    total: float | None = None
    message: str | None = None


class Overdue(_Item, frozen=True, tag="overdue"):
    """The parser's clock: the run's deadline has passed, nobody works on it any more, or no policy worker answers."""

    what: Literal["deadline", "silent", "policy"]
    taken: int = 0
    """`silent`: how many events the run had when that was judged. With more it is silent no longer. `policy`: the same
    of the signs of life that its policies gave."""


PolicyAction = Literal["block", "replace", "terminate", "error"]


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """What a policy did with a block or with the run."""

    policy: str
    action: PolicyAction
    reason: str = ""
    block: int | None = None
    tool_id: str | None = None
    tool_name: str | None = None
    original: str | None = None
    final: str | None = None


class Step(msgspec.Struct, frozen=True, array_like=True):
    """What became of one draft: the part without a name when its policies were called, and a named one for each thing
    that they put off then.

    A part is told once: whatever else comes under its name changes nothing.
    """

    draft: int
    part: str = ""
    later: list[str] = []
    """Further parts of the draft that there will be."""
    events: list[PublicEvent] = []
    """What is to be heard; their `seq` means nothing, and their `block` is the number that the teller gives it."""
    decisions: list[Decision] = []
    ends: str | None = None
    """A policy ends the run after this, for this reason."""


class Ruled(_Item, frozen=True, tag="ruled"):
    """The policy stage has judged drafts of a run."""

    teller: str
    """Who numbers the blocks in it: another one begins anew."""
    steps: list[Step]
    """None: the run is in good hands, and its turn will come."""


ControlEvent = Accepted | Rejected | CancelAsked | ToolReturned | Noted | Overdue | ToolReported | Ruled
BusEvent = ControlEvent | Normalized

CONTROL_ATTEMPT = 0
"""Attempt number of frames that concern the run and not one attempt of it."""


class EventFrame(msgspec.Struct, frozen=True, array_like=True):
    """Events of one run in one commit."""

    turn: int
    attempt: int
    at_ms: int
    events: list[BusEvent]


class Taken(msgspec.Struct, frozen=True, array_like=True):
    """On the tape of a recorded run: one frame that the parser took."""

    frame: EventFrame
    """Of an attempt without its events, which the raw stream gives again."""
    events: int
    """How many the frame had."""


# --- drafts: parser to policy stage -------------------------------------------------------------------------------


class Drafts(msgspec.Struct, frozen=True, array_like=True):
    """Public events that nobody heard of yet; `seq` numbers a run's drafts from 0."""

    policies: tuple[str, ...]
    events: list[PublicEvent]
    over: bool = False
    """The run has ended; nothing more is to be judged."""


# --- work: parser to fetchers and tool executors ------------------------------------------------------------------


class TurnWork(msgspec.Struct, frozen=True, array_like=True):
    """One attempt to make. The request and the history lie in the run's hash."""

    run: str
    turn: int
    attempt: int
    not_before_ms: int = 0
    """Unix time before which the provider is not called (a retry's delay)."""
    tenant: str = ""
    """Whose run it is, so that its turn can be found before its request is loaded."""
    held: bool = False
    """Policies judge what it says before anybody hears of it: it waits while their stage is too far behind."""
    choice: int = 0
    """Which provider and model to ask: 0 the request's own, n its n-th fallback."""


class ToolWork(msgspec.Struct, frozen=True, array_like=True):
    """One tool call to run."""

    run: str
    turn: int
    attempt: int
    block: int
    tool_id: str
    name: str
    arguments: str
    timeout_s: float | None = None


class Control(msgspec.Struct, frozen=True, array_like=True):
    """Told to all workers of a partition at once."""

    run: str
    what: Literal["cancel", "closed"] = "cancel"
    """``closed``: one attempt is over; the run goes on."""
    attempt: int = 0
    """What was closed."""


_encode = msgspec.msgpack.Encoder().encode
raw_decoder = msgspec.msgpack.Decoder(RawFrame)
event_decoder = msgspec.msgpack.Decoder(EventFrame)
turn_decoder = msgspec.msgpack.Decoder(TurnWork)
tool_decoder = msgspec.msgpack.Decoder(ToolWork)
drafts_decoder = msgspec.msgpack.Decoder(Drafts)
control_decoder = msgspec.msgpack.Decoder(Control)
history_decoder = msgspec.msgpack.Decoder(list[Message])
_item_decoder = msgspec.msgpack.Decoder(RawItem)
_bus_event_decoder = msgspec.msgpack.Decoder(BusEvent)
_tag_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])


class _LooseRaw(msgspec.Struct, frozen=True, array_like=True):
    turn: int
    attempt: int
    n: int
    at_ms: int
    items: list[msgspec.Raw]


class _LooseEvents(msgspec.Struct, frozen=True, array_like=True):
    turn: int
    attempt: int
    at_ms: int
    events: list[msgspec.Raw]


class _LooseTaken(msgspec.Struct, frozen=True, array_like=True):
    frame: msgspec.Raw
    events: int


_loose_raw = msgspec.msgpack.Decoder(_LooseRaw)
_loose_events = msgspec.msgpack.Decoder(_LooseEvents)
_loose_taken = msgspec.msgpack.Decoder(_LooseTaken)


def decode_raw(data: bytes) -> RawFrame:
    """The frame; an item of a kind that a newer version added stays the `msgspec.Raw` that it is, for readers to pass
    over. Raises msgspec's ValidationError and DecodeError for what is no frame."""
    try:
        return raw_decoder.decode(data)
    except msgspec.ValidationError:
        loose = _loose_raw.decode(data)
        items: list[Any] = [_known(item, _item_decoder, RawItem) for item in loose.items]
        return RawFrame(loose.turn, loose.attempt, loose.n, loose.at_ms, items)


def decode_events(data: bytes | msgspec.Raw) -> EventFrame:
    """The frame; an event of a kind that a newer version added stays the `msgspec.Raw` that it is, for readers to pass
    over and to write as it came. Raises msgspec's ValidationError and DecodeError for what is no frame."""
    try:
        return event_decoder.decode(data)
    except msgspec.ValidationError:
        loose = _loose_events.decode(data)
        events: list[Any] = [_known(event, _bus_event_decoder, BusEvent) for event in loose.events]
        return EventFrame(loose.turn, loose.attempt, loose.at_ms, events)


def decode_taken(data: bytes) -> Taken:
    """A piece of a tape; see `decode_events`."""
    loose = _loose_taken.decode(data)
    return Taken(decode_events(loose.frame), loose.events)


def is_known(item: object) -> bool:
    """Whether an item or event is of a kind that this version knows; if not, a newer one does."""
    return not isinstance(item, msgspec.Raw)


def _known(item: msgspec.Raw, decoder: msgspec.msgpack.Decoder[Any], kinds: Any) -> object:
    try:
        return decoder.decode(item)
    except msgspec.ValidationError:
        try:
            tag = msgspec.msgpack.decode(_tag_decoder.decode(item)[0], type=str)
        except (msgspec.DecodeError, IndexError):
            tag = None
        if tag is None or any(kind.__struct_config__.tag == tag for kind in get_args(kinds)):
            raise
        return msgspec.Raw(bytes(item))


def encode(frame: RawFrame | EventFrame | Taken | Drafts | TurnWork | ToolWork | Control | list[Message]) -> bytes:
    """The msgpack bytes of a frame."""
    return _encode(frame)
