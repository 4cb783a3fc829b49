"""Fallback of a turn to the next provider and model that the request names: when, and how."""

from __future__ import annotations

from tokenbus.core.run.attempts.next_attempt import begin_attempt, discard_blocks, turn_work
from tokenbus.core.run.attempts.retry import WORKER_LOST, fallback_may_succeed
from tokenbus.core.run.effects import NextTurn
from tokenbus.core.run.outbox import Outbox
from tokenbus.core.run.state import RunState
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.public import ProviderModel


def may_fall_back(s: RunState, error: ErrorInfo) -> bool:
    """Whether another provider and model is left, may do better, and nothing visible of the turn was emitted."""
    left = s.choice < len(s.accepted.fallback) and s.accepted.on_failure != "fail"
    return left and not s.visible_emitted and fallback_may_succeed(error)


def next_speaker(s: RunState, error: ErrorInfo) -> int | None:
    """The number of the next fallback that can continue the visible text (`on_failure` continue); None: there is none.

    A lost worker is no fault of the provider, but the one that wrote the text may be unable to continue it.
    """
    may_help = fallback_may_succeed(error) or error.code == WORKER_LOST
    if not (may_help and s.visible_emitted and s.accepted.on_failure == "continue"):
        return None
    if s.text is None and not s.blocks.can_continue():
        return None
    left = range(s.choice + 1, len(s.accepted.fallback) + 1)
    return next((n for n in left if s.accepted.fallback[n - 1].continues), None)


def fall_back(s: RunState, out: Outbox, error: ErrorInfo, at_ms: int) -> NextTurn:
    """Restart the turn with the next fallback provider and model; later turns stay with it."""
    s.blocks.complete_all(out, cut=True)
    s.choice += 1
    s.failures = s.losses = 0
    discard_blocks(
        s, out, error, s.attempt + 1, 0, fallback=ProviderModel(provider=s.target.provider, model=s.target.model)
    )
    s.text = s.text and s.text.again(s.target.reading)
    begin_attempt(s, at_ms)
    return NextTurn(turn_work(s))
