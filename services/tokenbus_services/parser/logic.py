"""The parser's work on one partition: one state machine per open run, with its outputs as writes of one commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec
import structlog

from tokenbus.bus.keys import Keys, PublicTopic
from tokenbus.bus.run_record import JUDGING, SEQ, RunLifetimes
from tokenbus.bus.scripts import Arg, Commit
from tokenbus.bus.scripts.runs.away import AwayRun
from tokenbus.bus.stage.logic import RunPosition, StageLogic
from tokenbus.core.request.bounds import tenant_of
from tokenbus.core.run.attempts import AttemptReport
from tokenbus.core.run.blocks.block_table import BlockTable, OpenBlocks
from tokenbus.core.run.checkpoint import Checkpoints, Snapshot
from tokenbus.core.run.gated_run import GatedRun, accept
from tokenbus.core.run.sealed_run import AnyRun, SealedRun
from tokenbus.core.run.state import RunState
from tokenbus.core.run.state_machine import RunMachine
from tokenbus.core.run.waits import children_of, looked_at_again_ms, rests
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import (
    CONTROL_ATTEMPT,
    Accepted,
    BusEvent,
    EventFrame,
    PutAway,
    PutBack,
    Rejected,
    RunLimits,
    TapedFrame,
    decode_events,
    encode,
)
from tokenbus.events.public import (
    TERMINAL,
    BlockComplete,
    BlockProgress,
    BlockStarted,
    Chunk,
    ImagePreview,
    PublicEvent,
    RunEvent,
    ToolProgress,
    Waiting,
)
from tokenbus.events.public import encode as encode_public
from tokenbus_services.parser.effect_writer import EffectWriter

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

UNREADABLE = "the state of the run cannot be read"
JUDGING_STEP_MS = 100
"""The stored start of a continuous wait is at most this much too early."""


class RunObserver(Protocol):
    """Observes the course of runs and attempts without changing it."""

    def attempt_over(self, state: RunState, report: AttemptReport) -> None: ...

    def lifecycle(self, state: RunState, event: RunEvent) -> None:
        """An event of the topic `runs` was written."""
        ...


class ParserLogic(StageLogic):
    """The parser's stage logic (see `tokenbus.bus.stage.stage`). The only writer of public topics and logs."""

    learns_from_log = True

    def __init__(
        self,
        partition: int,
        keys: Keys,
        *,
        topics: Collection[PublicTopic],
        lifetimes: RunLifetimes,
        on_published: Callable[[PublicEvent], None] | None = None,
        observers: Sequence[RunObserver] = (),
        on_block: Callable[[RunState, BlockComplete], None] | None = None,
        on_sealed: Callable[[], None] = lambda: None,
    ) -> None:
        """``topics``: which of visible, chunks and blocks are written. ``on_published``: called with each event
        that is written. ``observers`` follow runs and attempts, except while they are only replayed. ``on_block``:
        called with each block that is written, before the observers see the end of its attempt. ``on_sealed``: called
        when a run's end waits to be published.
        """
        self._keys = keys
        self.outputs = 0
        self._effects = EffectWriter(partition, keys, lifetimes)
        self._lifetimes = lifetimes
        self._topics_of = PublicTopics(partition, keys, topics).of
        self._on_published = on_published
        self._observers = observers
        self._on_block = on_block
        self._on_sealed = on_sealed
        self._runs: dict[str, AnyRun] = {}
        self._changed: dict[str, AnyRun] = {}
        self._resting: dict[str, int] = {}
        """Since when runs only wait: nearly in this order, and some that do not any more."""
        self.returned: set[str] = set()
        """Runs that were put away and are back, until the clock takes them from here."""
        self._sealed: set[str] = set()
        """The runs whose end waits to be published, and some that ended since `sealed` was asked for."""
        self._checkpoints: dict[str, Checkpoints] = {}
        """By long run."""
        self._open_blocks: dict[str, OpenBlocks] = {}
        """By run that `fail_unreadable` will end: the open blocks of its log."""
        self._tapes: dict[str, list[TapedFrame]] = {}
        """By recorded run: the frames that were applied."""
        self._judging: dict[str, int] = {}
        """By open run under policies: what was written of how long it waits for them."""

    def apply(self, run: str, frame: bytes) -> None:
        events = decode_events(frame)
        if events.attempt == CONTROL_ATTEMPT and events.events and self._moves(run, events.events[0]):
            return
        machine = self._runs.get(run) or self._begin(run, events)
        if machine is None:
            return  # the run is over; later events are ignored
        if machine.state.accepted.record:
            self._tape(run, events)
        before = len(machine.out)
        machine.handle(events, len(frame))
        self.outputs += len(machine.out) - before
        self._changed[run] = machine
        if machine.state.phase == "tools":
            self.rests_since(machine.state, machine.state.seen_ms)
        if machine.over:
            self._close(run, machine)

    def rests_since(self, s: RunState, at_ms: int) -> None:
        """Note when the run was last seen, if it only waits."""
        self._resting.pop(s.run, None)
        if rests(s):
            self._resting[s.run] = at_ms

    def next_resting(self, until_ms: int) -> RunState | None:
        """The run that only waits for longest, if it does since then."""
        while self._resting:
            run, since_ms = next(iter(self._resting.items()))
            if (machine := self._runs.get(run)) and rests(machine.state):
                return machine.state if since_ms <= until_ms else None
            del self._resting[run]
        return None

    def _moves(self, run: str, event: BusEvent) -> bool:
        """Forget a run that is put away, or take it back; whether the event says so. Nothing of it is published."""
        match event:
            case PutAway():
                for kept in (self._runs, self._checkpoints, self._judging):
                    kept.pop(run, None)
                self.returned.discard(run)
            case PutBack() if run not in self._runs:
                try:
                    self.restore(run, event.state)
                except Exception as e:  # written by another version, for example
                    log.error("run_unreadable", run=run, problem=f"{type(e).__name__}: {e}")
                    error = ErrorInfo(code="state_unreadable", kind="internal", message=UNREADABLE)
                    at = RunPosition(event.turn, event.attempt, event.seq, tenant=event.tenant)
                    self.fail_unreadable(run, error, at)
                self.returned.add(run)
            case _:
                return isinstance(event, PutBack)
        return True

    def put_away(self, run: str, at_ms: int) -> AwayRun:
        """What is stored of this run, which rests."""
        s = self._runs[run].state
        tenant = tenant_of(s.accepted.metadata)
        back = PutBack(self.snapshot(run), s.turn, s.attempt, s.seq, tenant)
        frame = encode(EventFrame(0, CONTROL_ATTEMPT, at_ms, [back]))
        children = [self._keys.run(child) for child in children_of(s)]
        return AwayRun(self._keys.run(run), run, frame, looked_at_again_ms(s, at_ms), children)

    def fail(self, run: str, error: ErrorInfo) -> None:
        self._checkpoints.pop(run, None)
        if machine := self._runs.pop(run, None):
            machine.fail(error)
            self._changed[run] = machine

    def _close(self, run: str, machine: AnyRun) -> None:
        """Forget a run that is over, or hold back its end."""
        if machine.state.accepted.durable and (sealed := SealedRun.seal(machine)):
            self._runs[run] = self._changed[run] = sealed
            self._note_sealed(run)
            return
        del self._runs[run]
        self._checkpoints.pop(run, None)

    def abandon(self, run: str, error: ErrorInfo) -> None:
        if machine := self._runs.get(run):
            machine.abandon(error)
            self._changed[run] = machine
            if machine.over:
                self._close(run, machine)

    def learn(self, run: str, event: bytes) -> None:
        self._open_blocks.setdefault(run, OpenBlocks()).read(event)

    def fail_unreadable(self, run: str, error: ErrorInfo, position: RunPosition) -> None:
        """End the run as `failed`, under its next seq; blocks still open in its log are cut."""
        self._runs.pop(run, None)
        self._checkpoints.pop(run, None)
        turn, attempt = position.turn, max(1, position.attempt)
        nothing = Accepted(
            provider="",
            model="",
            on_failure="fail",
            max_tool_depth=0,
            rules=RunLimits(),
            tools=[],
            metadata={"tenant": position.tenant} if position.tenant else None,
        )
        blocks = BlockTable(turn, attempt, 0, 0)
        if open_blocks := self._open_blocks.pop(run, None):
            blocks.open = open_blocks.by_number
        state = RunState(
            run=run,
            accepted=nothing,
            accepted_ms=_now_ms(),
            blocks=blocks,
            turn=turn,
            attempt=attempt,
            seq=position.seq,
            children=1,  # for all that is known
        )
        self._changed[run] = machine = RunMachine(state)
        machine.fail(error)

    def is_open(self, run: str) -> bool:
        return run in self._runs

    def states(self) -> list[RunState]:
        """The states of the open runs, for the clock. Read-only."""
        return [machine.state for machine in self._runs.values()]

    def sealed(self) -> list[RunState]:
        """The states of the runs whose end waits to be published. Read-only."""
        found = {run: machine.state for run in self._sealed if isinstance(machine := self._runs.get(run), SealedRun)}
        self._sealed = set(found)
        return list(found.values())

    def _note_sealed(self, run: str) -> None:
        self._sealed.add(run)
        self._on_sealed()

    def flush(self, commit: Commit) -> None:
        for run, taken in self._tapes.items():
            tape = self._keys.tape(run)
            for piece in taken:
                commit.append(tape, ["taken", encode(piece)], of_run=True)
            self._lifetimes.renew(commit, tape)
        self._tapes = {}
        for machine in self._changed.values():
            self._write(machine, commit)
        self._changed = {}
        self.outputs = 0

    def discard_outputs(self) -> None:
        self._tapes = {}
        for machine in self._changed.values():
            machine.out.clear()
            machine.effects.clear()
            machine.reports.clear()
        self._changed = {}
        self.outputs = 0

    def repeat(self, lost: Commit, runs: Collection[str], commit: Commit) -> None:
        self._effects.repeat(lost, runs, commit)

    def snapshot(self, run: str) -> bytes:
        return msgspec.msgpack.encode(self._runs[run].state)

    def restore(self, run: str, state: bytes) -> None:
        self._restore(run, msgspec.msgpack.decode(state, type=RunState))

    def snapshot_in_pieces(self, run: str) -> Snapshot | None:
        return self._checkpoints.setdefault(run, Checkpoints()).save(self._runs[run].state)

    def restore_from_pieces(self, run: str, head: bytes, pieces: Mapping[int, bytes]) -> None:
        state, self._checkpoints[run] = Checkpoints.load(head, pieces)
        self._restore(run, state)

    def _restore(self, run: str, state: RunState) -> None:
        machine = RunMachine(state)
        ended = GatedRun(machine) if state.gate else machine
        self._runs[run] = SealedRun(ended) if state.sealed else ended
        self.rests_since(state, max(state.seen_ms, state.waits_since_ms))
        if state.sealed:
            self._note_sealed(run)

    def recall(self, run: str, seq: int) -> None:
        self._runs[run].state.seq = seq

    def _tape(self, run: str, frame: EventFrame) -> None:
        bare = frame if frame.attempt == CONTROL_ATTEMPT else msgspec.structs.replace(frame, events=[])
        self._tapes.setdefault(run, []).append(TapedFrame(bare, len(frame.events)))

    def _begin(self, run: str, frame: EventFrame) -> AnyRun | None:
        match frame.events[0]:
            case Accepted() as accepted:
                machine = accept(run, accepted, frame.at_ms)
            case Rejected() as rejected:
                # It was never accepted, so it never starts: its only event is its end.
                nothing = Accepted(
                    provider=rejected.provider,
                    model=rejected.model,
                    on_failure="fail",
                    max_tool_depth=0,
                    rules=RunLimits(),
                    tools=[],
                    metadata={"tenant": rejected.tenant} if rejected.tenant else None,
                    webhooks=rejected.webhooks,
                )
                machine = RunMachine(RunState(run, nothing, frame.at_ms, BlockTable(0, 1, 0, 0)))
            case _:
                return None
        self._runs[run] = machine
        return machine

    def _write(self, machine: AnyRun, commit: Commit) -> None:
        s = machine.state
        run_key, log = self._keys.run(s.run), self._keys.log(s.run)
        first = s.seq == 0
        events = machine.out.number(s.run, s.seq)
        last, end = b"", None
        for event in events:
            last = encode_public(event)
            commit.publish(log, f"{event.attempt}-{event.seq}", last, self._topics_of(event))
            if isinstance(event, TERMINAL):
                end = event
            if isinstance(event, (*TERMINAL, Waiting)):
                self._effects.tell(s, event, commit)
            if self._on_published:
                self._on_published(event)
        fields: list[Arg] = []
        if events:
            s.seq += len(events)
            fields += [SEQ, s.seq]
        if s.gate and not machine.over:
            fields += self._judging_fields(s.run, s.gate.waits_since_ms)
        elif s.gate:
            self._judging.pop(s.run, None)
        if fields:
            commit.put(run_key, *fields)
        if events and first:
            self._lifetimes.renew(commit, log)
        self._effects.order_in_tree(machine, events, commit)
        for effect in machine.effects:
            self._effects.write(machine, effect, last, end, commit)
        machine.effects.clear()
        if self._observers:
            self._observe(s, machine.reports, events)
        machine.reports.clear()

    def _judging_fields(self, run: str, since_ms: int) -> list[Arg]:
        """What to write of how long the run waits for its policies: with 50 verdicts a second, seldom a change."""
        written = self._judging.get(run)
        if since_ms == written or (since_ms and written and since_ms - written < JUDGING_STEP_MS):
            return []
        self._judging[run] = since_ms
        return [JUDGING, since_ms]

    def _observe(self, state: RunState, reports: Sequence[AttemptReport], events: Sequence[PublicEvent]) -> None:
        without_chunks = [e for e in events if type(e) is not Chunk]  # most are chunks
        for event in without_chunks if self._on_block else ():
            if self._on_block and isinstance(event, BlockComplete):
                self._on_block(state, event)
        lifecycle = [e for e in without_chunks if isinstance(e, RunEvent)]
        for observer in self._observers:
            for report in reports:
                observer.attempt_over(state, report)
            for event in lifecycle:
                observer.lifecycle(state, event)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class PublicTopics:
    """The streams of one partition's public topics."""

    def __init__(self, partition: int, keys: Keys, topics: Collection[PublicTopic]) -> None:
        """``topics``: which of visible, chunks and blocks are written; `runs` always is."""
        streams: dict[PublicTopic, str] = {t: keys.topic(partition, t) for t in topics}
        self._visible = [s for t, s in streams.items() if t in ("visible", "chunks")]
        self._hidden = [s for t, s in streams.items() if t == "chunks"]
        self._blocks = [s for t, s in streams.items() if t == "blocks"]
        self._lifecycle = [keys.topic(partition, "runs")]

    def of(self, event: PublicEvent) -> list[str]:
        """The streams for this event."""
        match event:
            case Chunk():
                return self._visible if event.visible else self._hidden
            case BlockStarted() | ImagePreview() | BlockProgress() | BlockComplete() | ToolProgress():
                return self._blocks
            case _:
                return self._lifecycle
