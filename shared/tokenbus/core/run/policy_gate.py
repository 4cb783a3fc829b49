"""What a run's policies have judged so far, and what of the run is heard: plain data, so that it can be checkpointed.

`Gate` counts the drafts and their rulings; `Heard` keeps what is heard whole, whoever says it: blocks are numbered
without a gap, nothing is added to what is complete, and the chunks of a block concatenate to its content. So a policy
worker that died in mid-block, and another that judges otherwise, cannot break the stream for those who listen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tokenbus.core.run.blocks import ToolCall
from tokenbus.core.run.outbox import Outbox
from tokenbus.core.run.public_blocks import changed_fields, content_fields, first_void, write_result
from tokenbus.core.run.tool_verdicts import ToolVerdicts
from tokenbus.events.frames import PolicyVerdict
from tokenbus.events.public import (
    BlockComplete,
    BlockKind,
    BlockStarted,
    Chunk,
    PublicEvent,
    Restarted,
    Retrying,
    TerminalEvent,
)

MOST_TELLERS = 8
"""Maximum owners in a row that may begin with a run, release nothing new, and still keep it from counting as silent."""
_ENVELOPE = ("run", "seq", "turn", "attempt")


class ReleasedBlock(msgspec.Struct):
    """A block that began and is not complete."""

    kind: BlockKind
    tool_id: str | None = None
    tool_name: str | None = None
    pieces: list[str] = []


class ReleasedOutput(msgspec.Struct):
    """The blocks of the run as they are heard."""

    turn: int = 0
    attempt: int = 1
    next_number: int = 0
    open: dict[int, ReleasedBlock] = {}
    numbered_by: str = ""
    names: dict[int, int] = {}
    """The teller's number of a block to the one under which it is heard."""
    born: dict[str, int] = {}
    """The same by where it began: draft, part, and how many began there before it. So another teller's blocks are found
    again, whatever numbers it has for them."""
    judged: ToolVerdicts = msgspec.field(default_factory=ToolVerdicts)
    """Of the present turn."""
    unanswered: list[ToolCall] = []
    """Calls without a result."""

    def begin(self, teller: str, begun: Mapping[int, int] | None = None) -> None:
        """This one tells from now on. ``begun``: by draft, the number that it has for the block which began there."""
        if teller != self.numbered_by:
            places = {_place(draft, "", 0): name for draft, name in (begun or {}).items()}
            self.numbered_by = teller
            self.names = {name: self.born[place] for place, name in places.items() if place in self.born}

    def release_verdict(self, step: PolicyVerdict, out: Outbox, *, known: bool) -> None:
        """Tell what a draft came to; ``known``: it is told already, and is looked at for the teller's numbers alone."""
        starts = 0
        for event in step.events:
            if isinstance(event, BlockStarted):
                place = _place(step.draft, step.part, starts)
                starts += 1
                if place in self.born:
                    self.names[event.block] = self.born[place]
                elif not known:
                    self.born[place] = self.names[event.block] = self._start(event, out)
            elif not known:
                self.release(event, out)

    def release(self, event: PublicEvent, out: Outbox) -> None:
        """One event that begins no block."""
        self.turn, self.attempt = max(self.turn, event.turn), max(self.attempt, event.attempt)
        match event:
            case Chunk():
                number = self.names.get(event.block, -1)
                if block := self.open.get(number):
                    self._write(number, block, event, out)
            case BlockComplete():
                number = self.names.get(event.block, -1)
                if block := self.open.get(number):
                    self._complete(number, block, event, out)
            case Retrying() | Restarted():
                drop_from = first_void(self.names.items(), event.drop_from, self.next_number)
                self.judged.heard = [call for call in self.judged.heard if call.block < drop_from]
                self.unanswered = [call for call in self.unanswered if call.block < drop_from]
                out.event(self.turn, self.attempt, type(event), **_fields(event) | {"drop_from": drop_from})
            case _:
                fields = _fields(event)
                if "block" in fields:  # it tells of a block, and is heard where that was
                    if fields["block"] not in self.names:
                        return
                    fields["block"] = self.names[fields["block"]]
                out.event(self.turn, self.attempt, type(event), **fields)

    def close(self, out: Outbox, why: str | None) -> None:
        """Nothing more will be said: what is open is cut. ``why``: what calls without a result are answered."""
        for number, block in list(self.open.items()):
            fields: dict[str, Any] = {"block": number, "kind": block.kind, "cut": True}
            fields |= content_fields(block.kind, "".join(block.pieces), cut=True)
            if block.kind == "tool_call":
                fields |= {"tool_id": block.tool_id, "tool_name": block.tool_name}
                self.unanswered.append(ToolCall(number, block.tool_id or "", block.tool_name or "", ""))
            out.event(self.turn, self.attempt, BlockComplete, **fields)
        self.open = {}
        for call in self.unanswered if why else ():
            number, self.next_number = self.next_number, self.next_number + 1
            write_result(
                out,
                self.turn,
                self.attempt,
                number,
                tool_id=call.tool_id,
                tool_name=call.name,
                content=why or "",
                is_error=True,
            )
        self.unanswered = []

    # --- blocks -----------------------------------------------------------------------------------------------

    def _start(self, event: BlockStarted, out: Outbox) -> int:
        self.turn, self.attempt = max(self.turn, event.turn), max(self.attempt, event.attempt)
        number, self.next_number = self.next_number, self.next_number + 1
        self.open[number] = ReleasedBlock(event.kind, event.tool_id, event.tool_name)
        out.event(self.turn, self.attempt, BlockStarted, **_fields(event) | {"block": number})
        if event.kind == "tool_result":
            self._answered(event.tool_id)
        return number

    def _write(self, number: int, block: ReleasedBlock, event: Chunk, out: Outbox) -> None:
        if event.tool_call_part in (None, "input"):
            block.pieces.append(event.text)
        out.chunk(
            self.turn,
            self.attempt,
            number,
            block.kind,
            event.text,
            visible=event.visible and block.kind == "text",
            part=event.tool_call_part,
            tool_id=block.tool_id,
            tool_name=block.tool_name,
        )

    def _complete(self, number: int, block: ReleasedBlock, event: BlockComplete, out: Outbox) -> None:
        del self.open[number]
        content = "".join(block.pieces)
        fields = _fields(event) | {"block": number} | changed_fields(event, block.kind, content)
        if block.kind == "tool_call":
            call = ToolCall(number, block.tool_id or "", block.tool_name or "", content)
            self.unanswered.append(call)
            if not event.cut:
                self.judged.heard.append(call)
        out.event(self.turn, self.attempt, BlockComplete, **fields)

    def _answered(self, tool_id: str | None) -> None:
        for call in self.unanswered:
            if call.tool_id == tool_id:
                self.unanswered.remove(call)
                return


class PolicyGate(msgspec.Struct):
    """How far a run's drafts are judged."""

    drafted: int = 0
    """Drafts so far: the number of the next."""
    ruled: int = 0
    """Below this every draft's policies were called, and what they said then is told."""
    awaited: list[tuple[int, str]] = []
    """Draft and part of what they put off and did not tell yet."""
    alive: int = 0
    """Signs of life that the policy stage gave of this run: parts that were told, and that its turn will come."""
    since_ms: int = 0
    """When the last of them was given, or when the first draft after a time without any came."""
    waiting: list[PublicEvent] = []
    """Drafts that are not ruled, where they are to pass should nobody rule on them."""
    begun: dict[int, int] = {}
    """In that case too: the drafts that begin blocks, and the numbers of those."""
    first_heard_ms: int | None = None
    """Milliseconds from the run's acceptance to the first visible text that was heard."""
    passing: bool = False
    """Nobody ruled on them in time: everything is heard as it comes."""
    heard: ReleasedOutput = msgspec.field(default_factory=ReleasedOutput)
    decided: int = 0
    """Decisions that were told."""
    teller: str = ""
    """Who gave the last sign of life."""
    tellers: int = 0
    """How many have given some since something new was told."""
    last: TerminalEvent | None = None
    """The run's end, which waits until all before it is judged."""
    beginning: list[PublicEvent] = []
    """Drafts that the policies are told with the next one."""

    @property
    def idle(self) -> bool:
        """Whether nothing waits for a ruling."""
        return bool(self.beginning) or (self.ruled == self.drafted and not self.awaited)

    def fresh(self, step: PolicyVerdict) -> bool:
        """Whether this part is told for the first time; from now on it is not."""
        if step.part:
            if (step.draft, step.part) not in self.awaited:
                return False
            self.awaited.remove((step.draft, step.part))
        elif step.draft != self.ruled or step.draft >= self.drafted:
            return False
        else:
            self.ruled += 1
        self.awaited += [(step.draft, part) for part in step.deferred]
        if self.waiting:
            self.waiting = self.waiting[-(self.drafted - self.ruled) :] if self.drafted > self.ruled else []
        return True

    def in_hand(self, teller: str) -> bool:
        """Whether it counts that this one has the run in hand, and has come to nothing new yet.

        It tells first what others told before it, which may take long. But a run of which one after the other begins
        and none comes further is as good as in nobody's hands: its patience does not begin anew with each of them.
        """
        if teller != self.teller:
            self.teller = teller
            self.tellers += 1
        return self.tellers <= MOST_TELLERS

    def progressed(self, at_ms: int) -> None:
        """Somebody has the run in hand."""
        self.alive += 1
        self.since_ms = at_ms

    def goes_on(self, at_ms: int) -> None:
        """Something new was told."""
        self.progressed(at_ms)
        self.tellers = 0


def _place(draft: int, part: str, nth: int) -> str:
    return f"{draft} {part} {nth}"


def _fields(event: PublicEvent) -> dict[str, Any]:
    return {name: getattr(event, name) for name in event.__struct_fields__ if name not in _ENVELOPE}
