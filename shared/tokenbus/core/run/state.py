"""All that is remembered of an open run: plain data, so that msgpack can checkpoint it."""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenbus.core.prefill.turn import TurnText
from tokenbus.core.run.blocks import BlockTable, ToolCall
from tokenbus.core.run.continuation import Seam
from tokenbus.core.run.opaque import OpaqueTracker
from tokenbus.core.run.policy_gate import PolicyGate
from tokenbus.core.stop_scan import StopScan
from tokenbus.events.frames import Accepted, FallbackPlan, ToolReturned
from tokenbus.events.normalized import Start
from tokenbus.events.requests import Message
from tokenbus.events.usage import Usage


class PendingCall(msgspec.Struct):
    """A tool call that was handed out, and its result once it came."""

    call: ToolCall
    result: ToolReturned | None = None
    told: bool = False
    ruled: ToolCall | None = None
    """What policies made of the call."""

    @property
    def runs(self) -> ToolCall:
        """The call as its tool gets it, and as others hear of it."""
        return self.ruled or self.call


class RunState(msgspec.Struct):
    """One open run. `Run` alone changes it."""

    run: str
    accepted: Accepted
    accepted_ms: int
    blocks: BlockTable
    turn: int = 0
    attempt: int = 1
    seq: int = 0
    taken: int = 0
    """Events worked in."""
    turn_bytes: int = 0
    """Of the events of this turn's attempts."""
    run_bytes: int = 0
    """Of all its events."""
    phase: Literal["streaming", "judged", "tools", "over"] = "streaming"
    """`judged`: the turn is said, and its calls run once its policies have judged it all."""
    first_block: int = 0
    """The turn's first block that still counts: what a retry makes void begins here."""
    heard: bool = False
    """Something visible of this turn went out."""
    failures: int = 0
    losses: int = 0
    pauses: int = 0
    tool_turns: int = 0
    calls: list[PendingCall] = []
    history: list[Message] = []
    """What the present turn will append, once its results are in."""
    usage: Usage | None = None
    """Of the present attempt."""
    start: Start | None = None
    """Of the present attempt's answer."""
    answered: Start | None = None
    """Of the last attempt before it that had an answer."""
    total: Usage | None = None
    """Of the turns that ended."""
    first_byte_ms: int | None = None
    first_visible_ms: int | None = None
    extras: list[dict[str, object]] = []
    late: dict[int, OpaqueTracker] = {}
    """Opaque data that came after its block's end, by the block's number."""
    text: TurnText | None = None
    """Prefill mode: the present turn's text."""
    seam: Seam | None = None
    """The present attempt goes on from an earlier one's text, and has said nothing new yet."""
    scan: StopScan | None = None
    """Chat mode, where the request has stop strings: looks for them in the present attempt's text."""
    seen_ms: int = 0
    """When something last happened, or when a retry was due to begin."""
    gate: PolicyGate | None = None
    """Of a run that has policies: what of it they have judged."""
    choice: int = 0
    """Who is asked: 0 the request's own provider and model, n its n-th fallback."""

    @property
    def asked(self) -> FallbackPlan:
        """The provider and the model of the present attempt."""
        own = self.accepted
        if self.choice:
            return own.fallback[self.choice - 1]
        return FallbackPlan(own.provider, own.model, own.reading, own.continues)
