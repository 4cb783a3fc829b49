"""What a run hands out, beside its public events: to fetchers, to tool executors, and its own end."""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenbus.events.frames import Decision, ToolWork, TurnWork
from tokenbus.events.public import PublicEvent
from tokenbus.events.requests import Message

EndStatus = Literal["completed", "incomplete", "failed", "cancelled"]


class NextTurn(msgspec.Struct, frozen=True):
    """Hand out one attempt. ``history``: what the turn just ended appends to the conversation, None for a retry."""

    work: TurnWork
    history: list[Message] | None = None
    so_far: Message | None = None
    """What of the turn an earlier attempt brought, and this one goes on from."""


class CloseAttempt(msgspec.Struct, frozen=True):
    """The turn ended in the provider's text before the provider did: it need not go on."""

    turn: int
    attempt: int


class RunTools(msgspec.Struct, frozen=True):
    """Hand out the calls of a turn; each stays open until its result or the run's end."""

    work: list[ToolWork]


class Draft(msgspec.Struct, frozen=True):
    """Events for the policy stage to judge; `seq` is the number of the draft."""

    events: list[PublicEvent]
    over: bool = False
    """The run has ended: nothing of it is to be judged any more."""


class Decide(msgspec.Struct, frozen=True):
    """Tell what a policy did, under this number among the run's decisions."""

    number: int
    turn: int
    attempt: int
    decision: Decision


class ReleaseFromPolicies(msgspec.Struct, frozen=True):
    """Nobody judges the run any more: its attempt need not wait for the policy stage."""


class EndRun(msgspec.Struct, frozen=True):
    """The run is over; its attempt may write nothing more."""

    status: EndStatus


Effect = NextTurn | CloseAttempt | RunTools | Draft | Decide | ReleaseFromPolicies | EndRun
