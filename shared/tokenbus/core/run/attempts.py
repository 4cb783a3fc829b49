"""After an attempt: its report, and the decision to retry, to continue or to fall back to another model."""

from __future__ import annotations

from typing import Literal
from zlib import crc32

import msgspec

from tokenbus.core.prefill.turn import TurnText
from tokenbus.core.run.blocks.block_table import BlockTable
from tokenbus.core.run.continuation import partial_message, partial_text
from tokenbus.core.run.effects import NextTurn
from tokenbus.core.run.outbox import Outbox
from tokenbus.core.run.provider_extra import drop_void
from tokenbus.core.run.state import RunState
from tokenbus.core.run.termination import count, publish_usage
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import RunLimits, TurnWork
from tokenbus.events.public import ProviderModel, Restarted, Retrying
from tokenbus.events.requests import Message, OnFailure, TextPart
from tokenbus.events.usage import Usage

STEERED = ErrorInfo(code="steered", kind="internal", message="a message of the session steers the run")
"""Not an error: why the turn's call ended and another one follows."""
_STEERABLE = ("text", "thinking", "server_tool")
"""Blocks that a turn may have which ends before its provider ended it."""


def next_turn(s: RunState, history: list[Message], at_ms: int, *, steered: bool = False) -> NextTurn:
    """Start the next turn. ``history``: messages that the last turn appends to the conversation. ``steered``: messages
    of its session that wait go in.
    """
    s.turn += 1
    s.visible_emitted = False
    s.failures = s.losses = s.turn_bytes = 0
    s.calls, s.history = [], []
    s.text = s.text and s.text.following()
    begin_attempt(s, at_ms)
    # In prefill mode all is one text.
    return handed_out(s, history=history, steered=steered and s.text is None)


def may_steer(s: RunState) -> bool:
    """Whether the turn can be steered before its end. Calls of tools that have begun get their results first."""
    return s.text is None and not any(kind not in _STEERABLE for _, kind in s.blocks.begun.values())


def provider_steers(s: RunState) -> bool:
    """Whether the provider can take the messages into its present call: it keeps what it said, so nothing that policies
    or stop strings change may go on from there.
    """
    return s.start is not None and s.start.steers and s.scan is None and not s.accepted.policy_plan


def steer_turn(s: RunState, out: Outbox, at_ms: int) -> NextTurn:
    """End the turn's present call, and ask again with the messages that steer: the answer continues its text if
    provider and model can do that, else another turn follows it.
    """
    if not s.visible_emitted:
        work = restart_turn(s, out, STEERED, 0, 0, at_ms=at_ms)
    elif can_continue(s):
        work = continue_turn(s, out, STEERED, 0, 0, at_ms=at_ms)
    else:
        parts = dict(s.blocks.parts)
        parts |= {n: TextPart(text="".join(b.pieces)) for n, b in s.blocks.open.items() if b.kind == "text"}
        said, _ = partial_message([parts[ordinal] for ordinal in sorted(parts)])
        s.blocks.complete_all(out, cut=True)
        publish_usage(s, out, s.usage)
        work = next_turn(s, [said] if said else [], at_ms)
    return msgspec.structs.replace(work, steered=True)


def restart_turn(
    s: RunState, out: Outbox, error: ErrorInfo, delay_ms: int, not_before_ms: int, *, at_ms: int
) -> NextTurn:
    """Restart the turn; its output so far is void."""
    s.blocks.complete_all(out, cut=True)
    discard_blocks(s, out, error, s.attempt + 1, delay_ms)
    begin_attempt(s, not_before_ms or at_ms)
    return handed_out(s, not_before_ms)


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
    return handed_out(s, not_before_ms, so_far=so_far)


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


def handed_out(
    s: RunState,
    not_before_ms: int = 0,
    *,
    history: list[Message] | None = None,
    so_far: Message | None = None,
    steered: bool = False,
) -> NextTurn:
    """Hand out the attempt that began. It has the messages that the provider was to take into the one before."""
    work = TurnWork(s.run, s.turn, s.attempt, not_before_ms, choice=s.choice)
    return NextTurn(work, history, so_far, steered=steered or s.steered_attempt == s.attempt - 1 > 0)


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
    return handed_out(s)


AttemptOutcome = Literal["ok", "error", "lost", "cancelled", "stopped"]
"""`lost`: its worker was lost. `cancelled`: a client cancelled the run. `stopped`: the run ended for another reason."""


class AttemptReport(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt that is over. Times are Unix milliseconds; 0: that point was never reached, or is unknown."""

    turn: int
    attempt: int
    provider: str
    model: str
    """As requested."""
    outcome: AttemptOutcome
    finish: str = ""
    error: ErrorInfo | None = None
    usage: Usage | None = None
    handed_out_ms: int
    """When the attempt could begin: after the delay of a retry."""
    called_ms: int = 0
    """When its provider was called."""
    answered_ms: int = 0
    """When the provider's answer began."""
    visible_ms: int = 0
    """Time of the turn's first visible text, if this attempt produced it."""
    ended_ms: int
    answered_model: str = ""
    """The model, as the provider names it."""
    response_id: str = ""
    request_id: str = ""
    """The provider's id of the call."""

    @property
    def began_ms(self) -> int:
        """When the call began, as far as that is known."""
        return self.called_ms or self.handed_out_ms

    @property
    def result(self) -> str:
        """The outcome in one word: for an error its class."""
        return self.error.kind if self.outcome == "error" and self.error else self.outcome


def report_attempt(
    s: RunState,
    at_ms: int,
    *,
    outcome: AttemptOutcome | None = None,
    finish: str = "",
    error: ErrorInfo | None = None,
    usage: Usage | None = None,
    called_ms: int = 0,
) -> AttemptReport | None:
    """Report the current attempt; None if it was reported before, or if the run never had one.

    ``outcome``: None for that of the error.
    """
    target = s.target
    if s.reported_attempt >= s.attempt or not target.provider:
        return None
    s.reported_attempt = s.attempt
    if outcome is None:
        outcome = "ok" if error is None else "lost" if error.code == WORKER_LOST else "error"
    start = s.start
    return AttemptReport(
        turn=s.turn,
        attempt=s.attempt,
        provider=target.provider,
        model=target.model,
        outcome=outcome,
        finish=finish,
        error=error,
        usage=usage or s.usage,
        handed_out_ms=s.handed_out_ms or s.accepted_ms,
        called_ms=called_ms or (start.called_ms if start else 0),
        answered_ms=s.answered_ms,
        visible_ms=s.visible_ms,
        ended_ms=at_ms,
        answered_model=start.model if start else "",
        response_id=start.provider_id if start else "",
        request_id=(error and error.request_id) or (start.request_id if start else ""),
    )


WORKER_LOST = "worker_lost"
"""Error code of an attempt whose worker died, froze or shut down."""
PROMPT_LOSSES = 2
"""So many lost attempts of a turn are retried at once: workers are replaced one after the other. Later ones are delayed
as after an error: if the turn itself kills its workers, others must be able to finish their runs in between.
"""


def decide(
    error: ErrorInfo,
    *,
    policy: OnFailure,
    visible_emitted: bool,
    failures: int,
    losses: int,
    rules: RunLimits,
    salt: str,
) -> int | None:
    """Delay in ms before the turn is retried; None: the run ends.

    ``visible_emitted``: visible output of this turn has left the bus, and the next attempt cannot continue it.
    ``failures`` and ``losses`` count this turn's attempts so far, including this one. ``salt`` spreads the delays of
    runs that failed together. A provider's Retry-After is the minimum delay. If it exceeds the maximum delay, the run
    ends, because such a wait would look like a hang.
    """
    if policy == "fail" or not error.retryable or (visible_emitted and policy != "restart"):
        return None
    if error.code == WORKER_LOST:
        if losses > rules.max_losses:
            return None
        return _backoff_ms(losses - PROMPT_LOSSES, rules, salt) if losses > PROMPT_LOSSES else 0
    if failures >= rules.max_attempts:
        return None
    asked_ms = round((error.retry_after_s or 0) * 1000)
    if asked_ms > rules.max_delay_ms:
        return None
    return max(asked_ms, _backoff_ms(failures, rules, salt))


def _backoff_ms(tries: int, rules: RunLimits, salt: str) -> int:
    ceiling = min(rules.base_delay_ms * 2 ** min(tries - 1, 20), rules.max_delay_ms)
    # Half fixed, half random: "equal jitter" (AWS, Exponential Backoff And Jitter), from a hash so that replays agree.
    spread = crc32(f"{salt}:{tries}".encode()) % (ceiling // 2 + 1)
    return ceiling // 2 + spread


def fallback_may_succeed(error: ErrorInfo) -> bool:
    """Whether another provider may succeed after this error: not for faults of the bus itself, nor for unloadable
    media.
    """
    return error.kind not in ("internal", "tool") and not error.code.startswith("blob_")
