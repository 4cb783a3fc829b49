"""Small words to write the story of a run with: frames in, public events and effects out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tokenbus.core.run.effects import Effect
from tokenbus.core.run.state import RunState
from tokenbus.core.run.state_machine import RunMachine
from tokenbus.events import normalized as n
from tokenbus.events.frames import CONTROL_ATTEMPT, Accepted, BusEvent, EventFrame, RunLimits
from tokenbus.events.public import PublicEvent

RUN = "r1"
START_MS = 1_000


def accepted(**changes: Any) -> Accepted:
    fields: dict[str, Any] = {
        "provider": "anthropic",
        "model": "m",
        "on_failure": "before_first_visible",
        "max_tool_depth": 10,
        "rules": RunLimits(),
        "tools": ["weather", "f", "g"],
    }
    return Accepted(**{**fields, **changes})


class Story:
    """A run under test: each step's public events are numbered at once, as if each were its own commit."""

    def __init__(self, **changes: Any) -> None:
        self.run = RunMachine.accept(RUN, accepted(**changes), START_MS)
        self.events: list[PublicEvent] = []
        self.effects: list[Effect] = []
        self.at_ms = START_MS
        self.collect()

    def provider(self, *events: BusEvent, attempt: int | None = None) -> list[PublicEvent]:
        """Normalised events of the present attempt (or of another)."""
        state = self.run.state
        return self._step(
            EventFrame(state.turn, state.attempt if attempt is None else attempt, self._tick(), list(events))
        )

    def control(self, *events: BusEvent) -> list[PublicEvent]:
        """What intake or a tool has to say."""
        return self._step(EventFrame(0, CONTROL_ATTEMPT, self._tick(), list(events)))

    def reborn(self) -> None:
        """Go on from a checkpoint of the state."""
        self.run = RunMachine(msgspec.msgpack.decode(msgspec.msgpack.encode(self.run.state), type=RunState))

    def collect(self) -> list[PublicEvent]:
        state = self.run.state
        new = self.run.out.number(state.run, state.seq)
        state.seq += len(new)
        self.events += new
        self.effects += self.run.effects
        self.run.effects.clear()
        return new

    def _tick(self) -> int:
        self.at_ms += 10
        return self.at_ms

    def _step(self, frame: EventFrame) -> list[PublicEvent]:
        self.run.handle(frame)
        return self.collect()


def item(block: int, name: str, json: str, tool: str = "", tool_id: str = "") -> list[n.Normalized]:
    """An item of the provider's own."""
    return [n.ItemStart(block, name, tool, tool_id), n.ToolCallDelta(block, json), n.BlockStop(block)]


def text(block: int, *pieces: str) -> list[BusEvent]:
    return [n.BlockStart(block, "text"), *(n.TextDelta(block, p) for p in pieces), n.BlockStop(block)]


def call(block: int, tool_id: str, name: str, *fragments: str) -> list[BusEvent]:
    return [
        n.ToolCallStart(block, tool_id, name),
        *(n.ToolCallDelta(block, f) for f in fragments),
        n.ToolCallDone(block),
    ]


def of_type(events: Sequence[PublicEvent], kind: type[Any]) -> list[Any]:
    return [e for e in events if isinstance(e, kind)]
