"""What a run waits for has one fate, whatever decides it, in whatever order, and whoever dies meanwhile.

Two parsers, of which one may be a zombie, on the real scripts; decisions, deadlines and cancels at any time. Runs are
put away and back at any time, too, also while a worker has one of their calls.
"""

from __future__ import annotations

import os
from typing import cast

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from tests.model.actors import TTL_MS, Wire, parsers
from tests.run_calls import put_away_call, put_back_call
from tests.unit.core.run.script import accepted, call
from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.runs import inputs
from tokenbus.bus.scripts.script import LuaScript, declared
from tokenbus.events import normalized as n
from tokenbus.events.frames import (
    CONTROL_ATTEMPT,
    CancelRequested,
    Control,
    EventFrame,
    ToolAsked,
    ToolReturned,
    ToolWaits,
    ToolWork,
    WaitDecided,
    encode,
    tool_decoder,
)
from tokenbus.events.public import Resumed, Waiting, decode
from tokenbus.events.waits import DecisionReply, Verdict, WaitFate, WaitKind
from tokenbus_services.parser import effect_writer
from tokenbus_services.parser.logic import ParserLogic

KEYS = Keys("waits", 1)
RUNS = ("a", "b")
CALLS = (
    ("0.0", "f", '{"n":1}'),
    ("1.0", "g", '{"n":2}'),
    ("2.0", "h", '{"n":3}'),
    ("3.0", "k", '{"n":4}'),
    ("4.0", "hosted", "{}"),
)
"""The calls of a run's turn, each with its wait."""
KINDS: dict[str, tuple[WaitKind, tuple[Verdict, ...]]] = {
    "0.0": ("approval", ("allow", "deny")),
    "1.0": ("tool_result", ("result", "result")),
    "2.0": ("answer", ("accept", "decline")),
    "3.0": ("answer", ("accept", "decline")),
    "4.0": ("approval", ("allow", "deny")),
}
"""By wait: what it is, and how it may be decided."""
HOSTED = "4.0"
"""The wait of a call that its provider runs."""
ASKED = (
    n.ItemStart(4, "api.request", "hosted", "c4.0"),
    n.ApprovalAsked(4, "c4.0", "hosted", "{}", "s", "api.response", allow='{"approve":true}', deny='{"approve":false}'),
    n.BlockStop(4),
)
HELD = "3.0"
"""The wait of a call that waits in its worker."""
EXAMPLES = int(os.environ.get("MODEL_EXAMPLES", "30"))

runs = st.sampled_from(RUNS)
waits = st.sampled_from([wait for wait, _, _ in CALLS])
names = st.sampled_from(["first", "second"])


class Waits(RuleBasedStateMachine):
    """Runs with calls that wait: for leave, for a client, and for answers, one of them in its worker."""

    wire: Wire
    """Set by the test."""

    def __init__(self) -> None:
        super().__init__()
        self.wire.redis.flushdb()
        self.workers = parsers(self.wire, KEYS)
        self.decided: dict[tuple[str, str], set[bytes]] = {}
        """By run and wait: what its deciders were told, each the fate that counts."""
        self.numbers = 0
        for run in RUNS:
            self._begin(run)

    def _begin(self, run: str) -> None:
        waits = {"f": ToolWaits([{}]), "g": ToolWaits(client_ms=1000)}
        begun = EventFrame(0, CONTROL_ATTEMPT, 1, [accepted(waits=waits, tools=["f", "g", "h", "k"])])
        self.wire.run(
            scripts.accept(
                KEYS.run(run),
                KEYS.topic(0, "events"),
                KEYS.topic(0, "turns"),
                KEYS.lease(0, "parser"),
                KEYS.log(run),
                KEYS.run(run),
                open_runs=KEYS.open_runs(0),
                ended_runs=KEYS.ended_runs(0),
                run=run,
                accepted_ms=1,
                ttl_ms=TTL_MS,
                frame=encode(begun),
                work=b"w",
                fields=["request", b"{}"],
            )
        )
        self.wire.redis.hset(KEYS.run(run), "closed", 1)  # as its fetcher did with the last frame
        calls = [
            call(int(wait[0]), f"c{wait[0]}", name, arguments) for wait, name, arguments in CALLS if wait != HOSTED
        ]
        said = [*(event for each in calls for event in each), *ASKED, n.Done("tool_use")]
        self.wire.redis.xadd(KEYS.topic(0, "events"), {run: encode(EventFrame(0, 1, 2, said))})

    # --- who decides ------------------------------------------------------------------------------------------------

    @rule(run=runs, wait=waits, deny=st.booleans(), again=st.booleans())
    def decide(self, run: str, wait: str, deny: bool, again: bool) -> None:
        """Somebody decides; ``again``: the same decision arrives twice."""
        self.numbers += 1
        what, decisions = KINDS[wait]
        decision = decisions[deny]
        event = WaitDecided(wait, what, decision, f"d{self.numbers}", "ann", content="mine")
        for _ in range(1 + again):
            call = scripts.decision(KEYS, run, "", event, at_ms=3, durable=False, held=wait == HELD)
            self._told(run, wait, self.wire.run(call))

    @rule(run=runs, wait=waits, allow=st.booleans())
    def deadline(self, run: str, wait: str, allow: bool) -> None:
        """A parser's clock decides, that of a zombie too."""
        what, _ = KINDS[wait]
        decision = "cancel" if what == "answer" else "allow" if allow and what == "approval" else "deny"
        event = WaitDecided(wait, what, decision, f"{wait}.deadline", door="deadline", reason="late")
        call = scripts.decision(KEYS, run, "", event, at_ms=4, durable=False, held=wait == HELD, replies=False)
        self._told(run, wait, self.wire.run(call))

    def _told(self, run: str, wait: str, reply: bytes) -> None:
        if fate := msgspec.json.decode(reply, type=DecisionReply).fate:
            self.decided.setdefault((run, wait), set()).add(msgspec.json.encode(fate))

    @rule(run=runs, which=st.integers(0, 3))
    def execute(self, run: str, which: int) -> None:
        """A worker has a call of the tool that asks, maybe one that another worker had, or has answered since."""
        handed_out = [work for work in self._works(run) if work.name == "h"]
        if not handed_out:
            return
        work = handed_out[which % len(handed_out)]
        event = ToolAsked(2, "q1", "Which?", 1000) if not work.answers else ToolReturned(2, "done", is_error=False)
        self.wire.run(
            scripts.tool_result(
                KEYS.run(run),
                KEYS.topic(0, "events"),
                KEYS.lease(0, "parser"),
                run=run,
                block=2,
                attempt=work.attempt,
                answers=len(work.answers),
                frame=encode(EventFrame(0, CONTROL_ATTEMPT, 6, [event])),
            )
        )

    @rule(run=runs, returns=st.booleans())
    def hold(self, run: str, returns: bool) -> None:
        """The worker of the call that waits there, or the next one, asks its question, or returns."""
        if not (works := [work for work in self._works(run) if work.name == "k"]):
            return
        submit = scripts.tool_result if returns else scripts.tool_progress
        event = ToolReturned(3, "done", is_error=False) if returns else ToolAsked(3, "q1", "Which?", 1000, number=0)
        self.wire.run(
            submit(
                KEYS.run(run),
                KEYS.topic(0, "events"),
                KEYS.lease(0, "parser"),
                run=run,
                block=3,
                attempt=works[0].attempt,
                frame=encode(EventFrame(0, CONTROL_ATTEMPT, 7, [event])),
            )
        )

    def _works(self, run: str) -> list[ToolWork]:
        entries = self.wire.redis.xrange(KEYS.topic(0, "tools"))
        return [tool_decoder.decode(fields[run.encode()]) for _, fields in entries if run.encode() in fields]

    @rule(run=runs)
    def cancel(self, run: str) -> None:
        self.wire.run(
            scripts.cancel(
                KEYS.run(run),
                KEYS.topic(0, "events"),
                KEYS.topic(0, "raw"),
                KEYS.topic(0, "control"),
                parser_lease=KEYS.lease(0, "parser"),
                normalizer_lease=KEYS.lease(0, "normalizer"),
                run=run,
                awaited_ms=TTL_MS,
                frame=encode(EventFrame(0, CONTROL_ATTEMPT, 5, [CancelRequested("enough")])),
                control_frame=encode(Control(run)),
            )
        )

    # --- parsers ----------------------------------------------------------------------------------------------------

    @rule(name=names)
    def follow(self, name: str) -> None:
        """A parser takes over from one that is thought dead, and may have a commit under way."""
        worker = self.workers[name]
        if worker.part is None:
            if self.wire.redis.exists(KEYS.lease(0, "parser")):
                self.wire.redis.hset(KEYS.lease(0, "parser"), "until", 0)
            if part := worker.take():
                worker.recall([run for run in RUNS if part.logic.is_open(run)])

    @rule(name=names, count=st.integers(1, 4))
    def work(self, name: str, count: int) -> None:
        worker = self.workers[name]
        if worker.part and not worker.pending:
            worker.prepare(count)

    @rule(name=names, reply_lost=st.booleans())
    def commit(self, name: str, reply_lost: bool) -> None:
        if self.workers[name].pending:
            self.workers[name].send(reply_lost=reply_lost)

    @rule(name=names, run=runs)
    def put_away(self, name: str, run: str) -> None:
        """A parser's clock puts a run away, that of a zombie too."""
        worker = self.workers[name]
        if worker.part is None or worker.pending or not worker.part.logic.is_open(run):
            return
        logic = cast("ParserLogic", worker.part.logic)
        if next(s for s in logic.states() if s.run == run).phase != "tools":
            return
        self.wire.run(put_away_call(KEYS, worker.part, [logic.put_away(run, 8)]))

    @rule(run=runs)
    def put_back(self, run: str) -> None:
        """A clock finds that the run is due."""
        self.wire.run(put_back_call(KEYS, run))

    @rule(name=names)
    def die(self, name: str) -> None:
        self.workers[name].crash()

    # --- what holds -------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Nobody disturbs any more: what was decided has happened, once."""
        if self.wire.redis.exists(KEYS.lease(0, "parser")):
            self.wire.redis.hset(KEYS.lease(0, "parser"), "until", 0)
        last = self.workers["last"]
        part = last.take()
        assert part
        last.recall([run for run in RUNS if part.logic.is_open(run)])
        while last.prepare(100):
            assert last.send(reply_lost=False) == "ok"
        for run in RUNS:
            self._check(run)

    def _check(self, run: str) -> None:
        redis = self.wire.redis
        log = [decode(fields[b"__data__"]) for _, fields in redis.xrange(KEYS.log(run))]
        works = self._works(run)
        status = redis.hget(KEYS.run(run), "status")
        ended = status != b"open"
        open_waits = {wait for wait, _, _ in CALLS if redis.hexists(KEYS.run(run), f"wait:{wait}")}
        assert open_waits == {
            w.decode().partition("/")[2]
            for w in redis.zrange(KEYS.waiting(0), 0, -1)
            if w.startswith(f"{run}/".encode())
        }
        assert set((redis.hget(KEYS.run(run), "waits") or b"").decode().split()) == open_waits
        assert {e.wait for e in log if isinstance(e, Waiting)} <= KINDS.keys(), "no question is asked twice"
        for wait, tool, _ in CALLS:
            what, _ = KINDS[wait]
            told = self.decided.get((run, wait), set())
            assert len(told) <= 1, "everybody is told of the same decision"
            asked = [e for e in log if e.__struct_config__.tag == "waiting" and getattr(e, "wait", "") == wait]
            resumed = [e for e in log if e.__struct_config__.tag == "resumed" and getattr(e, "wait", "") == wait]
            ran = [work for work in works if work.name == tool]
            assert len(asked) <= 1
            fate = msgspec.json.decode(next(iter(told)), type=WaitFate) if told else None
            if wait == HELD:
                assert len(ran) <= 1
                assert len(resumed) <= 1, "its question ends once: by a decision, or with the call"
                if fate is None and resumed:
                    assert [e.decision_id for e in resumed] == [f"{wait}.ended"]  # type: ignore[attr-defined]
                    continue
                ran = []
            elif what == "answer":
                first, ran = ran[:1], ran[1:]
                assert all(not work.answers for work in first)
                assert [[given.decision for given in work.answers] for work in ran] == (
                    [[fate.decision]] if fate else []
                )
            if wait == HOSTED and ended is False:
                told_provider = [
                    e
                    for e in log
                    if e.__struct_config__.tag == "block_complete" and getattr(e, "item", "") == "api.response"
                ]
                assert len(told_provider) <= (fate is not None), "its provider is told once, and only what was decided"
            if fate is None:
                assert (resumed, ran) == ([], [])
                assert not asked or ended == (wait not in open_waits)
                continue
            assert wait not in open_waits
            if not resumed:
                raise AssertionError("it was decided, and nothing came of it")
            assert [(e.decision, e.decision_id) for e in resumed] == [(fate.decision, fate.id)]  # type: ignore[attr-defined]
            again = fate.decision == "allow" or (what == "answer" and wait != HELD)
            assert len(ran) == (again and wait != HOSTED), (
                "it ran once after an allow or an answer, and never after a denial"
            )


def explore(wire: Wire, examples: int, *phases: Phase) -> None:
    run_state_machine_as_test(
        cast("type[Waits]", type("Model", (Waits,), {"wire": wire})),
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
            database=None,
            report_multiple_bugs=False,
            phases=phases or tuple(Phase),
        ),
    )


@pytest.mark.timeout(0)
def test_each_wait_has_one_fate(wire: Wire) -> None:
    explore(wire, EXAMPLES)


def late_question(wire: Wire) -> None:
    """A worker that had the call first asks its question after that was answered."""
    story = cast("type[Waits]", type("Model", (Waits,), {"wire": wire}))()
    run = RUNS[0]

    def applied() -> None:
        story.work("first", 4)
        story.commit("first", reply_lost=False)

    story.follow("first")
    applied()
    story.execute(run, 0)
    applied()
    story.decide(run, "2.0", deny=False, again=False)
    applied()
    story.execute(run, 0)
    story.execute(run, 1)
    story.teardown()


def test_a_question_may_begin_and_end_in_one_commit(wire: Wire) -> None:
    story = cast("type[Waits]", type("Model", (Waits,), {"wire": wire}))()
    story.follow("first")
    story.work("first", 4)
    story.commit("first", reply_lost=False)
    story.decide(RUNS[0], "0.0", deny=True, again=False)
    story.decide(RUNS[0], "1.0", deny=False, again=False)
    story.work("first", 4)
    story.commit("first", reply_lost=False)
    story.hold(RUNS[0], returns=False)
    story.hold(RUNS[0], returns=True)
    story.work("first", 4)
    story.commit("first", reply_lost=False)
    story.teardown()
    log = [decode(fields[b"__data__"]) for _, fields in wire.redis.xrange(KEYS.log(RUNS[0]))]
    ends = [e.decision_id for e in log if isinstance(e, Resumed)]
    assert ends == ["d1", "d2", f"{HELD}.ended"]


def test_a_worker_that_is_late_repeats_no_question(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    late_question(wire)
    for module in (inputs, effect_writer):
        monkeypatch.setattr(module, "call_fence", lambda attempt, answers: str(attempt))
    with pytest.raises(AssertionError, match=r"2\.1"):
        late_question(wire)


def away_and_back(wire: Wire) -> None:
    """Runs are put away by a parser, by a zombie, and behind events that nobody has read."""
    story = cast("type[Waits]", type("Model", (Waits,), {"wire": wire}))()
    one, other = RUNS

    def applied(name: str) -> None:
        story.work(name, 100)
        story.commit(name, reply_lost=False)

    story.follow("first")
    applied("first")
    story.put_away("first", one)
    story.decide(one, "0.0", deny=True, again=False)
    applied("first")
    story.put_away("first", one)
    story.put_back(one)
    applied("first")
    story.decide(one, "1.0", deny=False, again=False)
    story.put_away("first", one)
    applied("first")
    story.decide(one, "4.0", deny=True, again=False)
    applied("first")
    story.follow("second")
    story.decide(other, "0.0", deny=True, again=False)
    applied("second")
    for _ in range(4):  # with checkpoints, after which the decision is in no stream
        story.put_away("second", one)
        story.put_back(one)
        applied("second")
    story.put_away("first", other)
    story.decide(other, "1.0", deny=False, again=False)
    story.teardown()


def test_a_run_that_is_put_away_has_all_its_events(wire: Wire) -> None:
    away_and_back(wire)


BROKEN = {
    "two decisions count": ("waits.decide", "if not h[3] and h[1] == 'open' and h[2]", "if h[1] == 'open'"),
    "a decision counts after a cancel": ("waits.decide", "h[1] == 'open' and h[2]", "h[2]"),
    "a wait stays open": ("waits.decide", "close_wait(run_key, {unpack(KEYS, indexes_at)}, run, wait)", ""),
}
"""By defect: the script, and what it has instead of a part of its text."""
BROKEN_AWAY = {
    "a decision finds no state": ("waits.decide", "append_frame(events, lease, run, away)", ""),
    "a zombie puts a run away": ("away.put_away", "h[1] ~= token or h[2] ~= offset", "not h[1]"),
    "a run is put away before its last event is read": ("away.put_away", "and not busy[run]", ""),
    "a run is put away without its state": ("away.put_away", "redis.call('HSET', KEYS[k], 'away', state)", ""),
    "a run comes back without its state": ("away.put_back", "append_frame(events, parser_lease, run, away)", ""),
}


def broken(monkeypatch: pytest.MonkeyPatch, name: str, text: str, instead: str) -> None:
    whole = declared[name].script.text
    assert text in whole
    monkeypatch.setattr(declared[name], "script", LuaScript(name, lambda: whole.replace(text, instead)))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_script_is_found(wire: Wire, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    broken(monkeypatch, *BROKEN[what])
    with pytest.raises(AssertionError):
        explore(wire, 5_000, Phase.generate)  # one in five searches of 300 found nothing


@pytest.mark.parametrize("what", BROKEN_AWAY)
def test_each_guard_of_putting_away_is_needed(wire: Wire, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    broken(monkeypatch, *BROKEN_AWAY[what])
    with pytest.raises(AssertionError):
        away_and_back(wire)
