"""A run's events folded into what it gave: pure, the same however the events arrived."""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenbus.errors import RunCancelled, RunFailed, RunIncomplete
from tokenbus.events.failure import ErrorInfo
from tokenbus.events.normalized import FinishReason
from tokenbus.events.public import (
    BlockComplete,
    Cancelled,
    Chunk,
    Completed,
    Incomplete,
    PublicEvent,
    Restarted,
    Retrying,
    RunFailedEvent,
    TerminalEvent,
    Timing,
)
from tokenbus.events.usage import Usage


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a run gave, whole or up to where it ended. Blocks of attempts that a retry made void are not in it."""

    run: str
    status: Literal["completed", "incomplete", "failed", "cancelled"]
    text: str
    """The visible text, block after block."""
    thinking: str
    """The thinking, block after block."""
    blocks: list[BlockComplete]
    """In order of their numbers; ``cut`` marks one that is only a beginning."""
    finish: FinishReason
    finish_raw: str | None
    usage: Usage | None
    """Sum over the run's turns; None where the provider told nothing."""
    timing: Timing
    error: ErrorInfo | None
    """Of a run that failed, and of an incomplete one where something is known."""
    reason: str | None
    """Why the run is incomplete or was cancelled."""
    events: int
    """How many public events the run has, void ones included."""

    @property
    def tool_calls(self) -> list[BlockComplete]:
        """The blocks that are tool calls; one with ``cut`` never ran."""
        return [block for block in self.blocks if block.kind == "tool_call"]

    def or_raise(self) -> Result:
        """The result of a completed run. Raises RunFailed, RunIncomplete or RunCancelled, with this as ``result``."""
        match self.status:
            case "completed":
                return self
            case "incomplete":
                raise RunIncomplete(self.run, self.reason or "", self)
            case "cancelled":
                raise RunCancelled(self.run, self.reason, self)
            case "failed":
                assert self.error
                raise RunFailed(self.run, self.error, self)


class ResultBuilder:
    """Folds the events of one run, fed in order from the first."""

    def __init__(self) -> None:
        self._complete: dict[int, BlockComplete] = {}
        self._visible: dict[int, list[str]] = {}
        self._thinking: dict[int, list[str]] = {}
        self._events = 0

    def add(self, event: PublicEvent) -> Result | None:
        """Fold one event in; the terminal event gives the result."""
        self._events += 1
        match event:
            case Chunk():
                if event.visible:
                    self._visible.setdefault(event.block, []).append(event.text)
                elif event.kind == "thinking":
                    self._thinking.setdefault(event.block, []).append(event.text)
            case BlockComplete():
                self._complete[event.block] = event
            case Retrying() | Restarted():
                self._drop(event.drop_from)
            case Completed() | Incomplete() | RunFailedEvent() | Cancelled():
                return self._result(event)
            case _:
                pass
        return None

    def _drop(self, first: int) -> None:
        """Void are the blocks so far; the next attempt's have higher numbers."""
        for blocks in (self._complete, self._visible, self._thinking):
            for number in [n for n in blocks if n >= first]:
                del blocks[number]

    def _result(self, end: TerminalEvent) -> Result:
        return Result(
            run=end.run,
            status=_STATUS[type(end)],
            text=_joined(self._visible),
            thinking=_joined(self._thinking),
            blocks=[self._complete[n] for n in sorted(self._complete)],
            finish=end.finish,
            finish_raw=end.finish_raw,
            usage=end.usage,
            timing=end.timing,
            error=end.error if isinstance(end, RunFailedEvent | Incomplete) else None,
            reason=end.reason if isinstance(end, Cancelled | Incomplete) else None,
            events=self._events,
        )


_STATUS: dict[type[TerminalEvent], Literal["completed", "incomplete", "failed", "cancelled"]] = {
    Completed: "completed",
    Incomplete: "incomplete",
    RunFailedEvent: "failed",
    Cancelled: "cancelled",
}


def _joined(blocks: dict[int, list[str]]) -> str:
    return "".join("".join(blocks[n]) for n in sorted(blocks))
