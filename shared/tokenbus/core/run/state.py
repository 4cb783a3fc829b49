"""State of an open run: plain data, so that msgpack can checkpoint it."""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenbus.core.prefill.turn import TurnText
from tokenbus.core.run.blocks.block_table import BlockTable, CompleteCall
from tokenbus.core.run.blocks.opaque import ExtraData, OpaqueTracker
from tokenbus.core.run.continuation import Seam
from tokenbus.core.run.gate import PolicyGate
from tokenbus.core.stop_strings import StopScan
from tokenbus.events.frames import Accepted, FallbackPlan, GivenAnswer, ToolReturned
from tokenbus.events.normalized import Start
from tokenbus.events.public import TerminalEvent
from tokenbus.events.requests import Message
from tokenbus.events.usage import Usage
from tokenbus.events.waits import OnDeadline, WaitKind


class OpenWait(msgspec.Struct, frozen=True):
    """What a call waits for instead of a worker."""

    name: str
    what: WaitKind
    deadline_ms: int
    on_deadline: OnDeadline
    question: str = ""
    """As in `GivenAnswer`."""
    number: int = -1
    """As in `ToolAsked`."""

    @property
    def held(self) -> bool:
        """A worker has the call meanwhile."""
        return self.number >= 0


class PendingCall(msgspec.Struct):
    """A tool call that was handed out, and its result once it has arrived."""

    call: CompleteCall
    result: ToolReturned | None = None
    published: bool = False
    changed: CompleteCall | None = None
    """The call as policies or a decision changed it, if they did."""
    wait: OpenWait | None = None
    """Set while the call waits for somebody; then no worker has it, unless it is held."""
    waited: int = 0
    """How many waits it has had."""
    allowed: bool = False
    """Somebody decided that it may run."""
    edited: bool = False
    """Somebody changed its arguments."""
    answers: list[GivenAnswer] = []
    """To its questions, in order."""
    state: str = ""
    """What it left with its last question."""
    child: str = ""
    """The child run that it began."""
    held: int = 0
    """How many questions it has asked and waited for in its worker."""

    @property
    def is_at_worker(self) -> bool:
        """Whether a worker or its queue has the call."""
        return self.result is None and (self.wait is None or self.wait.held)

    @property
    def runs(self) -> CompleteCall:
        """The call as executed and published."""
        return self.changed or self.call


class RunState(msgspec.Struct):
    """State of one open run. Only `RunMachine` and its modules change it."""

    run: str
    accepted: Accepted
    accepted_ms: int
    blocks: BlockTable
    turn: int = 0
    attempt: int = 1
    seq: int = 0
    events_applied: int = 0
    """Number of events applied."""
    turn_bytes: int = 0
    """Bytes of events of this turn's attempts."""
    run_bytes: int = 0
    """Bytes of all events of the run."""
    phase: Literal["streaming", "judged", "tools", "over"] = "streaming"
    """`judged`: the turn is complete; its calls run once the policies have judged all of it."""
    first_block: int = 0
    """First block of the turn that is not void; a retry voids the blocks from here on."""
    visible_emitted: bool = False
    """Whether visible output of this turn was emitted."""
    failures: int = 0
    losses: int = 0
    pauses: int = 0
    tool_turns: int = 0
    calls: list[PendingCall] = []
    history: list[Message] = []
    """Messages of the current turn, appended to the conversation once its results are in."""
    usage: Usage | None = None
    """Of the current attempt."""
    start: Start | None = None
    """Of the current attempt's answer."""
    answered: Start | None = None
    """Of the last earlier attempt that had an answer."""
    total: Usage | None = None
    """Total usage of finished attempts."""
    first_byte_ms: int | None = None
    first_visible_ms: int | None = None
    extras: ExtraData = msgspec.field(default_factory=ExtraData)
    carried: dict[str, str] = {}
    """What the provider wants back with the next request, by name, the latest of each; see `CARRIED`."""
    late_opaque: dict[int, OpaqueTracker] = {}
    """Opaque data that arrived after its block's end, by block number."""
    text: TurnText | None = None
    """Prefill mode: the current turn's text."""
    seam: Seam | None = None
    """Set while the current attempt, which continues an earlier one's text, may still repeat emitted whitespace."""
    scan: StopScan | None = None
    """Chat mode with stop strings: scans the current attempt's text."""
    seen_ms: int = 0
    """Time of the last event, or the time at which a retry was due to start."""
    gate: PolicyGate | None = None
    """Progress of the policies, for a run that has policies."""
    choice: int = 0
    """Provider and model in use: 0 the request's own, n its n-th fallback."""
    handed_out_ms: int = 0
    """When the current attempt could begin; 0: when the run was accepted."""
    answered_ms: int = 0
    """When the current attempt's answer began; 0: not yet."""
    visible_ms: int = 0
    """When the current attempt brought the turn's first visible text; 0: it did not."""
    waits_since_ms: int = 0
    """Since when it does nothing but wait for somebody; 0: it does not."""
    children: int = 0
    """Number of child runs that it began."""
    sealed: TerminalEvent | None = None
    """The end of a durable run, while it waits to be published."""
    reported_attempt: int = 0
    """The last attempt whose end was reported."""
    steered_attempt: int = 0
    """The last attempt whose provider is to take in messages that steer; the attempt after it has them."""

    @property
    def target(self) -> FallbackPlan:
        """Provider and model of the current attempt."""
        own = self.accepted
        if self.choice:
            return own.fallback[self.choice - 1]
        return FallbackPlan(own.provider, own.model, own.reading, own.continues)
