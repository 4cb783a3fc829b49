"""Progress of the policies on a run: counts drafts and verdicts. Plain data, so that it can be checkpointed."""

from __future__ import annotations

import msgspec

from tokenbus.core.run.gate.released_output import ReleasedOutput
from tokenbus.events.frames import PolicyVerdict
from tokenbus.events.public import PublicEvent, TerminalEvent

MAX_WORKERS_WITHOUT_PROGRESS = 8
"""Maximum workers in a row whose signs of life count although none of them released anything new."""


class PolicyGate(msgspec.Struct):
    """How far a run's drafts are judged."""

    draft_count: int = 0
    """Number of drafts so far, which is the number of the next one."""
    judged_count: int = 0
    """Every draft below this number has been judged, and the immediate verdicts on it were applied."""
    deferred_parts: list[tuple[int, str]] = []
    """Draft and part of verdicts that were deferred and have not arrived."""
    signs_of_life: int = 0
    """Signs of life of the policy stage on this run: verdicts applied, and reports that the run's turn will come."""
    since_ms: int = 0
    """Time of the last sign of life, or of the first draft after an idle period."""
    judging_ms: int = 0
    """Time of the last new verdict, or of the first draft after an idle period. Unlike ``since_ms``, reports that the
    run's turn will come do not count.
    """
    undecided: list[PublicEvent] = []
    """Drafts without a verdict. Kept only if they are released when no verdict comes."""
    undecided_starts: dict[int, int] = {}
    """Likewise: draft -> number of the block that it begins."""
    first_visible_ms: int | None = None
    """Milliseconds from the run's acceptance to the first visible text that was released."""
    bypassed: bool = False
    """No verdict came in time: everything is released as it arrives."""
    released: ReleasedOutput = msgspec.field(default_factory=ReleasedOutput)
    decision_count: int = 0
    """Number of decisions published."""
    last_worker: str = ""
    """Policy worker that gave the last sign of life."""
    workers_without_progress: int = 0
    """Number of different workers that gave one since something new was released."""
    terminal_event: TerminalEvent | None = None
    """The run's terminal event, which waits until everything before it is judged."""
    lost_verdicts: bool = False
    """Whether verdicts of the last worker are missing (`ReleasedOutput.is_next`)."""
    unsent_drafts: list[PublicEvent] = []
    """Drafts that go to the policies with the next ones."""

    @property
    def idle(self) -> bool:
        """Whether no verdict is pending."""
        return bool(self.unsent_drafts) or (self.judged_count == self.draft_count and not self.deferred_parts)

    @property
    def waits_since_ms(self) -> int:
        """Since when released output waits for a verdict; 0 if none is pending."""
        return 0 if self.idle else self.judging_ms

    def mark_applied(self, step: PolicyVerdict) -> bool:
        """Whether this verdict or part is new; marks it as applied."""
        if step.part:
            if (step.draft, step.part) not in self.deferred_parts:
                return False
            self.deferred_parts.remove((step.draft, step.part))
        elif step.draft != self.judged_count or step.draft >= self.draft_count:
            return False
        else:
            self.judged_count += 1
        self.deferred_parts += [(step.draft, part) for part in step.deferred]
        if self.undecided:
            self.undecided = (
                self.undecided[-(self.draft_count - self.judged_count) :]
                if self.draft_count > self.judged_count
                else []
            )
        return True

    def counts_as_alive(self, worker: str) -> bool:
        """Whether a sign of life of this worker counts although it released nothing new yet.

        A worker first repeats the verdicts of earlier workers, which may take long. But if worker after worker starts
        on a run and none makes progress, the run counts as unattended: a new worker no longer restarts its timeout.
        """
        if worker != self.last_worker:
            self.last_worker = worker
            self.workers_without_progress += 1
        return self.workers_without_progress <= MAX_WORKERS_WITHOUT_PROGRESS

    def record_sign_of_life(self, at_ms: int) -> None:
        """Record a sign of life."""
        self.signs_of_life += 1
        self.since_ms = at_ms

    def record_progress(self, at_ms: int) -> None:
        """Record that something new was released."""
        self.record_sign_of_life(at_ms)
        self.judging_ms = at_ms
        self.workers_without_progress = 0
