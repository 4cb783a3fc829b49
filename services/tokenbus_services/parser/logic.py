"""What the parser does with one partition: a state machine for each open run, its outputs as writes of one commit."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from tokenbus.bus.keys import Keys, PublicTopic
from tokenbus.bus.scripts import Commit, call_field
from tokenbus.bus.scripts.runs import so_far_field
from tokenbus.core.blocks import BlockTable
from tokenbus.core.run import CloseAttempt, Effect, EndRun, NextTurn, Run, RunState, RunTools
from tokenbus.events.failure import ErrorInfo
from tokenbus.events.frames import (
    ANY_FRAME,
    Accepted,
    EventFrame,
    Lost,
    RawFrame,
    Rejected,
    Rules,
    encode,
    event_decoder,
)
from tokenbus.events.public import BlockComplete, BlockStarted, Chunk, PublicEvent
from tokenbus.events.public import encode as encode_public


class ParserLogic:
    """`Logic` of the parser (see tokenbus.bus.stage). The only writer of public topics and logs."""

    def __init__(
        self,
        partition: int,
        keys: Keys,
        *,
        topics: Collection[PublicTopic],
        open_run_ms: int,
        finished_run_ms: int,
    ) -> None:
        """``topics``: those of visible, chunks and blocks that are written; the times are the keys' lives."""
        self._keys = keys
        self._turns = keys.topic(partition, "turns")
        self._tools = keys.topic(partition, "tools")
        self._raw = keys.topic(partition, "raw")
        self._normalizer_lease = keys.lease(partition, "normalizer")
        self._open_run_ms = open_run_ms
        self._finished_run_ms = finished_run_ms
        streams: dict[PublicTopic, str] = {t: keys.topic(partition, t) for t in topics}
        self._visible = [s for t, s in streams.items() if t in ("visible", "chunks")]
        self._hidden = [s for t, s in streams.items() if t == "chunks"]
        self._blocks = [s for t, s in streams.items() if t == "blocks"]
        self._lifecycle = [keys.topic(partition, "runs")]
        self._runs: dict[str, Run] = {}
        self._changed: dict[str, Run] = {}

    def take(self, run: str, frame: bytes) -> None:
        events = event_decoder.decode(frame)
        machine = self._runs.get(run) or self._begin(run, events)
        if machine is None:
            return  # the run is over; what still comes of it is nobody's any more
        machine.handle(events)
        self._changed[run] = machine
        if machine.over:
            del self._runs[run]

    def fail(self, run: str, error: ErrorInfo) -> None:
        if machine := self._runs.pop(run, None):
            machine.fail(error)
            self._changed[run] = machine

    def is_open(self, run: str) -> bool:
        return run in self._runs

    def flush(self, commit: Commit) -> None:
        for machine in self._changed.values():
            self._write(machine, commit)
        self._changed = {}

    def mute(self) -> None:
        for machine in self._changed.values():
            machine.out.clear()
            machine.effects.clear()
        self._changed = {}

    def snapshot(self, run: str) -> bytes:
        return msgspec.msgpack.encode(self._runs[run].state)

    def restore(self, run: str, state: bytes) -> None:
        self._runs[run] = Run(msgspec.msgpack.decode(state, type=RunState))

    def recall(self, run: str, seq: int) -> None:
        self._runs[run].state.seq = seq

    def _begin(self, run: str, frame: EventFrame) -> Run | None:
        match frame.events[0]:
            case Accepted() as accepted:
                machine = Run.accept(run, accepted, frame.at_ms)
            case Rejected() as rejected:
                # Never accepted, so it never starts: its one event is its end.
                nothing = Accepted(rejected.provider, rejected.model, "fail", 0, Rules(), [])
                machine = Run(RunState(run, nothing, frame.at_ms, BlockTable(0, 1, 0, 0)))
            case _:
                return None
        self._runs[run] = machine
        return machine

    def _write(self, machine: Run, commit: Commit) -> None:
        s = machine.state
        run_key, log = self._keys.run(s.run), self._keys.log(s.run)
        first = s.seq == 0
        events = machine.out.number(s.run, s.seq)
        last = b""
        for event in events:
            last = encode_public(event)
            commit.publish(log, f"{event.attempt}-{event.seq}", last, self._topics_of(event))
        if events:
            s.seq += len(events)
            commit.put(run_key, "seq", s.seq)
            if first:
                commit.expire(log, self._open_run_ms)
        for effect in machine.effects:
            self._effect(machine, effect, last, commit)
        machine.effects.clear()

    def _topics_of(self, event: PublicEvent) -> list[str]:
        match event:
            case Chunk():
                return self._visible if event.visible else self._hidden
            case BlockStarted() | BlockComplete():
                return self._blocks
            case _:
                return self._lifecycle

    def _effect(self, machine: Run, effect: Effect, last: bytes, commit: Commit) -> None:
        s = machine.state
        run_key, log = self._keys.run(s.run), self._keys.log(s.run)
        match effect:
            case CloseAttempt(turn, attempt):
                self._close_attempt(s.run, turn, attempt, "the turn ended in the text", commit)
            case NextTurn(work, history, so_far):
                self._close_attempt(s.run, work.turn, work.attempt - 1, "a newer attempt began", commit)
                if history is not None:
                    commit.put(run_key, f"history:{work.turn}", encode(history))
                if so_far is not None:
                    commit.put(run_key, so_far_field(work.attempt), so_far)
                commit.put(run_key, "turn", work.turn, "attempt", work.attempt, "raw", 0)
                commit.append(self._turns, [s.run, encode(work)])
                commit.expire(run_key, self._open_run_ms)
                commit.expire(log, self._open_run_ms)
            case RunTools(work):
                for call in work:
                    commit.put(run_key, call_field(call.block), call.attempt)
                    commit.append(self._tools, [s.run, encode(call)])
            case EndRun(status):
                self._close_attempt(s.run, s.turn, s.attempt, f"the run is {status}", commit)
                commit.put(run_key, "status", status, "result", last)
                commit.expire(run_key, self._finished_run_ms)
                commit.expire(log, self._finished_run_ms)

    def _close_attempt(self, run: str, turn: int, attempt: int, reason: str, commit: Commit) -> None:
        lost = encode(RawFrame(turn, attempt, ANY_FRAME, 0, [Lost(reason)]))
        commit.close_attempt(self._keys.run(run), attempt, self._raw, self._normalizer_lease, run=run, lost=lost)
