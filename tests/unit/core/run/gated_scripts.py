"""A run with policies, under test: its drafts come to this file, which rules on them as a policy stage would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tests.unit.core.run.script import RUN, START_MS, accepted
from tokenbus.core.run.effects import Decide, Draft, Effect
from tokenbus.core.run.gated_run import GatedRun
from tokenbus.core.run.state import RunState
from tokenbus.core.run.state_machine import RunMachine
from tokenbus.events.frames import CONTROL_ATTEMPT, BusEvent, EventFrame, PolicyPlan, PolicyVerdict, PolicyVerdicts
from tokenbus.events.public import PublicEvent

JUDGED = PolicyPlan(("guard",), "block", 1_000)


class HeldStory:
    """The drafts, the published events, and the effects of a run."""

    def __init__(self, policy_plan: PolicyPlan = JUDGED, **changes: Any) -> None:
        self.run = GatedRun.accept(RUN, accepted(policy_plan=policy_plan, **changes), START_MS)
        self.drafts: list[PublicEvent] = []
        self.published: list[PublicEvent] = []
        self.effects: list[Effect] = []
        self.at_ms = START_MS
        self.ruled = 0
        self._collect()

    def provider(self, *events: BusEvent) -> list[PublicEvent]:
        """Apply normalised events of the present attempt; return the events published at once."""
        s = self.run.state
        return self._step(s.turn, s.attempt, events)

    def control(self, *events: BusEvent) -> list[PublicEvent]:
        """What comes from elsewhere than the attempt."""
        return self._step(0, CONTROL_ATTEMPT, events)

    def rule(self, *steps: PolicyVerdict, worker: str = "first", first: int = 0) -> list[PublicEvent]:
        """Apply these verdicts; return the events that they release."""
        return self.control(PolicyVerdicts(worker, list(steps), first))

    def pass_all(self, worker: str = "first") -> list[PublicEvent]:
        """Every draft so far as it is; so often, as long as that brings more."""
        received: list[PublicEvent] = []
        while self.ruled < len(self.drafts):
            fresh, self.ruled = self.drafts[self.ruled :], len(self.drafts)
            received += self.rule(*(PolicyVerdict(d.seq, events=[d]) for d in fresh), worker=worker)
        return received

    def reborn(self) -> None:
        """Go on from a checkpoint of the state."""
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(self.run.state), type=RunState)
        self.run = GatedRun(RunMachine(state))

    def of(self, kind: type[Any]) -> list[Any]:
        """The effects of this kind so far, drafts aside."""
        return [e for e in self.effects if isinstance(e, kind)]

    @property
    def decisions(self) -> list[str]:
        """What was decided, in words."""
        return [e.decision.action for e in self.effects if isinstance(e, Decide)]

    def _step(self, turn: int, attempt: int, events: Sequence[BusEvent]) -> list[PublicEvent]:
        self.at_ms += 10
        self.run.handle(EventFrame(turn, attempt, self.at_ms, list(events)))
        return self._collect()

    def _collect(self) -> list[PublicEvent]:
        state = self.run.state
        new = self.run.out.number(state.run, state.seq)
        state.seq += len(new)
        self.published += new
        for effect in self.run.effects:
            if isinstance(effect, Draft):
                self.drafts += effect.events
            self.effects.append(effect)
        self.run.effects.clear()
        return new
