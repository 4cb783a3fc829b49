"""What the parser reads from `events`: what happens to a run from outside, and what its provider sent."""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames.accepted import Accepted
from tokenbus.events.frames.raw import Noted
from tokenbus.events.normalized import Normalized
from tokenbus.events.public import PublicEvent


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="rejected"):
    """A request with an id that was rejected: the run ends `failed`."""

    error: ErrorInfo
    provider: str = ""
    model: str = ""
    tenant: str = ""


class CancelRequested(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """The run was cancelled by a client."""

    reason: str | None = None
    heard_through: int | None = None
    heard_characters: int | None = None


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


class ToolReported(msgspec.Struct, frozen=True, array_like=True, tag="tool_progress"):
    """Progress of the call in this public block, as reported by the tool. The call stays open."""

    block: int
    progress: float
    """Finite, because JSON has no other numbers."""
    total: float | None = None
    message: str | None = None


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


class PolicyVerdicts(msgspec.Struct, frozen=True, array_like=True, tag="ruled"):
    """The policy stage has judged drafts of a run."""

    numbered_by: str
    """The policy worker that numbers the blocks; a different one starts numbering again."""
    steps: list[PolicyVerdict]
    """Empty: a heartbeat. The run is queued at a live policy worker."""
    first: int
    """How many steps this worker sent before these."""


ControlEvent = (
    Accepted | Rejected | CancelRequested | ToolReturned | Noted | DeadlinePassed | ToolReported | PolicyVerdicts
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
