"""Internal wire format of `raw`, `events`, `turns`, `tools` and `control`.

An entry's fields are run ids; each value is one msgpack frame of that run. One entry can carry many runs of a batch,
and an undecodable frame affects only its own run. All structs are array-like; new fields go at the end with a default,
so that older readers can still decode them.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.normalized import Normalized
from tokenbus.events.public import PublicEvent
from tokenbus.events.quirks import ApiName, Quirks
from tokenbus.events.requests import Message, OnFailure
from tokenbus.events.waits import Conditions, Door, Verdict, WaitKind

# What intake decides about a run when it accepts it. The run keeps it, so that a replay decides the same way.


class RunLimits(msgspec.Struct, frozen=True, array_like=True):
    """The settings in force when the run was accepted, so that a replay decides the same way."""

    max_attempts: int = 4
    """Maximum tries of one turn that end in a provider error, including the first."""
    max_losses: int = 20
    """Maximum tries of one turn that end in a lost worker."""
    base_delay_ms: int = 500
    max_delay_ms: int = 30_000
    block_chars: int = 2**20
    """Maximum characters of one block."""
    run_events: int = 500_000
    """Maximum input events of the run, from its provider and its tools."""
    turn_bytes: int = 64 * 2**20
    """Maximum bytes of events of one turn, over all its attempts."""
    run_bytes: int = 256 * 2**20
    """Maximum bytes of events of the run."""
    child_runs: int = 32
    """Maximum child runs that the run begins."""
    child_depth: int = 3
    """Maximum depth of a child run; 1: of a run that a client began, and no deeper."""
    hosted_approval_ms: int = 86_400_000
    """How long a call that its provider runs waits for a decision."""


class TextReading(msgspec.Struct, frozen=True, array_like=True):
    """How to parse the continued text (prefill mode), decided when the run was accepted."""

    stops: tuple[str, ...] = ()
    """Stop strings for top-level text, whether or not they were sent to the provider."""
    types: dict[str, dict[str, list[str]]] = {}
    """By tool and parameter: the JSON types of parameters that are not plain text."""
    inside: str = ""
    """The thinking tag that the prompt itself opened."""
    thinking: tuple[str, ...] = ("thinking",)
    """Names of the tags that hold thinking."""
    end_of_turn: str = ""
    """The token that ends the turn wherever it appears; empty: none."""
    follows_a_name: bool = False
    """The text begins after ``Name:``, so a leading space is not part of it."""


class PolicyPlan(msgspec.Struct, frozen=True, array_like=True):
    """The run's policies, decided when it was accepted."""

    names: tuple[str, ...]
    """In order of application; the names are settings tables of the deployment."""
    on_error: Literal["pass", "block"] = "block"
    """What happens to the run if no policy worker answers."""
    patience_ms: int = 60_000
    """How long to wait for a policy worker's answer."""


class FallbackPlan(msgspec.Struct, frozen=True, array_like=True):
    """A provider and model to try if the earlier ones failed, decided when the run was accepted."""

    provider: str
    model: str
    reading: TextReading | None = None
    """As `Accepted.reading`, for this provider."""
    continues: bool = False
    """As `Accepted.continues`, for this provider and model."""


class ToolWaits(msgspec.Struct, frozen=True, array_like=True):
    """What calls of one tool wait for, decided when the run was accepted."""

    approval: list[Conditions] = []
    """A call that fulfils one of these waits for a decision."""
    approval_ms: int = 86_400_000
    """How long it waits."""
    on_deadline: Literal["allow", "deny"] = "deny"
    """What decides then."""
    schema: dict[str, object] | None = None
    """Of the arguments."""
    client_ms: int = 0
    """If not 0, a client runs the tool, and has so long for it."""
    result: dict[str, object] | None = None
    """Schema of its result."""


class Accepted(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="accepted"):
    """A run begins: what the parser needs to know about its request."""

    provider: str
    model: str
    on_failure: OnFailure
    max_tool_depth: int
    rules: RunLimits
    tools: list[str]
    """The run's tools; a call to any other never runs."""
    tool_timeout_s: float | None = None
    metadata: dict[str, object] | None = None
    reading: TextReading | None = None
    """Prefill mode: how to parse the model's text; None in chat mode."""
    continues: bool = False
    """Provider and model can continue a partial text (`on_failure` continue)."""
    deadline_ms: int = 0
    """Unix time at which the run fails in any case; 0: never."""
    stops: tuple[str, ...] = ()
    """Chat mode: the request's stop strings, which end the turn whether or not they were sent to the provider."""
    record: bool = False
    """The run is recorded: the parser's input is written to its tape, and the recorder is notified of its end."""
    policy_plan: PolicyPlan | None = None
    """Policies that judge the run before it is published; None: there are none."""
    visible: bool = True
    """The run's text is visible."""
    fallback: tuple[FallbackPlan, ...] = ()
    """In the order in which they are tried."""
    notes: tuple[str, ...] = ()
    """Intake's notes about the request, published in the run's `started` event."""
    participant: str | None = None
    """The model's participant name."""
    traceparent: str = ""
    """The publisher's trace context; empty: it gave none."""
    commentary: bool = True
    """The model's commentary is visible, as its other text."""
    deadline_after_ms: int = 0
    """Instead of `deadline_ms`, for a run that may begin later: from its beginning."""
    webhooks: tuple[str, ...] = ()
    """The receivers of webhooks that are told of its end."""
    waits: dict[str, ToolWaits] = {}
    """By tool; tools whose calls wait for nobody are left out."""
    begins_runs: dict[str, int] = {}
    """The tools whose calls begin child runs, and the time in ms that one may take."""
    archive: bool = False
    """The recorder is told of the run's end, to archive its log."""
    options: dict[str, int | float] = {}
    """Options of the request that are numbers, as spans name them: ``temperature`` and so on."""
    durable: bool = False
    """Its end is published once all before it is replicated."""
    session: str | None = None
    """The name of the session that the run is of."""


# What fetchers write to `raw`: the provider's bytes as they were read, and what happened to the call.


class ImagesRequested(msgspec.Struct, frozen=True, array_like=True):
    """Image options of the request that the response does not repeat, and how to deliver the images."""

    inline: bool = False
    """Deliver as base64 instead of in blobs."""
    prompt: str = ""
    model: str = ""
    size: str = ""
    quality: str = ""
    moved: str = ""
    """The secret in the placeholders of offloaded images (`tokenbus.core.image_header`); empty if none was
    offloaded.
    """


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """The provider answered: how to read what follows. The first item of an attempt that got an answer."""

    api: ApiName
    status: int
    headers: dict[str, str]
    """Lower-case names; only headers that a decoder may need, never a secret."""
    stream: bool
    quirks: Quirks
    """The quirks at the time of the call, so that a replay decodes the same way."""
    images: ImagesRequested = ImagesRequested()
    provider: str = ""
    """The provider's name in the settings."""
    called_ms: int = 0
    """Unix time when the provider was called."""
    traceparent: str = ""
    """The publisher's trace context; empty: it gave none."""
    steers: bool = False
    """The call takes in messages of its session while the answer comes."""


class Data(msgspec.Struct, frozen=True, array_like=True, tag="data"):
    """Body bytes as read."""

    data: bytes


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The call is over. ``error``: a local failure (timeout, network, missing key); None: the body ended."""

    error: ErrorInfo | None = None
    called_ms: int = 0
    """Unix time when the provider was called; 0: it was not."""


class Lost(msgspec.Struct, frozen=True, array_like=True, tag="lost"):
    """The attempt was abandoned: its worker died, or the run was cancelled or ended."""

    reason: str


class Noted(msgspec.Struct, frozen=True, array_like=True, tag="note"):
    """A repair made while building the request; published with the run's end as provider_extra."""

    text: str


RawItem = Opened | Data | Ended | Lost | Noted

ANY_FRAME = -1
"""Frame number of an end that was not written by the attempt's fetcher, whose count is unknown."""


class RawFrame(msgspec.Struct, frozen=True, array_like=True):
    """One flush of one attempt. ``n`` counts the attempt's frames from 0; a gap means a loss."""

    turn: int
    attempt: int
    n: int
    at_ms: int
    """Unix time of the flush."""
    items: list[RawItem]


# What the parser asks of others: drafts to judge, attempts to make, tools to run, and messages to all workers.


class Drafts(msgspec.Struct, frozen=True, array_like=True):
    """Public events that are not yet published; `seq` numbers a run's drafts from 0."""

    policies: tuple[str, ...]
    events: list[PublicEvent]
    over: bool = False
    """The run has ended; nothing more needs to be judged."""
    traceparent: str = ""
    """With the run's first drafts: as in `Accepted`."""


class TurnWork(msgspec.Struct, frozen=True, array_like=True):
    """One attempt to make. The request and the history are in the run's hash."""

    run: str
    turn: int
    attempt: int
    not_before_ms: int = 0
    """Unix time before which the provider must not be called (the delay of a retry)."""
    tenant: str = ""
    """The run's tenant, needed for fair queueing before the request is loaded."""
    held: bool = False
    """Policies judge the output before it is published, so the attempt waits while their stage lags too far behind."""
    choice: int = 0
    """Which provider and model to call: 0 is the request's own, n its n-th fallback."""


class ProviderJob(msgspec.Struct, frozen=True, array_like=True):
    """A job in the background of a run's provider, and how far its answer is in the attempt's frames."""

    id: str
    """The provider's."""
    turn: int
    attempt: int
    """Whose frames have its answer so far."""
    choice: int
    """As in `TurnWork`."""
    provider: str
    model: str
    stream: bool
    """Its answer is read as a stream; else it is polled."""
    started_ms: int
    """Unix time when it was started."""
    after: int = -1
    """Number of the last event that was read."""
    moved: str = ""
    """As in `ImagesRequested`."""
    over: bool = False
    """It has ended, and the frames have all of its answer."""


class GivenAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a question of a tool."""

    question: str
    """Names what was asked; a call that is run again must ask the same."""
    decision: Verdict
    content: str = ""
    """JSON; empty if there is none."""
    by: str | None = None
    door: Door = "bus"


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
    tenant: str = ""
    """The run's tenant: tenants take turns. `fair_order` reads it by its place."""
    metadata: dict[str, object] | None = None
    """The run's metadata, for tools that act on behalf of a tenant or a user."""
    traceparent: str = ""
    """As in `Accepted`."""
    free_text: bool = False
    """``arguments`` is no JSON."""
    answers: list[GivenAnswer] = []
    """To the questions that the call has asked, in order."""
    state: str = ""
    """What the call left with its last question."""
    child: str = ""
    """The child run that the call begins. Without a ``name`` that run has ended, and its result is asked for."""
    durable: bool = False
    """It runs once all before it is replicated."""
    given_up: bool = False
    """Its run has ended, and nobody answers its question: its tool ends what goes on elsewhere, as ``state`` says."""


class Control(msgspec.Struct, frozen=True, array_like=True):
    """A message to all workers of a partition."""

    run: str
    what: Literal["cancel", "closed", "steer"] = "cancel"
    """``closed``: one attempt is over; the run continues. ``steer``: its call takes in the messages that wait."""
    attempt: int = 0
    """The attempt that was closed, or that takes them in."""


# What the parser reads from `events`: what happens to a run from outside, and what its provider sent.


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="rejected"):
    """A request with an id that was rejected: the run ends `failed`."""

    error: ErrorInfo
    provider: str = ""
    model: str = ""
    tenant: str = ""
    webhooks: tuple[str, ...] = ()


class CancelRequested(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """The run was cancelled by a client."""

    reason: str | None = None
    heard_through: int | None = None
    heard_characters: int | None = None


class SteerRequested(msgspec.Struct, frozen=True, array_like=True, tag="steer"):
    """A message of the run's session wants to go into it without waiting for the end of the turn."""


class ResultImage(msgspec.Struct, frozen=True, array_like=True):
    """An image from a tool. The model sees it if its bytes or size are given; subscribers get it by bytes or blob."""

    media_type: str
    base64: str = ""
    blob_id: str | None = None
    size_bytes: int = 0
    """Size of a blob that the model should see."""


class ToolReturned(msgspec.Struct, frozen=True, array_like=True, tag="tool_result"):
    """The result of one tool call; ``block`` is the call's public block."""

    block: int
    content: str
    is_error: bool
    blob_id: str | None = None
    images: list[ResultImage] = []
    child_end: ChildEnd | None = None
    """Of a call that began a child run."""


class ChildEnd(msgspec.Struct, frozen=True, array_like=True):
    """How a child run ended."""

    status: Literal["completed", "incomplete", "failed", "cancelled", "lost"]
    error: ErrorInfo | None = None


class ToolReported(msgspec.Struct, frozen=True, array_like=True, tag="tool_progress"):
    """Progress of the call in this public block, as reported by the tool. The call stays open."""

    block: int
    progress: float
    """Finite, because JSON has no other numbers."""
    total: float | None = None
    message: str | None = None


class ToolAsked(msgspec.Struct, frozen=True, array_like=True, tag="tool_asked"):
    """The call in this public block has asked a question. It has ended, and is handed out again with the answer; or it
    waits in its worker, if ``number`` is set.
    """

    block: int
    question: str
    """As in `GivenAnswer`."""
    text: str
    timeout_ms: int
    schema: dict[str, object] | None = None
    url: str | None = None
    state: str = ""
    """As in `ToolWork`."""
    number: int = -1
    """How many questions the call has asked before and waited for; -1: it has ended."""


class WaitDecided(msgspec.Struct, frozen=True, array_like=True, tag="wait_decided"):
    """A wait of the run ended. The script that writes it writes one for each wait."""

    wait: str
    what: WaitKind
    decision: Verdict
    id: str
    by: str | None = None
    door: Door = "bus"
    reason: str = ""
    """Of a denial, for the model."""
    arguments: str | None = None
    """With which an allowed call runs instead of its own."""
    content: str = ""
    """Of an answer, as JSON; or a client's result."""
    is_error: bool = False


HAS_ENDED = -1
"""`DeadlinePassed.taken` of a `silent` run that has ended: nothing more is written of it."""


class DeadlinePassed(msgspec.Struct, frozen=True, array_like=True, tag="overdue"):
    """A timeout found by the parser: the deadline passed, the attempt went silent, or no policy worker answered."""

    what: Literal["deadline", "silent", "policy"]
    taken: int = 0
    """`silent`: the number of events when the timeout was found; it no longer holds if there are more. `policy`: the
    same for heartbeats of the run's policies. `HAS_ENDED`: the run's hash says that it ended.
    """


PolicyAction = Literal["block", "replace", "terminate", "error"]


class RecordedDecision(msgspec.Struct, frozen=True, array_like=True):
    """A policy's decision on a block or on the run."""

    policy: str
    action: PolicyAction
    reason: str = ""
    block: int | None = None
    tool_id: str | None = None
    tool_name: str | None = None
    original: str | None = None
    final: str | None = None


WHOLE_RUN = -1
"""In place of a draft's number: the step belongs to the run as it is now, published or not."""


class PolicyVerdict(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of one draft: the unnamed part when its policies ran, and a named part for each deferred result.

    Each part takes effect once; a repetition under the same name changes nothing.
    """

    draft: int
    part: str = ""
    deferred: list[str] = []
    """Names of the draft's further parts, still to come."""
    events: list[PublicEvent] = []
    """The released output. `seq` is not set, and `block` is numbered by the teller."""
    decisions: list[RecordedDecision] = []
    ends: str | None = None
    """A policy ends the run after this, for this reason."""


class Stored(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    """All that the run's end follows from is where its `durability` wants it, so the end may be published."""

    taken: int
    """The number of events that were applied before the end."""


class PolicyVerdicts(msgspec.Struct, frozen=True, array_like=True, tag="ruled"):
    """The policy stage has judged drafts of a run."""

    numbered_by: str
    """The policy worker that numbers the blocks; a different one starts numbering again."""
    steps: list[PolicyVerdict]
    """Empty: a heartbeat. The run is queued at a live policy worker."""
    first: int
    """How many steps this worker sent before these."""


class PutAway(msgspec.Struct, frozen=True, array_like=True, tag="away"):
    """The run's state is in its hash; the parser forgets the run. A `PutBack` precedes all that follows."""


class PutBack(msgspec.Struct, frozen=True, array_like=True, tag="back"):
    """The state of a run that was put away."""

    state: bytes
    turn: int
    attempt: int
    seq: int
    """With which the run ends if no one can read its state."""
    tenant: str = ""
    """As ``seq``."""


ControlEvent = (
    Accepted
    | Rejected
    | CancelRequested
    | SteerRequested
    | ToolReturned
    | Noted
    | DeadlinePassed
    | ToolReported
    | ToolAsked
    | PolicyVerdicts
    | WaitDecided
    | Stored
    | PutAway
    | PutBack
)
BusEvent = ControlEvent | Normalized

CONTROL_ATTEMPT = 0
"""Attempt number of frames that concern the run rather than one of its attempts."""


class EventFrame(msgspec.Struct, frozen=True, array_like=True):
    """Events of one run in one commit."""

    turn: int
    attempt: int
    at_ms: int
    events: list[BusEvent]


class TapedFrame(msgspec.Struct, frozen=True, array_like=True):
    """A tape entry of a recorded run: one frame that the parser applied."""

    frame: EventFrame
    """For an attempt, without its events, which the raw stream can reproduce."""
    events: int
    """The number of events in the frame."""


# Frames to msgpack and back. What a newer version added stays undecoded, for readers to skip.


_encode = msgspec.msgpack.Encoder().encode
raw_decoder = msgspec.msgpack.Decoder(RawFrame)
event_decoder = msgspec.msgpack.Decoder(EventFrame)
turn_decoder = msgspec.msgpack.Decoder(TurnWork)
job_decoder = msgspec.msgpack.Decoder(ProviderJob)
tool_decoder = msgspec.msgpack.Decoder(ToolWork)
answer_decoder = msgspec.msgpack.Decoder(GivenAnswer)
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
    """Decode a frame. Items of a kind added by a newer version stay `msgspec.Raw`, for readers to skip.

    Raises msgspec's ValidationError and DecodeError for an invalid frame.
    """
    try:
        return raw_decoder.decode(data)
    except msgspec.ValidationError:
        loose = _loose_raw.decode(data)
        items: list[Any] = [_known(item, _item_decoder, RawItem) for item in loose.items]
        return RawFrame(loose.turn, loose.attempt, loose.n, loose.at_ms, items)


def decode_events(data: bytes | msgspec.Raw) -> EventFrame:
    """Decode a frame. Events of a kind added by a newer version stay `msgspec.Raw`, to be skipped and rewritten
    unchanged.

    Raises msgspec's ValidationError and DecodeError for an invalid frame.
    """
    try:
        return event_decoder.decode(data)
    except msgspec.ValidationError:
        loose = _loose_events.decode(data)
        events: list[Any] = [_known(event, _bus_event_decoder, BusEvent) for event in loose.events]
        return EventFrame(loose.turn, loose.attempt, loose.at_ms, events)


def decode_taken(data: bytes) -> TapedFrame:
    """Decode a tape entry; see `decode_events`."""
    loose = _loose_taken.decode(data)
    return TapedFrame(decode_events(loose.frame), loose.events)


def is_known(item: object) -> bool:
    """Whether this version knows the item's or event's kind; otherwise a newer version wrote it."""
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


def encode(
    frame: RawFrame
    | EventFrame
    | TapedFrame
    | Drafts
    | TurnWork
    | ToolWork
    | GivenAnswer
    | ProviderJob
    | Control
    | list[Message],
) -> bytes:
    """Encode a frame as msgpack."""
    return _encode(frame)
