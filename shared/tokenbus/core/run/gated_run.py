"""A run whose output policies judge before it is released.

::

    events ──> RunMachine ──> drafts ──> policy stage ──> PolicyVerdicts ──> GatedRun ──> released output
                │                                                             │
                └─ next attempt: at once      tools, the end: once everything before is judged

The inner run works like any other, but its events are drafts, numbered from 0. The policy stage gets the drafts, and
its verdicts come back through `events`, like everything else that changes the output, so a replay of the same events
produces the same output. Only the first verdict on a draft counts, whichever worker sends another, and however often.

A cancel, a deadline or a lost run bypasses the policies and takes effect at once: open blocks end with the content that
was released, pending drafts are dropped, and the run ends.
"""

from __future__ import annotations

import msgspec

from tokenbus.core.run.attempts import AttemptReport
from tokenbus.core.run.blocks.public_blocks import fitting_finish
from tokenbus.core.run.effects import Decide, Draft, Effect, EndRun, ForgetRun, ReleaseFromPolicies
from tokenbus.core.run.gate import PolicyGate
from tokenbus.core.run.outbox import Outbox
from tokenbus.core.run.provider_extra import renumbered
from tokenbus.core.run.state import RunState
from tokenbus.core.run.state_machine import RunMachine
from tokenbus.core.run.termination import (
    STATUS,
    cancelled_by,
    count_bytes,
    deadline_passed,
    end,
    terminated,
    workers_gone,
)
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import (
    CONTROL_ATTEMPT,
    HAS_ENDED,
    WHOLE_RUN,
    Accepted,
    BusEvent,
    CancelRequested,
    DeadlinePassed,
    EventFrame,
    PolicyPlan,
    PolicyVerdict,
    PolicyVerdicts,
    RecordedDecision,
    Rejected,
)
from tokenbus.events.public import (
    TERMINAL,
    BlockStarted,
    Cancelled,
    Chunk,
    Completed,
    Incomplete,
    PublicEvent,
    RunFailedEvent,
    Started,
    TerminalEvent,
)

UNJUDGED = "policy_silent"
"""Error code of a run that no policy worker judged in time."""


def accept(run: str, event: Accepted, at_ms: int) -> RunMachine | GatedRun:
    """Start a run, with policies or without."""
    return (GatedRun if event.policy_plan else RunMachine).accept(run, event, at_ms)


class GatedRun:
    """A `RunMachine` behind a policy gate. `handle` applies a frame; released events and effects wait to be
    collected.
    """

    def __init__(self, run: RunMachine) -> None:
        """``run`` must have a gate in its state."""
        assert run.state.gate
        assert run.state.accepted.policy_plan
        self._run = run
        self._gate = run.state.gate
        self._plan: PolicyPlan = run.state.accepted.policy_plan
        self._over = False
        self._now_ms = run.state.accepted_ms
        """As in `RunMachine`."""
        accepted = run.state.accepted
        self.out = Outbox(visible=accepted.visible, commentary=accepted.commentary, session=accepted.session)
        self.effects: list[Effect] = []

    @property
    def state(self) -> RunState:
        return self._run.state

    @property
    def reports(self) -> list[AttemptReport]:
        """Of the attempts that ended since they were last collected."""
        return self._run.reports

    @property
    def over(self) -> bool:
        """Whether the terminal event was released."""
        return self._over

    @classmethod
    def accept(cls, run: str, event: Accepted, at_ms: int) -> GatedRun:
        """Start a run and release its first events at once.

        Policies get these with the first further drafts. A run that has to wait for the policy stage therefore costs
        the policies nothing.
        """
        inner = RunMachine.accept(run, event, at_ms)
        inner.state.gate = gate = PolicyGate()
        self = cls(inner)
        gate.unsent_drafts = inner.out.number(run, 0)
        gate.draft_count = len(gate.unsent_drafts)
        for draft in gate.unsent_drafts:
            gate.released.release(draft, self.out)
        return self

    def handle(self, frame: EventFrame, size: int = 0) -> None:
        """Apply a frame of ``size`` bytes. Frames after the end are dropped."""
        self._now_ms = frame.at_ms
        try:
            self._handle(frame, size)
        finally:
            self._now_ms = self.state.accepted_ms

    def fail(self, error: ErrorInfo) -> None:
        """End the run as `failed` in any phase."""
        self._stop(RunFailedEvent, None, finish="error", error=error)

    def abandon(self, error: ErrorInfo) -> None:
        """End the run as `incomplete` in any phase, because it cannot continue."""
        self._stop(Incomplete, None, finish="unknown", reason=error.message, error=error)

    # --- input ------------------------------------------------------------------------------------------------

    def _handle(self, frame: EventFrame, size: int) -> None:
        if not self._over and (error := count_bytes(self.state, frame, size)):
            self.fail(error)
        if frame.attempt != CONTROL_ATTEMPT:
            self._forward(frame)
            return
        for event in frame.events:
            if not self._over:
                self._control(event, frame)

    def _control(self, event: BusEvent, frame: EventFrame) -> None:
        match event:
            case PolicyVerdicts():
                self._apply_verdicts(event)
            case CancelRequested():
                self._stop(Cancelled, "cancelled", **cancelled_by(event))
            case DeadlinePassed(what="policy"):
                if event.taken == self._gate.signs_of_life and not self._gate.bypassed:
                    self._policies_timed_out()
            case DeadlinePassed(what="deadline"):
                error = deadline_passed()
                self._stop(RunFailedEvent, error.message, finish="error", error=error)
            case DeadlinePassed(taken=taken) if taken == HAS_ENDED:
                self._forget()
            case DeadlinePassed():
                if event.taken == self.state.events_applied:
                    error = workers_gone()
                    reason = error.message
                    self._stop(Incomplete, reason, finish="unknown", reason=reason, error=error)
            case Rejected():
                self._stop(RunFailedEvent, None, finish="error", error=event.error)
            case _:
                self._forward(msgspec.structs.replace(frame, events=[event]))

    def _forward(self, frame: EventFrame) -> None:
        """Pass the frame to the inner run, and its new drafts to the policy stage."""
        if self._over or self._run.over:
            return
        self._run.handle(frame)
        self._collect()

    def _collect(self) -> None:
        """Collect the drafts and effects of the inner run."""
        gate = self._gate
        drafts = self._take_drafts()
        for effect in self._run.effects:
            if not isinstance(effect, EndRun):  # the run is over once its end is released
                self.effects.append(effect)
        self._run.effects.clear()
        if gate.bypassed:
            self._release_unjudged(drafts)
        self._continue_if_judged()

    def _take_drafts(self) -> list[PublicEvent]:
        gate, s = self._gate, self.state
        drafts = self._run.out.number(s.run, gate.draft_count)
        if not drafts:
            return []
        if gate.idle:
            gate.since_ms = gate.judging_ms = self._now_ms
        gate.draft_count += len(drafts)
        for draft in drafts:
            if isinstance(draft, TERMINAL):
                gate.terminal_event = draft
        if gate.bypassed:
            gate.judged_count = gate.draft_count
        else:
            self.effects.append(Draft([*gate.unsent_drafts, *drafts]))
            gate.unsent_drafts = []
            if self._plan.on_error == "pass":
                gate.undecided += drafts
                gate.undecided_starts |= {d.seq: d.block for d in drafts if isinstance(d, BlockStarted)}
        return drafts

    # --- released output ----------------------------------------------------------------------------------------

    def _apply_verdicts(self, event: PolicyVerdicts) -> None:
        gate = self._gate
        if gate.bypassed:
            return  # too late: the run passes without policies
        if not gate.released.is_next(event.numbered_by, event.first):
            gate.lost_verdicts = True
            return  # not an answer: another worker begins again, or the policies time out
        gate.lost_verdicts = False
        if gate.counts_as_alive(event.numbered_by):
            gate.record_sign_of_life(self._now_ms)
        if event.steps:
            gate.released.switch_worker(event.numbered_by)
            gate.released.count_steps(event.first, len(event.steps))
        for step in event.steps:
            fresh = step.draft == WHOLE_RUN or gate.mark_applied(step)
            released = [e for e in step.events if not isinstance(e, (Started, *TERMINAL))]
            gate.released.release_verdict(msgspec.structs.replace(step, events=released), self.out, known=not fresh)
            if not fresh:
                continue
            gate.record_progress(self._now_ms)
            shows_text = self.state.accepted.visible and any(isinstance(e, Chunk) and e.visible for e in released)
            if gate.first_visible_ms is None and shows_text:
                gate.first_visible_ms = self._now_ms - self.state.accepted_ms
            self._decide(step.decisions)
            if gate.terminal_event and (ends := [e for e in step.events if isinstance(e, TERMINAL)]):
                judged = {"finish": ends[-1].finish, "provider_extra": ends[-1].provider_extra}
                gate.terminal_event = msgspec.structs.replace(gate.terminal_event, **judged)
            if step.ends is not None:
                self._terminated(step)
                return
        self._continue_if_judged()

    def _decide(self, decisions: list[RecordedDecision]) -> None:
        gate = self._gate
        for decision in decisions:
            if decision.action == "block" and decision.tool_id:
                gate.released.tool_verdicts.reasons[decision.tool_id] = decision.reason
            self.effects.append(Decide(gate.decision_count, self.state.turn, self.state.attempt, decision))
            gate.decision_count += 1

    def _continue_if_judged(self) -> None:
        """Once everything is judged, continue with what waited for that: the tools or the end."""
        gate, s = self._gate, self.state
        if self._over or not gate.idle:
            return
        if gate.terminal_event:
            last = self._finished(gate.terminal_event)
            self._end(last, None)
        elif s.phase == "judged":
            judged, gate.released.tool_verdicts = gate.released.tool_verdicts, type(gate.released.tool_verdicts)()
            self._run.call_tools(self._now_ms, judged)
            self._collect()

    def _finished(self, last: TerminalEvent) -> TerminalEvent:
        """Adjust the terminal event to the released output: a turn none of whose calls was released ends normally."""
        if not isinstance(last, Completed):
            return last
        calls = self._gate.released.tool_verdicts.released
        model_calls = self.state.blocks.calls
        if bool(calls) == bool(model_calls):
            return last
        return msgspec.structs.replace(last, finish=fitting_finish(last.finish, calls=bool(calls)))

    def _terminated(self, step: PolicyVerdict) -> None:
        error = terminated(step.ends or "")
        self._stop(Incomplete, error.message, finish="content_filter", reason=error.message, error=error)

    def _policies_timed_out(self) -> None:
        """Handle a run whose drafts are not judged, or not fast enough."""
        gate = self._gate
        problem = "no policy worker judged the run in time"
        if gate.lost_verdicts:
            problem += ": the server lost verdicts in a fail-over, and no other worker began again"
        names = ", ".join(self._plan.names)
        if self._plan.on_error == "block":
            error = ErrorInfo(code=UNJUDGED, kind="timeout", message=problem, retryable=True, where=names)
            self._decide([RecordedDecision(names, "error", f"{problem}: it ends")])
            self._stop(RunFailedEvent, problem, finish="error", error=error)
            return
        self._decide([RecordedDecision(names, "error", f"{problem}: the run continues without it")])
        gate.bypassed, gate.unsent_drafts = True, []
        self.effects.append(ReleaseFromPolicies())
        gate.deferred_parts = []
        gate.released.switch_worker("", gate.undecided_starts)
        waiting, gate.undecided = gate.undecided, []
        gate.judged_count = gate.draft_count
        self._release_unjudged(waiting)
        self._continue_if_judged()

    def _release_unjudged(self, drafts: list[PublicEvent]) -> None:
        """Release drafts unchanged. Blocks whose start a policy removed stay removed as a whole."""
        for draft in drafts:
            if not isinstance(draft, TERMINAL):
                self._gate.released.release_verdict(PolicyVerdict(draft.seq, events=[draft]), self.out, known=False)

    # --- the end ----------------------------------------------------------------------------------------------

    def _stop(self, event: type[TerminalEvent], why: str | None, **fields: object) -> None:
        """End the run now. ``why``: error text for calls without a result."""
        if self._over:
            return
        s = self.state
        self._run.out.clear()
        self._run.report_stopped(event, self._now_ms)
        end(s, self._run.out, event, self._now_ms, **fields)
        (last,) = self._run.out.number(s.run, 0)
        assert isinstance(last, TERMINAL)
        self._end(last, why)

    def _forget(self) -> None:
        """The run's log has its end already."""
        self.out.clear()
        self._run.out.clear()
        self._run.effects.clear()
        self._over = True
        self.effects = [ForgetRun()] if self._gate.unsent_drafts else [Draft([], over=True), ForgetRun()]

    def _end(self, last: TerminalEvent, why: str | None) -> None:
        gate = self._gate
        gate.released.close(self.out, why)
        timing = msgspec.structs.replace(last.timing, first_visible_ms=gate.first_visible_ms)
        numbers = gate.released.released_numbers.items()
        extras = renumbered(last.provider_extra, numbers, gate.released.intact)
        gate.released.release(msgspec.structs.replace(last, timing=timing, provider_extra=extras), self.out)
        self._over = True
        self._run.effects.clear()
        if not gate.unsent_drafts:
            self.effects.append(Draft([], over=True))
        self.effects.append(EndRun(STATUS[type(last)]))
