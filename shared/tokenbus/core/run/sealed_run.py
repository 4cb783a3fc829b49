"""The end of a durable run, which is decided and waits to be published.

A reader acts on an end, so what it follows from must not be lost any more. Its inputs are in one log, and if the end
itself is lost, the same inputs give the same end. It waits until `Stored` says that they are replicated; nothing else
changes the run, which is over.
"""

from __future__ import annotations

from typing import TypeAlias

from tokenbus.core.run.attempts import AttemptReport
from tokenbus.core.run.effects import Effect, EndRun, ForgetRun
from tokenbus.core.run.gated_run import GatedRun
from tokenbus.core.run.outbox import Outbox
from tokenbus.core.run.state import RunState
from tokenbus.core.run.state_machine import RunMachine
from tokenbus.core.run.termination import STATUS
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import HAS_ENDED, DeadlinePassed, EventFrame, Stored

AnyRun: TypeAlias = "RunMachine | GatedRun | SealedRun"


class SealedRun:
    """A run that is over but for its terminal event. Has the outbox and the effects of the machine that ended it."""

    def __init__(self, ended: RunMachine | GatedRun) -> None:
        self._ended = ended
        self._over = False

    @classmethod
    def seal(cls, ended: AnyRun) -> SealedRun | None:
        """Take back the end that this machine wants to publish; None if it has none, or had to wait before."""
        if isinstance(ended, SealedRun):
            return None
        end = ended.out.take_end(ended.state.run)
        if end is None:
            return None
        ended.state.sealed = end
        ended.effects[:] = [effect for effect in ended.effects if not isinstance(effect, EndRun)]
        return cls(ended)

    @property
    def state(self) -> RunState:
        return self._ended.state

    @property
    def out(self) -> Outbox:
        return self._ended.out

    @property
    def effects(self) -> list[Effect]:
        return self._ended.effects

    @property
    def reports(self) -> list[AttemptReport]:
        """Of the attempts that ended since they were last collected."""
        return self._ended.reports

    @property
    def over(self) -> bool:
        """Whether the terminal event was published."""
        return self._over

    def handle(self, frame: EventFrame, size: int = 0) -> None:
        """Publish the end if the frame says that it may be, and not if its log has it. Anything else came after it."""
        for event in frame.events:
            match event:
                case Stored(taken=taken) if taken == self.state.events_applied:
                    self._publish()
                case DeadlinePassed(taken=taken) if taken == HAS_ENDED:
                    self._over = True
                    self.effects[:] = [ForgetRun()]
                case _:
                    pass

    def fail(self, error: ErrorInfo) -> None:
        """Publish the end now: it was decided before this error, and the run's state is given up."""
        self._publish()

    def abandon(self, error: ErrorInfo) -> None:
        """Its end is decided, and waits still."""

    def _publish(self) -> None:
        end = self.state.sealed
        if end and not self._over:
            self._over = True
            self.out.put_back(end)
            self.effects.append(EndRun(STATUS[type(end)]))
