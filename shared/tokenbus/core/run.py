"""The life of a run, whole in this file: what comes in through `events`, what it changes, what goes out.

::

              Accepted                 Done, calls to run             all results in
    (nothing) ────────> streaming ───────────────────────> tools ─────────────────┐
                        │  ^   ^                             │                     │
       Failed, Cut:     │  └───┘ next attempt of the turn    │                     │
       tried again      │  ^                                 │                     │
                        │  └─────────── next turn ───────────┼─────────────────────┘
                        │ Done, Failed, Cut, CancelAsked     │ CancelAsked
                        v                                    v
                      over: exactly one terminal event, and nothing after it

The rules: events of any attempt but the present one are dropped; a call runs only after its own completion
and a sound finish; results are told in the order of the calls, whatever order they come in, so that a run reads the
same however its tools raced; every time comes from the events. So a replay of the same events ends in the same
state and the same outputs.

In prefill mode the model's text is itself the blocks: `TurnText` reads it, and says what a chat decoder would say. Its
turn may end before the provider's does, or go on in a further attempt where the provider stopped too early.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenbus.core.blocks import MAX_EXTRAS, BlockTable, ToolCall
from tokenbus.core.outbox import Outbox
from tokenbus.core.prefill.turn import TurnText
from tokenbus.core.retry import WORKER_LOST, decide
from tokenbus.errors import TooLarge
from tokenbus.events import normalized as n
from tokenbus.events.failure import ErrorInfo
from tokenbus.events.frames import (
    CONTROL_ATTEMPT,
    Accepted,
    BusEvent,
    CancelAsked,
    EventFrame,
    Noted,
    Rejected,
    ToolReturned,
    ToolWork,
    TurnWork,
)
from tokenbus.events.public import (
    BlockComplete,
    BlockStarted,
    Cancelled,
    Completed,
    ImageRef,
    Incomplete,
    Restarted,
    Retrying,
    RunFailedEvent,
    Started,
    TerminalEvent,
    Timing,
    UsageReported,
)
from tokenbus.events.requests import Message, ToolResultPart
from tokenbus.events.usage import Usage

MAX_PAUSES = 8
"""How often a provider may pause a turn (`pause_turn`) and be asked to go on."""


class PendingCall(msgspec.Struct):
    """A tool call that was handed out, and its result once it came."""

    call: ToolCall
    result: ToolReturned | None = None
    told: bool = False


class NextTurn(msgspec.Struct, frozen=True):
    """Hand out one attempt. ``history``: what the turn just ended appends to the conversation, None for a retry."""

    work: TurnWork
    history: list[Message] | None = None
    so_far: str | None = None
    """Prefill mode: the turn's text that an earlier attempt brought, and that this one goes on from."""


class CloseAttempt(msgspec.Struct, frozen=True):
    """The turn ended in the provider's text before the provider did: it need not go on."""

    turn: int
    attempt: int


class RunTools(msgspec.Struct, frozen=True):
    """Hand out the calls of a turn; each stays open until its result or the run's end."""

    work: list[ToolWork]


class EndRun(msgspec.Struct, frozen=True):
    """The run is over; its attempt may write nothing more."""

    status: Literal["completed", "incomplete", "failed", "cancelled"]


Effect = NextTurn | CloseAttempt | RunTools | EndRun


class RunState(msgspec.Struct):
    """All that is remembered of an open run: plain data, so that msgpack can checkpoint it."""

    run: str
    accepted: Accepted
    accepted_ms: int
    blocks: BlockTable
    turn: int = 0
    attempt: int = 1
    seq: int = 0
    taken: int = 0
    """Events worked in."""
    phase: Literal["streaming", "tools", "over"] = "streaming"
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
    total: Usage | None = None
    """Of the turns that ended."""
    first_byte_ms: int | None = None
    first_visible_ms: int | None = None
    extras: list[dict[str, object]] = []
    text: TurnText | None = None
    """Prefill mode: the present turn's text."""


class Run:
    """One run's state machine. `handle` takes a frame; drafts of public events and effects wait to be collected."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.out = Outbox()
        self.effects: list[Effect] = []

    @classmethod
    def accept(cls, run: str, event: Accepted, at_ms: int) -> Run:
        """A run begins with turn 0, attempt 1, which intake has handed out."""
        blocks = BlockTable(turn=0, attempt=1, limit=event.rules.block_chars, next_number=0)
        self = cls(RunState(run, event, at_ms, blocks))
        if setting := event.reading:
            self.state.text = TurnText.start(run, 0, setting, event.rules.block_chars, setting.inside)
        self.out.event(0, 1, Started, provider=event.provider, model=event.model, metadata=event.metadata)
        return self

    @property
    def over(self) -> bool:
        """Whether the terminal event is out, or among the drafts."""
        return self.state.phase == "over"

    def handle(self, frame: EventFrame) -> None:
        """Work a frame in. What a past attempt still says is dropped, and so is everything after the end."""
        s = self.state
        for event in frame.events:
            if self.over:
                return
            if frame.attempt != CONTROL_ATTEMPT and (frame.attempt != s.attempt or s.phase != "streaming"):
                return
            try:
                self._event(event, frame.at_ms)
            except TooLarge as e:
                self.fail(ErrorInfo(code=e.code, kind="limit", message=str(e), where=e.where), frame.at_ms)
        # Counted as they come in: how many went out depends on what was joined, which a replay does not know.
        s.taken += len(frame.events)
        limit = s.accepted.rules.run_events
        if not self.over and s.taken > limit:
            problem = f"the run has more than {limit} events"
            self.fail(ErrorInfo(code="too_many_events", kind="limit", message=problem), frame.at_ms)

    def fail(self, error: ErrorInfo, at_ms: int | None = None) -> None:
        """The run ends `failed`, whatever it was doing."""
        if not self.over:
            s = self.state
            at_ms = s.accepted_ms if at_ms is None else at_ms
            s.blocks.complete_all(self.out, cut=True)
            self._end(RunFailedEvent, at_ms, finish="error", error=error)

    # --- events ---------------------------------------------------------------------------------------------

    def _event(self, event: BusEvent, at_ms: int) -> None:
        text = self.state.text
        match event:
            case ToolReturned() | Rejected() | Noted() | Accepted():
                self._apply(event, at_ms)
            case _ if text is None:
                self._apply(event, at_ms)
            case n.Done():
                self._text_done(text, event, at_ms)
            case n.Failed() | n.Cut() | CancelAsked():
                self._apply_all(text.reader.release(), at_ms)
                self._apply(event, at_ms)
            case _:
                self._apply_all(text.read(event), at_ms)
                if text.reader.over:
                    self._done(n.Done("stop"), at_ms)
                    if self.state.phase == "tools":
                        self.effects.append(CloseAttempt(self.state.turn, self.state.attempt))

    def _apply_all(self, events: list[n.Normalized], at_ms: int) -> None:
        for event in events:
            self._apply(event, at_ms)

    def _apply(self, event: BusEvent, at_ms: int) -> None:
        s = self.state
        match event:
            case n.TextDelta() | n.RefusalDelta():
                self._heard(at_ms)
                s.blocks.write(event.block, event.text, self.out)
            case n.ThinkingDelta():
                s.blocks.write(event.block, event.text, self.out)
            case n.ToolCallDelta():
                s.blocks.write(event.block, event.fragment, self.out)
            case n.BlockStart():
                s.blocks.start(event.block, event.kind, self.out)
            case n.ToolCallStart():
                s.blocks.start(event.block, "tool_call", self.out, event.tool_id, event.name)
            case n.BlockStop():
                s.blocks.complete(event.block, self.out)
            case n.ToolCallDone():
                s.blocks.complete(event.block, self.out, problem=event.problem)
            case n.Opaque():
                s.blocks.keep(event.block, event.name, event.value)
            case n.Image():
                self._image(event)
            case n.Extra():
                self._extra(event)
            case n.Start():
                if s.first_byte_ms is None:
                    s.first_byte_ms = at_ms - s.accepted_ms
                if event.void_before:
                    self._began_again(at_ms)
            case n.UsageSeen():
                s.usage = event.usage
            case n.Done():
                self._done(event, at_ms)
            case n.Failed():
                self._broke(event.error, at_ms, cut=None)
            case n.Cut():
                error = event.error or ErrorInfo(
                    code="stream_cut", kind="network", message=event.reason, retryable=True
                )
                self._broke(error, at_ms, cut=event.reason)
            case ToolReturned():
                self._returned(event)
            case CancelAsked():
                self._cancelled(event, at_ms)
            case Rejected():
                self.fail(event.error, at_ms)
            case Noted():
                note: dict[str, object] = {"note": event.text}
                if note not in s.extras:  # every attempt says again what its request had to mend
                    self._remember(note)
            case Accepted():
                pass  # a run is accepted once; intake's script sees to it

    def _heard(self, at_ms: int) -> None:
        s = self.state
        s.heard = True
        if s.first_visible_ms is None:
            s.first_visible_ms = at_ms - s.accepted_ms

    def _image(self, event: n.Image) -> None:
        s = self.state
        if event.final and (block := s.blocks.open.get(event.block)):
            if len(event.base64) > s.accepted.rules.block_chars:
                raise TooLarge(f"block {block.number}", len(event.base64), s.accepted.rules.block_chars)
            block.image = ImageRef(
                media_type=event.media_type, base64=event.base64, revised_prompt=event.revised_prompt or None
            )

    def _extra(self, event: n.Extra) -> None:
        if event.ordinal >= 0:
            self.state.blocks.keep_item(event.ordinal, event.name, event.json)
        shown: dict[str, object] = {"name": event.name, "json": event.json}
        if event.block is None or not self.state.blocks.note(event.block, shown):
            self._remember(shown)

    def _remember(self, extra: dict[str, object]) -> None:
        if len(self.state.extras) < MAX_EXTRAS:
            self.state.extras.append(extra)

    # --- the end of an attempt --------------------------------------------------------------------------------

    def _done(self, event: n.Done, at_ms: int) -> None:
        s = self.state
        s.blocks.complete_all(self.out, cut=False)
        self._settle(event.usage or s.usage)
        if event.finish == "error":
            problem = f"the provider ended the turn with {event.finish_raw or 'an error'}"
            error = ErrorInfo(code="finish_error", kind="server", message=problem, raw=event.finish_raw or None)
            self._end(RunFailedEvent, at_ms, finish="error", finish_raw=event.finish_raw or None, error=error)
            return
        if event.finish == "pause" and s.pauses < MAX_PAUSES:
            s.pauses += 1
            self._next_turn([self._said()])
            return
        finish = event.finish
        if s.blocks.calls and finish in ("stop", "tool_use"):
            if s.tool_turns < s.accepted.max_tool_depth:
                self._call_tools()
                return
            finish = "tool_use"  # a result that no model would see is not worth a call
        self._end(Completed, at_ms, finish=finish, finish_raw=event.finish_raw or None)

    def _text_done(self, text: TurnText, event: n.Done, at_ms: int) -> None:
        """The provider is done. Where it stopped on a string that does not count there, it is asked to go on."""
        if event.finish == "stop" and text.reader.knows(event.stop_string):
            self._apply_all(text.put_back(event.stop_string), at_ms)
            if not text.reader.over and text.resumes():
                self._resume(text, event.usage)
                return
        self._apply_all(text.reader.end(), at_ms)
        self._done(event, at_ms)

    def _resume(self, text: TurnText, usage: Usage | None) -> None:
        """A further attempt of the turn, from where its text stands. Blocks of the text that are open stay open."""
        s = self.state
        for ordinal in [ordinal for ordinal in s.blocks.open if ordinal < 0]:
            s.blocks.complete(ordinal, self.out)
        text.beside = []
        self._settle(usage or s.usage)
        s.attempt += 1
        s.blocks.attempt = s.attempt
        self.effects.append(NextTurn(TurnWork(s.run, s.turn, s.attempt), so_far=text.reader.text))

    def _broke(self, error: ErrorInfo, at_ms: int, cut: str | None) -> None:
        """The attempt failed, or was cut: the next attempt, or the end."""
        s = self.state
        s.blocks.complete_all(self.out, cut=True)
        if error.code == WORKER_LOST:
            s.losses += 1
        else:
            s.failures += 1
        delay_ms = decide(
            error,
            policy=s.accepted.on_failure,
            heard=s.heard,
            failures=s.failures,
            losses=s.losses,
            rules=s.accepted.rules,
            salt=s.run,
        )
        if delay_ms is None:
            if cut is None:
                self._end(RunFailedEvent, at_ms, finish="error", error=error)
            else:
                self._end(Incomplete, at_ms, finish="unknown", reason=cut, error=error)
            return
        self._void(error, s.attempt + 1, delay_ms)
        self._attempt()
        self.effects.append(NextTurn(TurnWork(s.run, s.turn, s.attempt, at_ms + delay_ms if delay_ms else 0)))

    def _began_again(self, at_ms: int) -> None:
        """The provider voided what it had said so far and began its message anew, within the attempt."""
        s = self.state
        s.blocks.complete_all(self.out, cut=True)
        reason = "the provider began its message again"
        error = ErrorInfo(code="message_restarted", kind="protocol", message=reason, retryable=True)
        if s.heard and s.accepted.on_failure != "restart":
            self._end(Incomplete, at_ms, finish="unknown", reason=reason, error=error)
            return
        self._void(error, s.attempt, 0)
        s.blocks = self._table()

    def _void(self, error: ErrorInfo, next_attempt: int, delay_ms: int) -> None:
        """Tell that the turn's blocks so far do not count."""
        s = self.state
        self.out.event(
            s.turn,
            s.attempt,
            Restarted if s.heard else Retrying,
            error=error,
            next_attempt=next_attempt,
            delay_ms=delay_ms,
            drop_from=s.first_block,
        )
        s.heard = False
        s.first_block = s.blocks.next_number
        s.text = s.text and s.text.again()

    def _settle(self, usage: Usage | None) -> None:
        """Tell the turn's usage, and add it to the run's."""
        s = self.state
        s.usage = None
        if usage:
            s.total = s.total.plus(usage) if s.total else msgspec.structs.replace(usage, raw=None)
            self.out.event(s.turn, s.attempt, UsageReported, usage=usage, total=s.total)

    def _end(self, event: type[TerminalEvent], at_ms: int, **fields: object) -> None:
        s = self.state
        total = s.total
        if s.usage:  # of an attempt that did not finish
            total = total.plus(s.usage) if total else msgspec.structs.replace(s.usage, raw=None)
        timing = Timing(
            first_byte_ms=s.first_byte_ms, first_visible_ms=s.first_visible_ms, total_ms=max(0, at_ms - s.accepted_ms)
        )
        self.out.event(s.turn, s.attempt, event, timing=timing, usage=total, provider_extra=s.extras or None, **fields)
        s.phase = "over"
        status: dict[type[TerminalEvent], Literal["completed", "incomplete", "failed", "cancelled"]] = {
            Completed: "completed",
            Incomplete: "incomplete",
            RunFailedEvent: "failed",
            Cancelled: "cancelled",
        }
        self.effects.append(EndRun(status[event]))

    # --- turns and tools --------------------------------------------------------------------------------------

    def _attempt(self) -> None:
        s = self.state
        s.attempt += 1
        s.phase = "streaming"
        s.usage = None
        s.first_block = s.blocks.next_number
        s.blocks = self._table()

    def _table(self) -> BlockTable:
        s = self.state
        return BlockTable(
            turn=s.turn, attempt=s.attempt, limit=s.accepted.rules.block_chars, next_number=s.blocks.next_number
        )

    def _next_turn(self, history: list[Message]) -> None:
        s = self.state
        s.turn += 1
        s.heard = False
        s.failures = s.losses = 0
        s.calls, s.history = [], []
        s.text = s.text and s.text.following()
        self._attempt()
        self.effects.append(NextTurn(TurnWork(s.run, s.turn, s.attempt), history))

    def _call_tools(self) -> None:
        """Hand the calls out, but for malformed ones and those to unlisted tools: they have their answer."""
        s = self.state
        s.phase = "tools"
        s.tool_turns += 1
        s.calls = [PendingCall(call, self._refused(call)) for call in s.blocks.calls]
        s.history = [self._said()]
        timeout_s = s.accepted.tool_timeout_s
        work = [
            ToolWork(s.run, s.turn, s.attempt, c.block, c.tool_id, c.name, c.arguments, timeout_s)
            for c in (p.call for p in s.calls if p.result is None)
        ]
        if work:
            self.effects.append(RunTools(work))
        self._tell_results()

    def _said(self) -> Message:
        """The turn as the next one sends it back; in prefill mode that is the model's own text, verbatim."""
        s = self.state
        return Message(role="assistant", content=s.text.reader.text if s.text else s.blocks.message_parts())

    def _refused(self, call: ToolCall) -> ToolReturned | None:
        if call.problem:
            return ToolReturned(call.block, call.problem, is_error=True)
        if call.name in self.state.accepted.tools:
            return None
        return ToolReturned(call.block, f"there is no tool {call.name!r} here", is_error=True)

    def _returned(self, event: ToolReturned) -> None:
        if self.state.phase != "tools":
            return
        for pending in self.state.calls:
            if pending.call.block == event.block and pending.result is None:
                pending.result = event
        self._tell_results()

    def _tell_results(self) -> None:
        """Tell the results that are due, in the order of the calls; after the last one the next turn begins."""
        s = self.state
        for pending in s.calls:
            if pending.result is None:
                return
            if not pending.told:
                self._tell(pending.call, pending.result)
                pending.told = True
        results = [
            ToolResultPart(
                tool_id=p.call.tool_id, tool_name=p.call.name, content=p.result.content, is_error=p.result.is_error
            )
            for p in s.calls
            if p.result
        ]
        self._next_turn([*s.history, Message(role="tool", content=list(results))])

    def _tell(self, call: ToolCall, result: ToolReturned) -> None:
        s = self.state
        block = s.blocks.next_number
        s.blocks.next_number += 1
        about = {"block": block, "kind": "tool_result", "tool_id": call.tool_id, "tool_name": call.name}
        self.out.event(s.turn, s.attempt, BlockStarted, **about)
        if result.content:
            self.out.chunk(
                s.turn, s.attempt, block, "tool_result", result.content, tool_id=call.tool_id, tool_name=call.name
            )
        self.out.event(
            s.turn,
            s.attempt,
            BlockComplete,
            **about,
            content=result.content,
            is_error=result.is_error or None,
            blob_id=result.blob_id,
        )

    def _cancelled(self, event: CancelAsked, at_ms: int) -> None:
        """Open blocks end as they are; every call without a result gets a cancelled one, so that none stays open."""
        s = self.state
        s.blocks.complete_all(self.out, cut=True)
        calls = s.calls if s.phase == "tools" else [PendingCall(c) for c in [*s.blocks.calls, *s.blocks.cut_calls]]
        for pending in calls:
            if not pending.told:
                stopped = ToolReturned(pending.call.block, "cancelled", is_error=True)
                self._tell(pending.call, pending.result or stopped)
        self._end(Cancelled, at_ms, finish="unknown", reason=event.reason, heard_through=event.heard_through)
