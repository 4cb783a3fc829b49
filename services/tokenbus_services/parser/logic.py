"""The parser's work on one partition: one state machine per open run, with its outputs as writes of one commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from tokenbus.bus.keys import Keys, PublicTopic
from tokenbus.bus.run_record import (
    ATTEMPT,
    BYPASSED,
    CHOICE,
    ERROR,
    FINISH,
    JUDGING,
    MODEL,
    PROVIDER,
    RAW,
    RESULT,
    SEQ,
    STATUS,
    TENANT,
    TURN,
    call_field,
    history_field,
    so_far_field,
)
from tokenbus.bus.scripts import Arg, Commit
from tokenbus.bus.stage.logic import RunPosition
from tokenbus.core.request.tenant import tenant_of
from tokenbus.core.run.attempts.attempt_report import AttemptReport
from tokenbus.core.run.blocks.block_table import BlockTable
from tokenbus.core.run.blocks.open_blocks import OpenBlocks
from tokenbus.core.run.checkpoint import Checkpoints, Snapshot
from tokenbus.core.run.effects import (
    CloseAttempt,
    Decide,
    Draft,
    Effect,
    EndRun,
    ForgetRun,
    NextTurn,
    ReleaseFromPolicies,
    RunTools,
)
from tokenbus.core.run.gated import GatedRun, accept
from tokenbus.core.run.state import RunState
from tokenbus.core.run.state_machine import RunMachine
from tokenbus.events.decisions import Decided
from tokenbus.events.decisions import decoder as decided_decoder
from tokenbus.events.decisions import encode as encode_decided
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import (
    ANY_FRAME,
    CONTROL_ATTEMPT,
    Accepted,
    Control,
    Drafts,
    EventFrame,
    Lost,
    RawFrame,
    Rejected,
    RunLimits,
    TapedFrame,
    decode_events,
    encode,
)
from tokenbus.events.public import (
    TERMINAL,
    BlockComplete,
    Chunk,
    Incomplete,
    PublicEvent,
    RunEvent,
    RunFailedEvent,
    TerminalEvent,
)
from tokenbus.events.public import encode as encode_public
from tokenbus_services.parser.public_topics import PublicTopics

JUDGING_STEP_MS = 100
"""A run that waits for its policies all the time is written to wait since this much earlier, at the most."""


class RunObserver(Protocol):
    """Observes the course of runs and attempts without changing it."""

    def attempt_over(self, state: RunState, report: AttemptReport) -> None:
        """An attempt is over."""
        ...

    def lifecycle(self, state: RunState, event: RunEvent) -> None:
        """An event of the topic `runs` was written."""
        ...


class ParserLogic:
    """The parser's stage logic (see `tokenbus.bus.stage.stage`). The only writer of public topics and logs."""

    def __init__(
        self,
        partition: int,
        keys: Keys,
        *,
        topics: Collection[PublicTopic],
        open_run_ms: int,
        finished_run_ms: int,
        on_published: Callable[[PublicEvent], None] | None = None,
        observers: Sequence[RunObserver] = (),
        on_block: Callable[[RunState, BlockComplete], None] | None = None,
    ) -> None:
        """``topics``: which of visible, chunks and blocks are written. ``open_run_ms``, ``finished_run_ms``:
        lifetimes of the keys. ``on_published``: called with each event that is written. ``observers`` follow runs and
        attempts, except while they are only replayed. ``on_block``: called with each block that is written, before the
        observers see the end of its attempt.
        """
        self._keys = keys
        self._turns = keys.topic(partition, "turns")
        self._tools = keys.topic(partition, "tools")
        self._raw = keys.topic(partition, "raw")
        self._control = keys.topic(partition, "control")
        self._records = keys.topic(partition, "records")
        self._normalizer_lease = keys.lease(partition, "normalizer")
        self._drafts = keys.topic(partition, "drafts")
        self._policy_lease = keys.lease(partition, "policy")
        self._decisions = keys.topic(partition, "decisions")
        self._open_runs = keys.open_runs(partition)
        self._ended_runs = keys.ended_runs(partition)
        self._open_run_ms = open_run_ms
        self._finished_run_ms = finished_run_ms
        self._topics_of = PublicTopics(partition, keys, topics).of
        self._on_published = on_published
        self._observers = observers
        self._on_block = on_block
        self._runs: dict[str, RunMachine | GatedRun] = {}
        self._changed: dict[str, RunMachine | GatedRun] = {}
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
        machine = self._runs.get(run) or self._begin(run, events)
        if machine is None:
            return  # the run is over; later events are ignored
        if machine.state.accepted.record:
            self._tape(run, events)
        machine.handle(events, len(frame))
        self._changed[run] = machine
        if machine.over:
            del self._runs[run]
            self._checkpoints.pop(run, None)

    def fail(self, run: str, error: ErrorInfo) -> None:
        self._checkpoints.pop(run, None)
        if machine := self._runs.pop(run, None):
            machine.fail(error)
            self._changed[run] = machine

    def abandon(self, run: str, error: ErrorInfo) -> None:
        self._checkpoints.pop(run, None)
        if machine := self._runs.pop(run, None):
            machine.abandon(error)
            self._changed[run] = machine

    def learn(self, run: str, event: bytes) -> None:
        self._open_blocks.setdefault(run, OpenBlocks()).read(event)

    def fail_unreadable(self, run: str, error: ErrorInfo, standing: RunPosition) -> None:
        """End the run as `failed`, under its next seq; blocks still open in its log are cut."""
        self._runs.pop(run, None)
        self._checkpoints.pop(run, None)
        turn, attempt = standing.turn, max(1, standing.attempt)
        nothing = Accepted(provider="", model="", on_failure="fail", max_tool_depth=0, rules=RunLimits(), tools=[])
        blocks = BlockTable(turn, attempt, 0, 0)
        if open_blocks := self._open_blocks.pop(run, None):
            blocks.open = open_blocks.by_number
        state = RunState(run, nothing, _now_ms(), blocks, turn, attempt, standing.seq)
        self._changed[run] = machine = RunMachine(state)
        machine.fail(error)

    def is_open(self, run: str) -> bool:
        return run in self._runs

    def states(self) -> list[RunState]:
        """The states of the open runs, for the clock. Read-only."""
        return [machine.state for machine in self._runs.values()]

    def flush(self, commit: Commit) -> None:
        for run, taken in self._tapes.items():
            tape = self._keys.tape(run)
            for piece in taken:
                commit.append(tape, ["taken", encode(piece)], of_run=True)
            commit.expire(tape, self._open_run_ms)
        self._tapes = {}
        for machine in self._changed.values():
            self._write(machine, commit)
        self._changed = {}

    def discard_outputs(self) -> None:
        self._tapes = {}
        for machine in self._changed.values():
            machine.out.clear()
            machine.effects.clear()
            machine.reports.clear()
        self._changed = {}

    def repeat(self, lost: Commit, runs: Collection[str], commit: Commit) -> None:
        """Repeat drafts, decisions and records. Turns and tool calls are not given out again: the runs end."""
        for entry in lost.appended(self._drafts):
            for name, data in entry.items():
                if name.decode() in runs:
                    self._draft(name.decode(), data, commit)
        for entry in lost.appended(self._records):
            for name, data in entry.items():
                if name.decode() in runs:
                    commit.append(self._records, [name.decode(), data])
        for data in lost.published_to_topic(self._decisions):
            if decided_decoder.decode(data).run in runs:
                commit.publish_to_topic(self._decisions, data)

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
        self._runs[run] = GatedRun(machine) if state.gate else machine

    def recall(self, run: str, seq: int) -> None:
        self._runs[run].state.seq = seq

    def _tape(self, run: str, frame: EventFrame) -> None:
        bare = frame if frame.attempt == CONTROL_ATTEMPT else msgspec.structs.replace(frame, events=[])
        self._tapes.setdefault(run, []).append(TapedFrame(bare, len(frame.events)))

    def _begin(self, run: str, frame: EventFrame) -> RunMachine | GatedRun | None:
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
                )
                machine = RunMachine(RunState(run, nothing, frame.at_ms, BlockTable(0, 1, 0, 0)))
            case _:
                return None
        self._runs[run] = machine
        return machine

    def _write(self, machine: RunMachine | GatedRun, commit: Commit) -> None:
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
            commit.expire(log, self._open_run_ms)
        for effect in machine.effects:
            self._effect(machine, effect, last, end, commit)
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
        told = [e for e in events if type(e) is not Chunk]  # most are chunks
        for event in told if self._on_block else ():
            if self._on_block and isinstance(event, BlockComplete):
                self._on_block(state, event)
        lifecycle = [e for e in told if isinstance(e, RunEvent)]
        for observer in self._observers:
            for report in reports:
                observer.attempt_over(state, report)
            for event in lifecycle:
                observer.lifecycle(state, event)

    def _effect(
        self, machine: RunMachine | GatedRun, effect: Effect, last: bytes, end: TerminalEvent | None, commit: Commit
    ) -> None:
        s = machine.state
        run_key, log = self._keys.run(s.run), self._keys.log(s.run)
        match effect:
            case CloseAttempt(turn, attempt):
                self._close_attempt(s.run, turn, attempt, "the turn ended in the text", commit)
            case NextTurn(work, history, so_far):
                self._close_attempt(s.run, work.turn, work.attempt - 1, "a newer attempt began", commit)
                if history is not None:
                    commit.put(run_key, history_field(work.turn), encode(history))
                if so_far is not None:
                    commit.drop(run_key, so_far_field(work.attempt - 1))  # may be large, and is part of the new one
                    commit.put(run_key, so_far_field(work.attempt), encode([so_far]))
                commit.put(run_key, TURN, work.turn, ATTEMPT, work.attempt, RAW, 0)
                if work.choice:
                    commit.put(run_key, CHOICE, work.choice, PROVIDER, s.target.provider, MODEL, s.target.model)
                held = s.gate is not None and not s.gate.bypassed
                work = msgspec.structs.replace(work, tenant=tenant_of(s.accepted.metadata), held=held)
                commit.append(self._turns, [s.run, encode(work)])
                commit.expire(run_key, self._open_run_ms)
                commit.expire(log, self._open_run_ms)
            case RunTools(work):
                metadata = s.accepted.metadata
                whose = {
                    "tenant": tenant_of(metadata),
                    "metadata": metadata or None,
                    "traceparent": s.accepted.traceparent,
                }
                for call in work:
                    commit.put(run_key, call_field(call.block), call.attempt)
                    commit.append(self._tools, [s.run, encode(msgspec.structs.replace(call, **whose))])
            case Draft(events, over):
                policing = s.accepted.policing
                traceparent = s.accepted.traceparent if events and events[0].seq == 0 else ""
                drafts = Drafts(policing.names if policing else (), events, over, traceparent)
                self._draft(s.run, encode(drafts), commit)
            case Decide(number, turn, attempt, decision):
                decided = Decided.of(s.run, number, turn, attempt, decision)
                commit.publish_to_topic(self._decisions, encode_decided(decided))
            case ReleaseFromPolicies():
                commit.put(run_key, BYPASSED, 1)
            case EndRun(status):
                self._close_attempt(s.run, s.turn, s.attempt, f"the run is {status}", commit)
                commit.put(run_key, STATUS, status, RESULT, last, *_summary(s, end))
                places = (self._open_runs, self._ended_runs)
                commit.end_run(run_key, *places, run=s.run, keep_ms=self._finished_run_ms)
                commit.expire(run_key, self._finished_run_ms)
                commit.expire(log, self._finished_run_ms)
                if s.accepted.record:
                    commit.expire(self._keys.tape(s.run), self._finished_run_ms)
                    commit.append(self._records, [s.run, status])

            case ForgetRun():
                for key in (run_key, log, self._keys.tape(s.run)):  # so that none stays forever
                    commit.expire(key, self._finished_run_ms)

    def _draft(self, run: str, data: bytes, commit: Commit) -> None:
        commit.append(self._drafts, [run, data])
        commit.count(self._policy_lease, len(data))

    def _close_attempt(self, run: str, turn: int, attempt: int, reason: str, commit: Commit) -> None:
        lost = encode(RawFrame(turn, attempt, ANY_FRAME, 0, [Lost(reason)]))
        closed = encode(Control(run, "closed", attempt))
        places = (self._raw, self._normalizer_lease, self._control)
        commit.close_attempt(self._keys.run(run), attempt, *places, run=run, lost=lost, control_frame=closed)


def _summary(s: RunState, end: TerminalEvent | None) -> list[Arg]:
    """Fields of the run's hash by which an ended run is listed. A run accepted by an older version has none before."""
    fields: list[Arg] = []
    if s.target.provider:  # else the run was refused, or its state was unreadable
        fields += [PROVIDER, s.target.provider, MODEL, s.target.model]
    if tenant := tenant_of(s.accepted.metadata):
        fields += [TENANT, tenant]
    if end:
        fields += [FINISH, end.finish]
        error = end.error if isinstance(end, Incomplete | RunFailedEvent) else None
        fields += [ERROR, error.code] if error else []
    return fields


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
