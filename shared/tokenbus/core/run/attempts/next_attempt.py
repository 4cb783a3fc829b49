"""Next attempt of a run: the next turn, the same turn from its start, or the same turn continued from its text."""

from __future__ import annotations

from tokenbus.core.prefill.turn import TurnText
from tokenbus.core.run.blocks.block_table import BlockTable
from tokenbus.core.run.continuation import partial_message, partial_text
from tokenbus.core.run.effects import NextTurn
from tokenbus.core.run.outbox import Outbox
from tokenbus.core.run.provider_extra import drop_void
from tokenbus.core.run.state import RunState
from tokenbus.core.run.termination import count, publish_usage
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import TurnWork
from tokenbus.events.public import ProviderModel, Restarted, Retrying
from tokenbus.events.requests import Message


def next_turn(s: RunState, history: list[Message], at_ms: int) -> NextTurn:
    """Start the next turn. ``history``: messages that the last turn appends to the conversation."""
    s.turn += 1
    s.visible_emitted = False
    s.failures = s.losses = s.turn_bytes = 0
    s.calls, s.history = [], []
    s.text = s.text and s.text.following()
    begin_attempt(s, at_ms)
    return NextTurn(turn_work(s), history)


def restart_turn(
    s: RunState, out: Outbox, error: ErrorInfo, delay_ms: int, not_before_ms: int, *, at_ms: int
) -> NextTurn:
    """Restart the turn; its output so far is void."""
    s.blocks.complete_all(out, cut=True)
    discard_blocks(s, out, error, s.attempt + 1, delay_ms)
    begin_attempt(s, not_before_ms or at_ms)
    return NextTurn(turn_work(s, not_before_ms))


def discard_blocks(
    s: RunState, out: Outbox, error: ErrorInfo, next_attempt: int, delay_ms: int, **fields: object
) -> None:
    """Publish that the turn's blocks so far are void; ``fields``: additional fields of the event."""
    out.event(
        s.turn,
        s.attempt,
        Restarted if s.visible_emitted else Retrying,
        error=error,
        next_attempt=next_attempt,
        delay_ms=delay_ms,
        drop_from=s.first_block,
        **fields,
    )
    drop_void(s, s.first_block)
    s.visible_emitted = False
    s.first_block = s.blocks.next_number
    s.text = s.text and s.text.again()


def can_continue(s: RunState) -> bool:
    """Whether the next attempt can continue the visible text: supported by provider and model, and by the blocks so
    far.
    """
    return s.target.continues and (s.text is not None or s.blocks.can_continue())


def continue_turn(
    s: RunState,
    out: Outbox,
    error: ErrorInfo,
    delay_ms: int,
    not_before_ms: int,
    *,
    at_ms: int,
    choice: int | None = None,
) -> NextTurn:
    """Continue the turn from its visible text without dropping it; the open text stays open.

    ``choice``: the fallback that continues it, and that later turns stay with; None: the provider that wrote it.
    """
    plan = None if choice is None else s.accepted.fallback[choice - 1]
    answered_by, table, void_from = s.attempt, s.blocks, s.blocks.next_number
    if s.text:
        so_far, seam = partial_text(s.text.reader.text)
        complete_other_blocks(s.text, s.blocks, out, cut=True)
    else:
        table, void_from, parts = s.blocks.going_on(out)
        so_far, seam = partial_message(parts)
    out.event(
        s.turn,
        answered_by,
        Retrying,
        error=error,
        next_attempt=s.attempt + 1,
        delay_ms=delay_ms,
        drop_from=void_from,
        continues=True,
        fallback=plan and ProviderModel(provider=plan.provider, model=plan.model),
    )
    drop_void(s, void_from)
    s.blocks, s.seam = table, seam
    return resume(s, out, so_far, at_ms, not_before_ms, choice=choice)


def resume(
    s: RunState,
    out: Outbox,
    so_far: Message | None,
    at_ms: int,
    not_before_ms: int = 0,
    *,
    choice: int | None = None,
) -> NextTurn:
    """Start another attempt of the turn with the open blocks. The usage of the last attempt counts."""
    publish_usage(s, out, s.usage)
    if choice is not None:
        s.choice = choice
        s.failures = s.losses = 0
    _number_attempt(s, not_before_ms or at_ms)
    s.blocks.attempt = s.attempt
    return NextTurn(turn_work(s, not_before_ms), so_far=so_far)


def complete_other_blocks(text: TurnText, blocks: BlockTable, out: Outbox, *, cut: bool) -> None:
    """Prefill mode: at the end of an attempt, complete the provider's own blocks beside the text."""
    for ordinal in [ordinal for ordinal in blocks.open if ordinal < 0]:
        blocks.complete(ordinal, out, cut=cut)
    text.beside = []


def fresh_table(s: RunState) -> BlockTable:
    """Empty block table for the current attempt; block numbers continue."""
    return BlockTable(
        turn=s.turn, attempt=s.attempt, limit=s.accepted.rules.block_chars, next_number=s.blocks.next_number
    )


def turn_work(s: RunState, not_before_ms: int = 0) -> TurnWork:
    return TurnWork(s.run, s.turn, s.attempt, not_before_ms, choice=s.choice)


def _number_attempt(s: RunState, handed_out_ms: int) -> None:
    s.attempt += 1
    s.handed_out_ms, s.answered_ms, s.visible_ms = handed_out_ms, 0, 0
    s.answered, s.start = s.start or s.answered, None


def begin_attempt(s: RunState, handed_out_ms: int) -> None:
    _number_attempt(s, handed_out_ms)
    s.phase = "streaming"
    count(s)
    s.seam = None
    s.first_block = s.blocks.next_number
    s.blocks = fresh_table(s)
