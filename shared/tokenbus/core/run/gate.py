"""What policies decide about a run: the drafts that wait for verdicts, and the output that was released. Plain data.

The output is consistent whichever policy worker produces it: block numbers have no gap, complete blocks do not change,
and the chunks of a block concatenate to its content. A policy worker that dies in mid-block, or another that judges
differently, therefore cannot break the stream for subscribers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tokenbus.core.run.blocks.block_table import VISIBLE, CompleteCall
from tokenbus.core.run.blocks.public_blocks import (
    NOT_PACKABLE,
    changed_fields,
    content_fields,
    first_void,
    write_result,
)
from tokenbus.core.run.outbox import Outbox, fields_of
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

BLOCKED = "the call was blocked by a policy"
"""What the model reads if the policy gave no reason."""


class ToolVerdicts(msgspec.Struct):
    """The published calls of one turn, and the reasons for blocking others."""

    released: list[CompleteCall] = []
    reasons: dict[str, str] = {}
    """Reason by call id."""
    items: list[str] = []
    """Ids of the published calls that providers run."""

    def take(self, call: CompleteCall) -> CompleteCall | None:
        """Remove and return the published form of a model's call; None: it was held back.

        Calls with the same id match in order. Calls that a policy invented match no call of the model: they are
        published but never run.
        """
        for i, released in enumerate(self.released):
            if released.tool_id == call.tool_id:
                del self.released[i]
                unchanged = released.arguments == call.arguments
                return msgspec.structs.replace(released, problem=call.problem if unchanged else "")
        return None

    def reason(self, call: CompleteCall) -> str:
        """Text for the model instead of a result."""
        reason = self.reasons.get(call.tool_id)
        return f"{BLOCKED}: {reason}" if reason else BLOCKED


class ReleasedBlock(msgspec.Struct):
    kind: BlockKind
    tool_id: str | None = None
    tool_name: str | None = None
    pieces: list[str] = []
    phase: str | None = None
    free_text: bool | None = None


class ReleasedOutput(msgspec.Struct):
    """The run's blocks as released to subscribers."""

    turn: int = 0
    attempt: int = 1
    next_number: int = 0
    open: dict[int, ReleasedBlock] = {}
    intact: set[int] = set()
    """Complete blocks with the content that the policy stage gave them."""
    numbered_by: str = ""
    released_numbers: dict[int, int] = {}
    """Maps the current policy worker's block numbers to the released numbers."""
    steps_read: int = 0
    """How many steps that worker has sent."""
    numbers_by_origin: dict[str, int] = {}
    """Maps a block's origin (draft, part, and how many blocks began there before it) to its released number. This
    identifies the blocks of another policy worker, which may use other numbers.
    """
    tool_verdicts: ToolVerdicts = msgspec.field(default_factory=ToolVerdicts)
    """Of the current turn."""
    calls_without_result: list[CompleteCall] = []
    """Calls without a result."""

    def switch_worker(self, worker: str, block_starts: Mapping[int, int] | None = None) -> None:
        """Switch to the block numbers of policy worker ``worker``. ``block_starts``: draft -> its number for the block
        began there.
        """
        if worker != self.numbered_by:
            places = {_origin(draft, "", 0): name for draft, name in (block_starts or {}).items()}
            self.numbered_by, self.steps_read = worker, 0
            self.released_numbers = {
                name: self.numbers_by_origin[place] for place, name in places.items() if place in self.numbers_by_origin
            }

    def is_next(self, worker: str, first: int) -> bool:
        """Whether no step of the worker is missing before the one that it counts as ``first``.

        A server that fails may lose a message. The steps after it name blocks whose numbers are unknown here, so their
        text would be left out, and a retry would not make it void.
        """
        return first <= (self.steps_read if worker == self.numbered_by else 0)

    def count_steps(self, first: int, steps: int) -> None:
        """Count steps of the current worker. A message may arrive a second time, also after later ones."""
        self.steps_read = max(self.steps_read, first + steps)

    def release_verdict(self, step: PolicyVerdict, out: Outbox, *, known: bool) -> None:
        """Release a verdict's events. ``known``: they were released already; only read the worker's block numbers from
        them.
        """
        starts = 0
        for event in step.events:
            if isinstance(event, BlockStarted):
                place = _origin(step.draft, step.part, starts)
                starts += 1
                if place in self.numbers_by_origin:
                    self.released_numbers[event.block] = self.numbers_by_origin[place]
                elif not known and not self._of_withheld_call(event):
                    self.numbers_by_origin[place] = self.released_numbers[event.block] = self._start(event, out)
            elif not known:
                self.release(event, out)

    def release(self, event: PublicEvent, out: Outbox) -> None:
        """Release one event that starts no block."""
        self.turn, self.attempt = max(self.turn, event.turn), max(self.attempt, event.attempt)
        match event:
            case Chunk():
                number = self.released_numbers.get(event.block, -1)
                if block := self.open.get(number):
                    self._write(number, block, event, out)
            case BlockComplete():
                number = self.released_numbers.get(event.block, -1)
                if block := self.open.get(number):
                    self._complete(number, block, event, out)
            case Retrying() | Restarted():
                drop_from = first_void(self.released_numbers.items(), event.drop_from, self.next_number)
                self.tool_verdicts.released = [call for call in self.tool_verdicts.released if call.block < drop_from]
                self.calls_without_result = [call for call in self.calls_without_result if call.block < drop_from]
                out.event(self.turn, self.attempt, type(event), **fields_of(event) | {"drop_from": drop_from})
            case _:
                fields = fields_of(event)
                if "block" in fields:  # the event belongs to a block; release it only if the block was
                    if fields["block"] not in self.released_numbers:
                        return
                    fields["block"] = self.released_numbers[fields["block"]]
                out.event(self.turn, self.attempt, type(event), **fields)

    def close(self, out: Outbox, why: str | None) -> None:
        """Complete all open blocks as cut. ``why``: error text for calls without a result; None: leave them
        unanswered.
        """
        for number, block in list(self.open.items()):
            fields: dict[str, Any] = {"block": number, "kind": block.kind, "cut": True}
            fields |= content_fields(block.kind, "".join(block.pieces), cut=True, free_text=block.free_text)
            if block.kind in ("tool_call", "tool_result", "server_tool"):
                fields |= {"tool_id": block.tool_id, "tool_name": block.tool_name}
            if block.kind == "tool_call":
                self.calls_without_result.append(CompleteCall(number, block.tool_id or "", block.tool_name or "", ""))
            out.event(self.turn, self.attempt, BlockComplete, **fields)
        self.open = {}
        for call in self.calls_without_result if why else ():
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
        self.calls_without_result = []

    # --- blocks -----------------------------------------------------------------------------------------------

    def _start(self, event: BlockStarted, out: Outbox) -> int:
        self.turn, self.attempt = max(self.turn, event.turn), max(self.attempt, event.attempt)
        number, self.next_number = self.next_number, self.next_number + 1
        self.open[number] = ReleasedBlock(
            event.kind, event.tool_id, event.tool_name, phase=event.phase, free_text=event.free_text
        )
        out.event(self.turn, self.attempt, BlockStarted, **fields_of(event) | {"block": number})
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
            visible=event.visible and block.kind in VISIBLE and out.shows(block.phase),
            part=event.tool_call_part,
            tool_id=block.tool_id,
            tool_name=block.tool_name,
        )

    def _complete(self, number: int, block: ReleasedBlock, event: BlockComplete, out: Outbox) -> None:
        del self.open[number]
        content = "".join(block.pieces)
        changed = changed_fields(event, block.kind, content)
        if not (changed or event.cut):
            self.intact.add(number)
        fields = fields_of(event) | {"block": number} | changed
        if block.kind == "tool_call":
            if event.input_error == NOT_PACKABLE:  # drafts and verdicts are msgpack; what is published is JSON
                fields |= content_fields(block.kind, content, as_json=True)
            tool_id, name = block.tool_id or "", block.tool_name or ""
            call = CompleteCall(number, tool_id, name, content, free_text=bool(block.free_text))
            self.calls_without_result.append(call)
            if not event.cut:
                self.tool_verdicts.released.append(call)
        elif block.kind == "server_tool" and block.tool_id and not event.cut:
            self.tool_verdicts.items.append(block.tool_id)
        out.event(self.turn, self.attempt, BlockComplete, **fields)

    def _of_withheld_call(self, event: BlockStarted) -> bool:
        """Whether it begins the result of a call that was never released, as a turn that fails gives to all its
        calls.
        """
        if event.kind != "tool_result" or not event.tool_id:
            return False
        return all(call.tool_id != event.tool_id for call in self.calls_without_result)

    def _answered(self, tool_id: str | None) -> None:
        for call in self.calls_without_result:
            if call.tool_id == tool_id:
                self.calls_without_result.remove(call)
                return


def _origin(draft: int, part: str, nth: int) -> str:
    return f"{draft} {part} {nth}"


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
        self.signs_of_life += 1
        self.since_ms = at_ms

    def record_progress(self, at_ms: int) -> None:
        """Record that something new was released."""
        self.record_sign_of_life(at_ms)
        self.judging_ms = at_ms
        self.workers_without_progress = 0
