"""Effects of a run besides its public events: work for fetchers and tool executors, and its end."""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenbus.events.frames import GivenAnswer, RecordedDecision, ToolWork, TurnWork
from tokenbus.events.public import PublicEvent
from tokenbus.events.requests import Message
from tokenbus.events.waits import WaitInfo

EndStatus = Literal["completed", "incomplete", "failed", "cancelled"]


class NextTurn(msgspec.Struct, frozen=True):
    """Hand out one attempt. ``history``: messages that the last turn appends to the conversation; None for a retry."""

    work: TurnWork
    history: list[Message] | None = None
    so_far: Message | None = None
    """The partial answer of an earlier attempt that this one continues."""
    steered: bool = False
    """Messages of its session that steer go into the turn."""


class CloseAttempt(msgspec.Struct, frozen=True):
    """Stop an attempt whose turn ended in the text before the provider's answer did."""

    turn: int
    attempt: int


class SteerCall(msgspec.Struct, frozen=True):
    """Let the provider take the session's messages that steer into its present call, which then ends early."""

    attempt: int


class RunTools(msgspec.Struct, frozen=True):
    """Hand out the calls of a turn; each stays open until its result or the end of the run."""

    work: list[ToolWork]


class Wait(msgspec.Struct, frozen=True):
    """Ask somebody; the wait is open until it is decided or the run ends."""

    info: WaitInfo


class GiveAnswer(msgspec.Struct, frozen=True):
    """Give a call that waits in its worker the answer to its question of this number."""

    block: int
    number: int
    given: GivenAnswer


class EndWait(msgspec.Struct, frozen=True):
    """A wait ended with its call."""

    wait: str


class MoveDeadline(msgspec.Struct, frozen=True):
    """The run's deadline is later by the time for which it only waited."""

    deadline_ms: int


class Draft(msgspec.Struct, frozen=True):
    """Events for the policy stage to judge; `seq` is the draft number."""

    events: list[PublicEvent]
    over: bool = False
    """The run has ended; policies judge nothing more of it."""


class Decide(msgspec.Struct, frozen=True):
    """Publish a policy's decision; ``number`` counts the decisions of the run."""

    number: int
    turn: int
    attempt: int
    decision: RecordedDecision


class ReleaseFromPolicies(msgspec.Struct, frozen=True):
    """Policies no longer judge the run, so its attempt need not wait for the policy stage."""


class EndRun(msgspec.Struct, frozen=True):
    """End the run; its attempt may write nothing more."""

    status: EndStatus


class ForgetRun(msgspec.Struct, frozen=True):
    """Drop the run without writing its end, which its log has already."""


Effect = (
    NextTurn
    | CloseAttempt
    | SteerCall
    | RunTools
    | Wait
    | GiveAnswer
    | EndWait
    | MoveDeadline
    | Draft
    | Decide
    | ReleaseFromPolicies
    | EndRun
    | ForgetRun
)
