"""State machine of a run: applies the frames of `events` to the state and produces public events and effects.

::

              Accepted                 Done, calls to run             all results in
    (nothing) ────────> streaming ───────────────────────> tools ─────────────────┐
                        │  ^   ^                             │                     │
       Failed, Cut:     │  └───┘ next attempt of the turn    │                     │
       retried          │  ^                                 │                     │
                        │  └─────────── next turn ───────────┼─────────────────────┘
                        │ Done, Failed, Cut, and ...         │ CancelRequested, DeadlinePassed
                        v                                    v
                      over: exactly one terminal event, and nothing after it

This module decides every step. The steps are in their own modules: `block_deltas` (a provider's events), `tool_calls`,
`next_attempt` (restart, continue, next turn) and `termination`. The data is in `state` and `effects`.

Rules:

- Events of any attempt but the current one are dropped.
- A call runs only if the call is complete and the attempt finished cleanly.
- Results are published in the order of the calls, so that the output does not depend on how the tools race.
- All times come from the events, so a replay of the same events produces the same state and the same outputs.

If the run has policies, its output is drafts, and a `GatedRun` around it decides what is released (`gated`). The phase
`judged` is then between the end of a turn and its tools.

In prefill mode the model's text contains the blocks: `TurnText` parses it into the events of a chat decoder. The turn
may end before the provider's answer does, or continue in another attempt if the provider stopped too early. In chat
mode a turn may end early too, on a stop string that `StopScan` finds.
"""

from __future__ import annotations

import msgspec

from tokenbus.core.prefill.turn import TurnText
from tokenbus.core.run.attempts import (
    WORKER_LOST,
    AttemptReport,
    can_continue,
    complete_other_blocks,
    continue_turn,
    decide,
    discard_blocks,
    fall_back,
    fresh_table,
    may_fall_back,
    may_steer,
    next_speaker,
    next_turn,
    provider_steers,
    report_attempt,
    restart_turn,
    resume,
    steer_turn,
)
from tokenbus.core.run.block_deltas import add
from tokenbus.core.run.blocks.block_table import BlockTable
from tokenbus.core.run.effects import (
    CloseAttempt,
    Effect,
    EndWait,
    ForgetRun,
    GiveAnswer,
    MoveDeadline,
    RunTools,
    SteerCall,
    Wait,
)
from tokenbus.core.run.gate import ToolVerdicts
from tokenbus.core.run.outbox import Outbox
from tokenbus.core.run.state import RunState
from tokenbus.core.run.termination import (
    DEADLINE,
    cancelled_by,
    close_blocks,
    count_bytes,
    deadline_passed,
    end,
    publish_start,
    publish_usage,
    stop,
    workers_gone,
)
from tokenbus.core.run.tool_calls import (
    accept_result,
    dispatch_calls,
    hand_out,
    history_of,
    may_call,
    publish_progress,
    publish_results,
)
from tokenbus.core.run.waits import ask, end_held, waits_only
from tokenbus.core.run.waits import decide as decide_wait
from tokenbus.core.stop_strings import StopScan
from tokenbus.errors import TooLarge
from tokenbus.events import normalized as n
from tokenbus.events.child_runs import parent_call
from tokenbus.events.error_info import ErrorInfo, stream_cut
from tokenbus.events.frames import (
    CONTROL_ATTEMPT,
    HAS_ENDED,
    Accepted,
    BusEvent,
    CancelRequested,
    DeadlinePassed,
    EventFrame,
    Noted,
    PolicyVerdicts,
    PutAway,
    PutBack,
    Rejected,
    SteerRequested,
    Stored,
    ToolAsked,
    ToolReported,
    ToolReturned,
    ToolWork,
    WaitDecided,
    is_known,
)
from tokenbus.events.public import (
    Cancelled,
    Completed,
    Incomplete,
    ProviderModel,
    RunFailedEvent,
    Started,
    TerminalEvent,
)
from tokenbus.events.requests import ContentPart, ExtraPart, Message
from tokenbus.events.usage import Usage
from tokenbus.events.waits import WaitInfo

MAX_PAUSES = 8
"""Maximum number of times a provider may pause a turn (`pause_turn`) and be asked to continue."""
CANNOT_GO_ON = "on_failure is `continue`, but this provider and model cannot continue the text that was published"
"""Note at the end of a run that ended as by default because it could not be continued."""


class RunMachine:
    """One run's state machine. `handle` applies a frame; drafts of public events and effects accumulate for
    collection.
    """

    def __init__(self, state: RunState) -> None:
        self.state = state
        # The drafts of a run under policies are msgpack.
        accepted = state.accepted
        only_json = not accepted.policy_plan
        self.out = Outbox(
            visible=accepted.visible, commentary=accepted.commentary, session=accepted.session, only_json=only_json
        )
        self.effects: list[Effect] = []
        self.reports: list[AttemptReport] = []
        """Of the attempts that ended since they were last collected."""
        self._now_ms = state.accepted_ms
        """Time of the current frame. Between frames it is the time of acceptance, because a replay knows no other."""

    @classmethod
    def accept(cls, run: str, event: Accepted, at_ms: int) -> RunMachine:
        """Start a run with turn 0, attempt 1, which intake has handed out."""
        if event.deadline_after_ms:
            event = msgspec.structs.replace(event, deadline_ms=at_ms + event.deadline_after_ms, deadline_after_ms=0)
        blocks = BlockTable(turn=0, attempt=1, limit=event.rules.block_chars, next_number=0)
        self = cls(RunState(run, event, at_ms, blocks))
        if setting := event.reading:
            self.state.text = TurnText.start(run, 0, setting, event.rules.block_chars, setting.inside)
        elif event.stops:
            self.state.scan = StopScan(event.stops)
        fallback = [ProviderModel(provider=plan.provider, model=plan.model) for plan in event.fallback]
        self.out.event(
            *(0, 1, Started),
            provider=event.provider,
            model=event.model,
            metadata=event.metadata,
            fallback=fallback or None,
            notes=list(event.notes) or None,
            participant=event.participant,
            parent=above[0] if (above := parent_call(run)) else None,
        )
        return self

    @property
    def over(self) -> bool:
        """Whether the terminal event was emitted or is among the drafts."""
        return self.state.phase == "over"

    def handle(self, frame: EventFrame, size: int = 0) -> None:
        """Apply a frame of ``size`` bytes. Events of past attempts and events after the end are dropped."""
        self._now_ms = frame.at_ms
        try:
            self._handle(frame, size)
        finally:
            self._now_ms = self.state.accepted_ms

    def fail(self, error: ErrorInfo) -> None:
        """End the run as `failed` in any phase."""
        if not self.over:
            s = self.state
            s.blocks.complete_all(self.out, cut=True)
            self._end(RunFailedEvent, finish="error", error=error)

    def abandon(self, error: ErrorInfo) -> None:
        """End the run as `incomplete` in any phase, because it cannot continue."""
        if not self.over:
            self.state.blocks.complete_all(self.out, cut=True)
            self._end(Incomplete, finish="unknown", reason=error.message, error=error)

    # --- events ---------------------------------------------------------------------------------------------

    def _handle(self, frame: EventFrame, size: int) -> None:
        s = self.state
        if error := count_bytes(s, frame, size):
            self.fail(error)
        for event in frame.events:
            if self.over:
                return
            if frame.attempt != CONTROL_ATTEMPT and (frame.attempt != s.attempt or s.phase != "streaming"):
                return
            if not is_known(event):
                continue
            try:
                self._event(event)
            except TooLarge as e:
                error = ErrorInfo(code=e.code, kind="limit", message=str(e), where=e.where)
                if e.why:  # a store that is back would take it
                    error = ErrorInfo(
                        code="image_not_stored", kind="internal", message=str(e), where=e.where, retryable=True
                    )
                self.fail(error)
        self._count_wait()
        # Count input events: the number of output events depends on chunk joining, which a replay cannot reproduce.
        s.events_applied += len(frame.events)
        s.seen_ms = max(s.seen_ms, self._now_ms)
        limit = s.accepted.rules.run_events
        if not self.over and s.events_applied > limit:
            problem = f"the run has more than {limit} events"
            self.fail(ErrorInfo(code="too_many_events", kind="limit", message=problem))

    def _event(self, event: BusEvent) -> None:
        match event:
            case n.TextDelta() | n.RefusalDelta():
                self._text(event)
            case ToolReturned():
                self._returned(event)
            case ToolReported():
                publish_progress(self.state, self.out, event)
            case ToolAsked():
                if info := ask(self.state, self.out, event, self._now_ms):
                    self.effects.append(Wait(info))
            case WaitDecided():
                self._decided(event)
            case CancelRequested():
                stop(self.state, self.out, "cancelled", self._now_ms)
                self._end(Cancelled, **cancelled_by(event))
            case SteerRequested():
                self._steered()
            case DeadlinePassed():
                self._overdue(event)
            case Rejected():
                self.fail(event.error)
            case Noted():
                note: dict[str, object] = {"note": event.text}
                if not self.state.extras.has(note):  # every attempt repeats the notes on its request
                    self.state.extras.add(note)
            case Accepted() | PolicyVerdicts() | Stored() | PutAway() | PutBack():
                pass  # intake's script accepts a run only once; `GatedRun`, `SealedRun` and the parser handle others
            case n.Failed():
                self._broke(event.error, cut=None, called_ms=event.called_ms)
            case n.Cut():
                self._broke(event.error or stream_cut(event.reason), cut=event.reason, called_ms=event.called_ms)
            case _:
                self._provider_details(event)

    def _text(self, event: n.TextDelta | n.RefusalDelta) -> None:
        """Process text; if the attempt continues another, only the part that is new."""
        if seam := self.state.seam:
            event = msgspec.structs.replace(event, text=seam.join(event.text))
            if seam.closed:
                self.state.seam = None
        if event.text:
            self._provider_details(event)

    def _provider_details(self, event: n.Normalized) -> None:
        text, scan = self.state.text, self.state.scan
        if text and isinstance(event, n.Done):
            self._text_done(text, event)
        elif text:
            self._read(text.read(event))
            if text.reader.over:
                self._stopped(text.reader.stopped_on)
        elif scan:
            meant, found = scan.read(event)
            self._read(meant)
            if found:
                self._stopped(found)
        else:
            self._apply(event)

    def _stopped(self, string: str) -> None:
        """End the turn early: the text reached a stop string or its own end before the provider's answer ended."""
        self._done(n.Done("stop", stop_string=string))
        if self.state.phase in ("judged", "tools"):
            self.effects.append(CloseAttempt(self.state.turn, self.state.attempt))

    def _apply(self, event: n.Normalized) -> None:
        s = self.state
        match event:
            case n.Start():
                if s.first_byte_ms is None:
                    s.first_byte_ms = self._now_ms - s.accepted_ms
                s.start = event
                s.answered_ms = s.answered_ms or self._now_ms
                if event.void_before:
                    self._restarted()
                origin = {"api": event.api, "provider": event.provider}
                s.blocks.origin = {name: data for name, data in origin.items() if data}
                if s.phase == "streaming":  # a message that began again may have ended the run
                    publish_start(s, self.out)
            case n.Done():
                self._done(event)
            case _:
                add(s, self.out, event, self._now_ms)

    # --- the end of an attempt --------------------------------------------------------------------------------

    def _done(self, event: n.Done) -> None:
        s = self.state
        s.blocks.complete_all(self.out, cut=False)
        error = None
        if event.finish == "error":
            problem = f"the provider ended the turn with {event.finish_raw or 'an error'}"
            raw = event.finish_raw or None
            error = ErrorInfo(code="finish_error", kind="server", message=problem, raw=raw, retryable=True)
        self._report(error, finish=event.finish, usage=event.usage)
        publish_usage(s, self.out, event.usage or s.usage)
        if error:
            if self._falls_back(error):
                return
            self._end(RunFailedEvent, finish="error", finish_raw=event.finish_raw or None, error=error)
            return
        steered = s.steered_attempt == s.attempt
        if event.finish == "pause" and (steered or s.pauses < MAX_PAUSES):
            s.pauses += not steered
            self.effects.append(next_turn(s, [self._content()], self._now_ms))
            return
        finish = event.finish
        if (s.blocks.calls or s.blocks.asked) and finish in ("stop", "tool_use"):
            if may_call(s):
                if s.accepted.policy_plan:
                    s.phase = "judged"  # `GatedRun` continues from here
                else:
                    self.call_tools(self._now_ms)
                return
            # Do not run a call whose result no model would see.
            finish = "tool_use" if s.blocks.calls else "requires_action"
        stopped_on = event.stop_string if finish == "stop" else ""
        self._end(Completed, finish=finish, finish_raw=event.finish_raw or None, stop_string=stopped_on or None)

    def _text_done(self, text: TurnText, event: n.Done) -> None:
        """Handle the provider's `Done`. If it stopped on a string that does not count at that place, resume the
        turn.
        """
        s = self.state
        if event.finish == "stop" and text.reader.knows(event.stop_string):
            self._read(text.put_back(event.stop_string))
            if not text.reader.over and text.resumes():
                s.usage = event.usage or s.usage
                self._report(None, finish=event.finish)
                complete_other_blocks(text, s.blocks, self.out, cut=False)
                so_far = Message(role="assistant", content=text.reader.text)
                self.effects.append(resume(s, self.out, so_far, self._now_ms))
                return
            event = msgspec.structs.replace(event, stop_string=text.reader.stopped_on)
        self._read(text.reader.end())
        self._done(event)

    def _read(self, meant: list[n.Normalized]) -> None:
        for event in meant:
            self._apply(event)

    def _broke(self, error: ErrorInfo, cut: str | None, called_ms: int = 0) -> None:
        """Handle a failed or cut attempt: start the next attempt or end the run."""
        s = self.state
        self._report(error, called_ms=called_ms)
        if error.code == DEADLINE or 0 < s.accepted.deadline_ms <= self._now_ms:
            self._overdue(DeadlinePassed("deadline"), error.request_id)
            return
        if error.code == WORKER_LOST:
            s.losses += 1
        else:
            s.failures += 1
        if s.scan:
            self._read(s.scan.release())
        wanted = s.visible_emitted and s.accepted.on_failure == "continue"
        goes_on = wanted and can_continue(s)
        delay_ms = decide(
            error,
            policy=s.accepted.on_failure,
            visible_emitted=s.visible_emitted and not goes_on,
            failures=s.failures,
            losses=s.losses,
            rules=s.accepted.rules,
            salt=s.run,
        )
        if delay_ms is not None:
            not_before_ms = self._now_ms + delay_ms if delay_ms else 0
            s.seen_ms = max(s.seen_ms, not_before_ms)
            next_attempt = continue_turn if goes_on else restart_turn
            self.effects.append(next_attempt(s, self.out, error, delay_ms, not_before_ms, at_ms=self._now_ms))
            return
        if self._falls_back(error) or self._passes_on(error):
            return
        close_blocks(s, self.out, self._now_ms)
        if wanted and not goes_on and error.retryable:
            s.extras.add({"note": CANNOT_GO_ON})
        if cut is None:
            self._end(RunFailedEvent, finish="error", error=error)
        else:
            self._end(Incomplete, finish="unknown", reason=cut, error=error)

    def _steered(self) -> None:
        """Let messages of the session into the turn that is streaming. In other phases they go into the next one."""
        s = self.state
        if s.phase != "streaming" or not may_steer(s):
            return
        if provider_steers(s):
            s.steered_attempt = s.attempt
            self.effects.append(SteerCall(s.attempt))
            return
        if s.scan:
            self._read(s.scan.release())
        if report := report_attempt(s, self._now_ms, outcome="stopped"):
            self.reports.append(report)
        self.effects.append(steer_turn(s, self.out, self._now_ms))

    def _falls_back(self, error: ErrorInfo) -> bool:
        """Fall back to the next provider and model, if that may be done; whether it was."""
        s = self.state
        if not may_fall_back(s, error):
            return False
        self.effects.append(fall_back(s, self.out, error, self._now_ms))
        return True

    def _passes_on(self, error: ErrorInfo) -> bool:
        """Let the next fallback that can do it continue the visible text; whether there was one."""
        s = self.state
        if (choice := next_speaker(s, error)) is None:
            return False
        if s.text:
            self._read(s.text.read_as(s.accepted.fallback[choice - 1].reading))
        self.effects.append(continue_turn(s, self.out, error, 0, 0, at_ms=self._now_ms, choice=choice))
        return True

    def _restarted(self) -> None:
        """Handle a provider that voided its output and restarted its message within the attempt."""
        s = self.state
        reason = "the provider began its message again"
        error = ErrorInfo(code="message_restarted", kind="protocol", message=reason, retryable=True)
        if s.visible_emitted and s.accepted.on_failure != "restart":
            self._broke(error, cut=reason)
            return
        s.blocks.complete_all(self.out, cut=True)
        discard_blocks(s, self.out, error, s.attempt, 0)
        s.blocks = fresh_table(s)

    # --- the end of the run -----------------------------------------------------------------------------------

    def _overdue(self, event: DeadlinePassed, request_id: str | None = None) -> None:
        s = self.state
        if event.what == "deadline":
            error = msgspec.structs.replace(deadline_passed(), request_id=request_id)
            stop(s, self.out, error.message, self._now_ms)
            self._end(RunFailedEvent, finish="error", error=error)
        elif event.taken == HAS_ENDED:
            self.out.clear()
            self.effects = [ForgetRun()]
            s.phase = "over"
        elif event.taken == s.events_applied:
            error = workers_gone()
            stop(s, self.out, error.message, self._now_ms)
            self._end(Incomplete, finish="unknown", reason=error.message, error=error)

    def _end(self, event: type[TerminalEvent], **fields: object) -> None:
        self.report_stopped(event, self._now_ms)
        self.effects.append(end(self.state, self.out, event, self._now_ms, **fields))

    def report_stopped(self, event: type[TerminalEvent], at_ms: int) -> None:
        """Report the attempt that is still in progress, if any, because the run ends."""
        if self.state.phase == "streaming":
            outcome = "cancelled" if event is Cancelled else "stopped"
            if report := report_attempt(self.state, at_ms, outcome=outcome):
                self.reports.append(report)

    def _report(
        self,
        error: ErrorInfo | None,
        *,
        finish: str = "",
        usage: Usage | None = None,
        called_ms: int = 0,
    ) -> None:
        report = report_attempt(self.state, self._now_ms, finish=finish, error=error, usage=usage, called_ms=called_ms)
        if report:
            self.reports.append(report)

    # --- turns and tools --------------------------------------------------------------------------------------

    def call_tools(self, at_ms: int, verdicts: ToolVerdicts | None = None) -> None:
        """Run the turn's calls; the turn is complete and, if the run has policies, judged."""
        s = self.state
        s.seen_ms = max(s.seen_ms, at_ms)
        s.history = [self._content()]
        self._hand_out(dispatch_calls(s, self.out, at_ms, verdicts))
        self._publish_results()
        self._count_wait()

    def _hand_out(self, given: list[ToolWork | WaitInfo]) -> None:
        """Hand out calls to workers, and to people and clients what calls wait for."""
        if work := [each for each in given if isinstance(each, ToolWork)]:
            self.effects.append(RunTools(work))
        self.effects += [Wait(each) for each in given if isinstance(each, WaitInfo)]

    def _count_wait(self) -> None:
        """The deadline bounds what the run does. The time for which it only waits for somebody does not count."""
        s = self.state
        waits, since_ms = waits_only(s), s.waits_since_ms
        if waits and not since_ms:
            s.waits_since_ms = max(s.seen_ms, self._now_ms)
        elif since_ms and not waits:
            s.waits_since_ms = 0
            if s.accepted.deadline_ms:
                later_ms = s.accepted.deadline_ms + max(0, self._now_ms - since_ms)
                s.accepted = msgspec.structs.replace(s.accepted, deadline_ms=later_ms)
                self.effects.append(MoveDeadline(later_ms))

    def _decided(self, event: WaitDecided) -> None:
        s = self.state
        decided = decide_wait(s, self.out, event, self._now_ms)
        if isinstance(decided, GiveAnswer):
            self.effects.append(decided)
        elif decided:
            if decided.result is None and (given := hand_out(s, self.out, decided, self._now_ms)):
                self._hand_out([given])
            self._publish_results()

    def _content(self) -> Message:
        """The turn as the next one sends it back; in prefill mode the model's own text, verbatim."""
        s = self.state
        if s.text:
            return Message(role="assistant", content=s.text.reader.text)
        carried: list[ContentPart] = [ExtraPart(name=name, json=json) for name, json in s.carried.items()]
        return Message(role="assistant", content=[*carried, *s.blocks.message_parts()])

    def _returned(self, event: ToolReturned) -> None:
        if self.state.phase == "tools":
            if wait := end_held(self.state, self.out, event.block, self._now_ms):
                self.effects.append(EndWait(wait))
            accept_result(self.state, event)
            self._publish_results()

    def _publish_results(self) -> None:
        """Publish the results that are due; after the last one, start the next turn."""
        s = self.state
        if publish_results(s, self.out):
            self.effects.append(next_turn(s, history_of(s), self._now_ms, steered=True))
