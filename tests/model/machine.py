"""The state machine: its rules are what may happen at any time, its invariants what holds after each of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.e2e import judge
from tests.model import story
from tests.model.actors import TTL_MS, Attempt, ChainedWorker, StageWorker, ToolCall, Wire
from tests.model.conversation import Conversation, Writer
from tests.model.oracle import Undisturbed, log_of, normalized, unjoined
from tests.run_calls import accept_call, cancel_call
from tokenbus.bus.keys import InternalTopic, Keys
from tokenbus.bus.run_record import RunLifetimes
from tokenbus.bus.server.stream_reader import Entry, id_key
from tokenbus.bus.stage.logic import StageLogic
from tokenbus.events.frames import (
    ANY_FRAME,
    CancelRequested,
    Control,
    Ended,
    Lost,
    ToolReturned,
    encode,
    event_decoder,
    raw_decoder,
    tool_decoder,
    turn_decoder,
)
from tokenbus_services.normalizer.logic import NormalizerLogic
from tokenbus_services.parser.logic import ParserLogic

KEYS = Keys("model", 1)
RUNS = ("a", "b", "c")
STAGES: dict[str, InternalTopic] = {"normalizer": "raw", "parser": "events"}
TERMINAL = ("completed", "incomplete", "failed", "cancelled")

stages = st.sampled_from(sorted(STAGES))
names = st.sampled_from(["first", "second"])
runs = st.sampled_from(RUNS)
between = st.sampled_from(["nothing", "a cancel", "a frame", *STAGES])
"""What may come between a flush and its script; of a stage: another worker that takes the partition over."""
any_of = st.integers(0, 20)
"""Which of those that there are, counted round."""


def logic_of(stage: str) -> StageLogic:
    if stage == "normalizer":
        return NormalizerLogic(0, KEYS)
    topics = ("visible", "chunks", "blocks")
    return ParserLogic(0, KEYS, topics=topics, lifetimes=RunLifetimes(TTL_MS, TTL_MS, TTL_MS))


class Protocol(RuleBasedStateMachine):
    """A few runs in one partition, two workers of each stage, and as many attempts and calls as come."""

    wire: Wire
    writer: Writer
    """Set by the test."""
    session: Conversation | None = None
    """See `Conversing`."""

    def __init__(self) -> None:
        super().__init__()
        self.wire.redis.flushdb()
        self.workers = {
            (stage, name): StageWorker(
                self.wire, KEYS, name=name, group=stage, topic=topic, logic=lambda stage=stage: logic_of(stage)
            )
            for stage, topic in STAGES.items()
            for name in ("first", "second", "last")
        }
        self.chained = {
            name: ChainedWorker(self.wire, self.workers["normalizer", name], self.workers["parser", name])
            for name in ("first", "second")
        }
        self.oracles = {stage: Undisturbed(lambda stage=stage: logic_of(stage)) for stage in STAGES}
        self.seen: dict[InternalTopic, list[Entry]] = {"raw": [], "events": [], "turns": [], "tools": []}
        self.accepted: set[str] = set()
        self.attempts: list[Attempt] = []
        self.calls: list[ToolCall] = []
        self.taken = Counter[tuple[str, int]]()
        self.watermarks = dict.fromkeys(STAGES, "0-0")
        self._checked: list[object] = []
        """What there was at the last look: if nothing came, nothing needs to be judged again."""
        self._raw_checked = self._events_checked = 0
        groups: dict[InternalTopic, str] = {"turns": "fetcher", "tools": "tools"}
        for topic, group in groups.items():
            self.wire.redis.xgroup_create(KEYS.topic(0, topic), group, id="0", mkstream=True)

    @property
    def begun(self) -> set[str]:
        """Runs that there are: those that were accepted, and those that the session began."""
        return self.accepted.union(self.session.runs if self.session else ())

    @property
    def all_runs(self) -> list[str]:
        """Runs that there may be."""
        return [*RUNS, *(self.session.runs if self.session else ())]

    # --- requests -------------------------------------------------------------------------------------------------

    @rule(run=runs)
    def accept(self, run: str) -> None:
        """A request, which may come any number of times."""
        call = accept_call(KEYS, run, frame=story.accepted(), work=story.first_turn(run), ttl_ms=TTL_MS)
        reply = self.wire.run(call)
        assert (reply == b"new") == (run not in self.accepted), "a run is accepted once"
        self.accepted.add(run)

    @rule(run=runs)
    def cancel(self, run: str) -> None:
        call = cancel_call(KEYS, run, frame=story.cancel_asked(), told=encode(Control(run)), awaited_ms=TTL_MS)
        self.wire.run(call)

    # --- fetchers -------------------------------------------------------------------------------------------------

    @rule(name=names)
    def read_turn(self, name: str) -> None:
        """A fetcher takes the next attempt that is to be made."""
        for entry_id, run, data in self._read("turns", "fetcher", name):
            work = turn_decoder.decode(data)
            attempt = Attempt(self.wire, KEYS, name, entry_id, work)
            status, present = self.wire.redis.hmget(KEYS.run(run), "status", "attempt")
            if status == b"open" and int(present) == work.attempt:
                self.attempts.append(attempt)
            else:
                attempt.finish()

    @precondition(lambda self: self.attempts)
    @rule(which=any_of, reply_lost=st.booleans())
    def write(self, which: int, reply_lost: bool) -> None:
        """One more frame of some attempt, be it a zombie's."""
        attempt = self._one(self.attempts, which)
        if attempt.write(reply_lost=reply_lost):
            attempt.finish()
            self.attempts.remove(attempt)

    @precondition(lambda self: self.attempts)
    @rule(which=any_of, name=names, frames=st.integers(0, 2))
    def deliver_again(self, which: int, name: str, frames: int) -> None:
        """The server forgot that it had handed the item out, and a second worker begins the same attempt."""
        self.attempts.append(self._one(self.attempts, which).again(name))
        for _ in range(frames):
            self.write(-1, reply_lost=False)

    @precondition(lambda self: self.attempts)
    @rule(which=any_of)
    def take_over_turn(self, which: int) -> None:
        """The worker counts as dead, and another closes its attempt; it may be a zombie and write on."""
        attempt = self._one(self.attempts, which).again("last")
        self.wire.redis.xclaim(KEYS.topic(0, "turns"), "fetcher", "last", 0, [attempt.entry_id])
        attempt.lose()
        attempt.finish()

    @precondition(lambda self: self.attempts)
    @rule(which=any_of)
    def fetcher_dies(self, which: int) -> None:
        self.attempts.remove(self._one(self.attempts, which))

    # --- stages ---------------------------------------------------------------------------------------------------

    @rule(stage=stages, name=names)
    def take(self, stage: str, name: str) -> None:
        """A worker asks for the partition, and replays it."""
        worker = self.workers[stage, name]
        if worker.part is None and (part := worker.take()):
            oracle = self.oracles[stage]
            assert part.offset == oracle.offset
            oracle.check_memory(part.logic, self.all_runs)
            worker.recall([run for run in self.all_runs if part.logic.is_open(run)])

    @rule(stage=stages, name=names)
    def is_followed(self, stage: str, name: str) -> None:
        """A worker takes over at once from one that is thought dead, which may have a commit under way."""
        if self.workers[stage, name].part is None:
            self.lease_runs_out(stage)
            self.take(stage, name)

    @rule(stage=stages)
    def lease_runs_out(self, stage: str) -> None:
        """Its owner was silent for too long. It does not know."""
        if self.wire.redis.exists(KEYS.lease(0, stage)):
            self.wire.redis.hset(KEYS.lease(0, stage), "until", 0)

    @rule(stage=stages, name=names, count=st.integers(1, 4))
    def work(self, stage: str, name: str, count: int) -> None:
        """Read a batch and work it in; the commit is not sent yet."""
        worker = self.workers[stage, name]
        locked = name in self.chained and self.chained[name].pending
        if worker.part and not worker.pending and not locked:
            worker.prepare(count)

    @rule(stage=stages, name=names, reply_lost=st.booleans())
    def commit(self, stage: str, name: str, reply_lost: bool) -> None:
        """Send the commit that waits, however old it is."""
        worker = self.workers[stage, name]
        if worker.pending:
            token: bytes = worker.pending.args[0].encode()  # pyright: ignore
            owns = self.wire.redis.hget(KEYS.lease(0, stage), "token") == token
            verdict = worker.send(reply_lost=reply_lost)
            assert owns == (verdict != "fenced"), f"{verdict} for {'the owner' if owns else 'a zombie'}"

    @rule(stage=stages, name=names)
    def commit_again(self, stage: str, name: str) -> None:
        """The reply is lost, and the commit is sent again."""
        self.work(stage, name, 10)
        for reply_lost in (True, False):
            self.commit(stage, name, reply_lost=reply_lost)

    @rule(stage=stages, name=names)
    def stage_worker_dies(self, stage: str, name: str) -> None:
        self.chained[name].crash()
        self.workers[stage, name].crash()

    # --- both stages in one process ---------------------------------------------------------------------------------

    @precondition(lambda self: self.attempts)
    @rule(which=any_of, name=names)
    def apply_ahead(self, which: int, name: str) -> None:
        """A process that has both stages applies the next frame of an attempt; the script is not sent yet."""
        attempt, worker = self._one(self.attempts, which), self.chained[name]
        if worker.idle and not any(c.pending and c.pending[1] is attempt for c in self.chained.values()):
            worker.prepare(attempt)

    @rule(name=names, reply_lost=st.booleans())
    def write_chained(self, name: str, reply_lost: bool) -> None:
        """Send the script that waits, however old it is."""
        worker = self.chained[name]
        if worker.pending:
            attempt = worker.pending[1]
            owns = worker.owns(self.wire.redis, KEYS)
            verdict = worker.send(reply_lost=reply_lost)
            assert owns == (verdict != "fenced"), f"{verdict} for {'the owner' if owns else 'a zombie'}"
            if verdict in ("ok", "already") and not reply_lost and attempt.over and attempt in self.attempts:
                attempt.finish()
                self.attempts.remove(attempt)

    @rule(run=runs, which=any_of, name=names, frames=st.integers(1, 4), reply_lost=st.booleans(), between=between)
    def a_short_way(self, run: str, which: int, name: str, frames: int, reply_lost: bool, between: str) -> None:
        """A process that has both partitions writes frames of an attempt; something may come before the last script."""
        self.accept(run)
        for _ in range(3):
            self.read_turn(name)
        for left in reversed(range(frames)):
            self._catch_up(name)
            if not self.attempts:
                return
            if not self.chained[name].idle:
                self.write(-1, reply_lost=False)
                continue
            self.apply_ahead(-1, name)
            if not left:
                self._come_between(between, run, which, name)
            for lost in [True, False] if reply_lost else [False, False]:
                self.write_chained(name, reply_lost=lost)

    def _catch_up(self, name: str) -> None:
        """Both partitions are this worker's, and it has applied all of their input."""
        if self.chained[name].pending:
            return
        for stage in STAGES:
            self.the_stages_wrote_what_an_undisturbed_one_writes()
            self.is_followed(stage, name)
            for _ in range(2):
                self.commit(stage, name, reply_lost=False)
                self._look()
                self.work(stage, name, 100)
            self.commit(stage, name, reply_lost=False)
            self._look()

    def _come_between(self, what: str, run: str, which: int, name: str) -> None:
        if what == "a cancel":
            self.cancel(run)
        elif what == "a frame" and self.attempts:
            self.write(which + 1, reply_lost=False)
        elif what in STAGES:
            other = "first" if name == "second" else "second"
            self.chained[other].crash()
            self.workers[what, other].crash()
            self.the_stages_wrote_what_an_undisturbed_one_writes()
            self.is_followed(what, other)

    # --- tools ----------------------------------------------------------------------------------------------------

    @rule(name=names)
    def read_call(self, name: str) -> None:
        """An executor takes a call. What it holds it may hand in at any time, and any number of times."""
        for entry_id, _, data in self._read("tools", "tools", name):
            self.calls.append(ToolCall(self.wire, KEYS, entry_id, tool_decoder.decode(data)))

    @precondition(lambda self: self.calls)
    @rule(which=any_of)
    def hand_in(self, which: int) -> None:
        call = self._one(self.calls, which)
        self.taken[call.work.run, call.work.block] += call.hand_in(story.result(call.work.turn, call.work.block))

    @rule(name=names)
    def a_quiet_moment(self, name: str) -> None:
        """Everybody gets on a little: so that histories get far enough for what happens late in a run."""
        self.read_turn(name)
        for attempt in [*self.attempts] * 3:
            if attempt in self.attempts:
                self.write(self.attempts.index(attempt), reply_lost=False)
        for stage in STAGES:
            self._look()
            self.take(stage, name)
            self.work(stage, name, 10)
            self.commit(stage, name, reply_lost=False)
        self.read_call(name)

    # --- what holds -----------------------------------------------------------------------------------------------

    @invariant()
    def the_stages_wrote_what_an_undisturbed_one_writes(self) -> None:
        self._look()
        now = [*map(len, self.seen.values()), *map(self._lease, STAGES)]
        if now == self._checked:
            return
        self._checked = now
        for stage, oracle in self.oracles.items():
            offset, watermark = self._lease(stage)
            assert id_key(self.watermarks[stage]) <= id_key(watermark) <= id_key(offset)
            self.watermarks[stage] = watermark
            oracle.advance(offset)
        frames = [(run.decode(), frame) for _, fields in self.seen["events"] for run, frame in fields.items()]
        events = self.oracles["normalizer"].appended[KEYS.topic(0, "events")]
        assert normalized(frames) == normalized(events)
        parser = self.oracles["parser"]
        for run in self.all_runs:
            log = log_of(self.wire.redis, KEYS, run)
            assert [event["seq"] for event in log] == list(range(len(log))), "seq has a gap or a double"
            assert unjoined(log) == unjoined(parser.published[KEYS.log(run)])
        work: tuple[InternalTopic, ...] = ("turns", "tools")
        for topic in work:
            found = [(run.decode(), frame) for _, fields in self.seen[topic] for run, frame in fields.items()]
            handed_out = [item for item in found if topic == "tools" or turn_decoder.decode(item[1]).attempt > 1]
            assert _by_run(handed_out) == _by_run(parser.appended[KEYS.topic(0, topic)])

    @invariant()
    def each_run_is_listed_once_as_open_or_as_ended(self) -> None:
        redis = self.wire.redis
        listed = [set(redis.zrange(key, 0, -1)) for key in (KEYS.open_runs(0), KEYS.ended_runs(0))]
        begun = self.begun
        over = {run for run in begun if redis.hget(KEYS.run(run), "status").decode() in TERMINAL}
        assert listed == [{run.encode() for run in those} for those in (begun - over, over)]

    @invariant()
    def each_attempt_is_written_once_and_closed_once(self) -> None:
        frames: defaultdict[tuple[str, int], list[Any]] = defaultdict(list)
        if len(self.seen["raw"]) == self._raw_checked:
            return
        self._raw_checked = len(self.seen["raw"])
        for _, fields in self.seen["raw"]:
            for run, data in fields.items():
                frame = raw_decoder.decode(data)
                frames[run.decode(), frame.attempt].append(frame)
        for written in frames.values():
            numbers = [frame.n for frame in written if frame.n != ANY_FRAME]
            assert numbers == list(range(len(numbers)))
            assert len({frame.at_ms for frame in written if frame.n != ANY_FRAME}) <= 1, "two writers in one attempt"
            ends = [i for i, frame in enumerate(written) if isinstance(frame.items[-1], Ended | Lost)]
            assert ends in ([], [len(written) - 1]), "nothing follows an attempt's end"

    @invariant()
    def cancels_and_results_enter_once(self) -> None:
        assert max(self.taken.values(), default=0) <= 1
        if len(self.seen["events"]) == self._events_checked:
            return
        self._events_checked = len(self.seen["events"])
        entered = Counter[tuple[str, object]]()
        for _, fields in self.seen["events"]:
            for run, data in fields.items():
                for event in event_decoder.decode(data).events:
                    if isinstance(event, CancelRequested):
                        entered[run.decode(), "cancel"] += 1
                    elif isinstance(event, ToolReturned):
                        entered[run.decode(), event.block] += 1
        assert max(entered.values(), default=1) == 1

    def teardown(self) -> None:
        """Without further faults, every run reaches its only end."""
        if self.begun:
            self._calm_down()
            self.the_stages_wrote_what_an_undisturbed_one_writes()
            for run in self.begun:
                log = log_of(self.wire.redis, KEYS, run)
                judge.check(log)
                if log[-1]["type"] == "completed":
                    assert [text for kind, text in judge.blocks(log) if kind == "text"] == list(story.TEXTS)

    def _calm_down(self) -> None:
        for attempt in list(self.attempts):
            attempt.lose()
            attempt.finish()
        redis = self.wire.redis
        for entry in redis.xpending_range(KEYS.topic(0, "turns"), "fetcher", "-", "+", 1000):
            entry_id = entry["message_id"].decode()
            for _, fields in redis.xclaim(KEYS.topic(0, "turns"), "fetcher", "last", 0, [entry_id]):
                for data in fields.values():
                    lost = Attempt(self.wire, KEYS, "last", entry_id, turn_decoder.decode(data))
                    lost.lose()
                    lost.finish()
        self.attempts.clear()
        for worker in self.chained.values():
            worker.crash()
        for stage in STAGES:
            self.lease_runs_out(stage)
            self.take(stage, "last")
        for _ in range(60 * (1 + (self.session.waiting if self.session else 0))):
            self._look()
            for stage in STAGES:
                worker = self.workers[stage, "last"]
                while worker.prepare(100):
                    assert worker.send(reply_lost=False) == "ok"
                    self._look()
            self.the_stages_wrote_what_an_undisturbed_one_writes()
            if not redis.zcard(KEYS.open_runs(0)):
                return
            self.read_turn("last")
            while self.attempts:
                self.write(0, reply_lost=False)
            self.read_call("last")
            for which in range(len(self.calls)):
                self.hand_in(which)
        raise AssertionError("a run never ends")

    # --- looking --------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """What came onto the streams since the last look. It is remembered, for the streams forget it."""
        for topic, seen in self.seen.items():
            after = seen[-1][0].decode() if seen else "0-0"
            new = self.wire.redis.xrange(KEYS.topic(0, topic), f"({after}")
            seen.extend(new)
            for stage, its_input in STAGES.items():
                if its_input == topic:
                    self.oracles[stage].feed(new)

    def _lease(self, stage: str) -> tuple[str, str]:
        offset, watermark = self.wire.redis.hmget(KEYS.lease(0, stage), "offset", "watermark")
        return (offset or b"0-0").decode(), (watermark or b"0-0").decode()

    def _read(self, topic: InternalTopic, group: str, name: str) -> list[tuple[str, str, bytes]]:
        stream = KEYS.topic(0, topic)
        found = self.wire.redis.xreadgroup(group, name, {stream: ">"}, count=1)
        return [
            (entry_id.decode(), run.decode(), data)
            for _, entries in found
            for entry_id, fields in entries
            for run, data in fields.items()
        ]

    @staticmethod
    def _one(things: list[Any], which: int) -> Any:
        return things[which % len(things)]


class Conversing(Protocol):
    """The same, and a session."""

    session: Conversation

    def __init__(self) -> None:
        super().__init__()
        self.session = Conversation(self.wire, KEYS, self.writer)

    @rule(when_busy=st.sampled_from(["enqueue", "steer", "interrupt", "reject"]), held=st.booleans())
    def say(self, when_busy: Any, held: bool) -> None:
        """A message; its call may be sent later."""
        self.session.say(when_busy)
        if not held:
            self.session.send(-1, reply_lost=False)

    @rule(what=st.sampled_from(["interrupt", "withdraw", "configure", "add"]), which=any_of)
    def append(self, what: str, which: int) -> None:
        """Any other append."""
        if what == "interrupt":
            self.session.interrupt(which if which % 2 else None)
        elif what == "withdraw":
            self.session.withdraw(which)
        elif what == "add":
            self.session.add()
        else:
            self.session.change(together=bool(which % 2))

    @precondition(lambda self: self.session.held)
    @rule(which=any_of, reply_lost=st.booleans())
    def send_append(self, which: int, reply_lost: bool) -> None:
        """Send a call that waits, however old it is; without a reply it is sent again."""
        self.session.send(which, reply_lost=reply_lost)

    @precondition(lambda self: self.session.open_run)
    @rule()
    def cancel_in_session(self) -> None:
        self.cancel(self.session.open_run)

    @invariant()
    def the_session_has_one_order(self) -> None:
        self.session.check()

    def teardown(self) -> None:
        """Every append reaches its only fate, too."""
        while self.session.held:
            self.session.send(0, reply_lost=False)
        super().teardown()
        self.session.check()
        self.session.check_history()


def _by_run(items: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """In their order within each run: between runs there is none."""
    return sorted(items, key=lambda item: item[0])
