"""A tree of runs has one order, each call begins one run, and an end takes all below it along, in any interleaving.

Two parsers, of which one may be a zombie, on the real scripts; executors that look twice, and cancels at any time.
Runs that only wait for those below them are put away and back at any time.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from tests.e2e import judge
from tests.model.actors import TTL_MS, Wire, parsers
from tests.model.oracle import log_of
from tests.run_calls import accept_call, cancel_call, put_away_call, put_back_call
from tests.unit.core.run.script import accepted, call, text
from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.run_record import ENDED, call_field, child_field, status_of
from tokenbus.bus.scripts.script import LuaScript, declared
from tokenbus.core.run.waits import rests
from tokenbus.events import normalized as n
from tokenbus.events.child_runs import parent_call
from tokenbus.events.frames import (
    CONTROL_ATTEMPT,
    BusEvent,
    CancelRequested,
    ChildEnd,
    Control,
    EventFrame,
    ToolReturned,
    encode,
    tool_decoder,
)
from tokenbus_services.parser.logic import ParserLogic

KEYS = Keys("trees", 1)
ROOT = "a"
TREE: dict[str, tuple[str, ...]] = {ROOT: ("a~0", "a~1"), "a~0": (), "a~1": ("a~1~0",), "a~1~0": ()}
"""The runs, each with those that its calls begin."""
EXAMPLES = int(os.environ.get("MODEL_EXAMPLES", "30"))
BEGINS = {"f": 60_000}

runs = st.sampled_from(sorted(TREE))
names = st.sampled_from(["first", "second"])


def frames_of(run: str) -> list[tuple[int, list[BusEvent]]]:
    """What the provider sends, frame by frame, each with its turn."""
    ends: list[BusEvent] = [*text(0, f"{run} is ", "done."), n.Done("stop")]
    if not TREE[run]:
        return [(0, ends[:2]), (0, ends[2:])]
    calls = [event for block in range(len(TREE[run])) for event in call(block, f"{run}.{block}", "f", "{}")]
    return [(0, [*calls, n.Done("tool_use")]), (1, ends)]


class Trees(RuleBasedStateMachine):
    """One run with two children, of which one has another."""

    wire: Wire
    """Set by the test."""

    def __init__(self) -> None:
        super().__init__()
        self.wire.redis.flushdb()
        self.workers = parsers(self.wire, KEYS)
        self.said = Counter[str]()
        """Frames of each run that were sent."""
        self.accepted = Counter[str]()
        self._accept(ROOT)

    def _accept(self, run: str) -> None:
        of_parent: dict[str, Any] = {}
        if above := parent_call(run):
            parent, block = above
            of_parent = {"parent": parent, "parent_call": call_field(block), "parent_child": child_field(block)}
        begun = EventFrame(0, CONTROL_ATTEMPT, 1, [accepted(tools=["f"], begins_runs=BEGINS)])
        frame, work = encode(begun), b"w"
        reply = self.wire.run(accept_call(KEYS, run, frame=frame, work=work, ttl_ms=TTL_MS, **of_parent))
        self.accepted[run] += reply == b"new"

    def _field(self, run: str, field: str) -> bytes | None:
        return self.wire.redis.hget(KEYS.run(run), field)

    # --- what happens at any time -----------------------------------------------------------------------------------

    @rule(run=runs)
    def look(self, run: str) -> None:
        """An executor has an entry for the call that begins this run, maybe not for the first time."""
        self._look(run)

    def _look(self, run: str) -> bool:
        """Publish the run, or deliver its result. Whether anything came of it."""
        if (above := parent_call(run)) is None:
            return False
        works = [
            tool_decoder.decode(data)
            for _, fields in self.wire.redis.xrange(KEYS.topic(0, "tools"))
            for data in fields.values()
        ]
        if not any(work.child == run for work in works):
            return False
        parent, block = above
        status = status_of(self._field(run, "status"))
        if status is None:
            before = self.accepted[run]
            self._accept(run)
            return self.accepted[run] > before
        if status not in ENDED or not self._field(parent, call_field(block)):
            return False
        end = ChildEnd(cast("str", status))  # type: ignore[arg-type]
        words = judge.text(log_of(self.wire.redis, KEYS, run))
        returned = ToolReturned(block, words, is_error=status != "completed", child_end=end)
        return bool(
            self.wire.run(
                scripts.tool_result(
                    KEYS.run(parent),
                    KEYS.topic(0, "events"),
                    KEYS.lease(0, "parser"),
                    run=parent,
                    block=block,
                    attempt=1,
                    frame=encode(EventFrame(0, CONTROL_ATTEMPT, 6, [returned])),
                )
            )
        )

    @rule(run=runs)
    def say(self, run: str) -> None:
        """The provider's next frame of a run arrives."""
        self._say(run)

    def _say(self, run: str) -> bool:
        """Whether there was one."""
        frames = frames_of(run)
        if self.said[run] == len(frames):
            return False
        turn, events = frames[self.said[run]]
        if self._field(run, "status") is None or int(self._field(run, "attempt") or 0) != turn + 1:
            return False
        self.said[run] += 1
        self.wire.redis.xadd(KEYS.topic(0, "events"), {run: encode(EventFrame(turn, turn + 1, 2, events))})
        if isinstance(events[-1], n.Done):
            self.wire.redis.hset(KEYS.run(run), "closed", turn + 1)  # as its fetcher does with the last frame
        return True

    @rule(run=runs)
    def cancel(self, run: str) -> None:
        if self.accepted[run]:
            frame = encode(EventFrame(0, CONTROL_ATTEMPT, 5, [CancelRequested("enough")]))
            self.wire.run(cancel_call(KEYS, run, frame=frame, told=encode(Control(run)), awaited_ms=TTL_MS))

    # --- parsers ----------------------------------------------------------------------------------------------------

    @rule(name=names)
    def follow(self, name: str) -> None:
        """A parser takes over from one that is thought dead, and may have a commit under way."""
        if self.workers[name].part is None:
            self._take(name)

    def _take(self, name: str) -> None:
        if self.wire.redis.exists(KEYS.lease(0, "parser")):
            self.wire.redis.hset(KEYS.lease(0, "parser"), "until", 0)
        worker = self.workers[name]
        if part := worker.take():
            worker.recall([run for run in TREE if part.logic.is_open(run)])

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
        if worker.part is None or worker.pending:
            return
        logic = cast("ParserLogic", worker.part.logic)
        if any(s.run == run and rests(s) for s in logic.states()):
            self.wire.run(put_away_call(KEYS, worker.part, [logic.put_away(run, 8)]))

    @rule(run=runs)
    def put_back(self, run: str) -> None:
        """A clock finds that the run is due."""
        if self.accepted[run]:
            self.wire.run(put_back_call(KEYS, run))

    @rule(name=names)
    def die(self, name: str) -> None:
        self.workers[name].crash()

    # --- what holds -------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Nobody disturbs any more: what has ended takes those below it along, and the rest goes on to its end."""
        self._take("last")
        last = self.workers["last"]
        going = True
        while going:
            while last.prepare(100):
                assert last.send(reply_lost=False) == "ok"
            statuses = {run: status_of(self._field(run, "status")) for run in TREE}
            for run, below in TREE.items():
                left = [child for child in below if statuses[run] in ENDED and statuses[child] == "open"]
                assert not left, f"{run} has ended, and {left} go on"
            steps = [each(run) for each in (self._say, self._look) for run in TREE]
            going = any(steps)
        self._check()

    def _check(self) -> None:
        redis = self.wire.redis
        logs = {run: log_of(redis, KEYS, run) for run in TREE if redis.exists(KEYS.log(run))}
        assert logs.keys() == {run for run, count in self.accepted.items() if count}
        assert max(self.accepted.values()) == 1, "a call begins one run"
        for run, log in logs.items():
            judge.check(log)
            words = {f"{run}.{block}": logs.get(child) for block, child in enumerate(TREE[run])}
            for event in log:
                if event["type"] == "block_complete" and event["kind"] == "tool_result" and not event.get("is_error"):
                    assert event["content"] == judge.text(words[event["tool_id"]] or [])
        entries = [e for _, fields in redis.xrange(KEYS.tree(ROOT)) for e in fields.items()]
        begun = any(event["type"] == "child_started" for event in logs[ROOT])
        assert begun == bool(entries)
        if entries:
            judge.check_tree([(run.decode(), value.decode()) for run, value in entries], logs)


def explore(wire: Wire, examples: int) -> None:
    run_state_machine_as_test(
        cast("type[Trees]", type("Model", (Trees,), {"wire": wire})),
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
            database=None,
            report_multiple_bugs=False,
        ),
    )


@pytest.mark.timeout(0)
def test_a_tree_has_one_order_and_ends_as_one(wire: Wire) -> None:
    explore(wire, EXAMPLES)


def short_story(wire: Wire) -> None:
    """One child runs and one is asked for when the root is cancelled."""
    story = cast("type[Trees]", type("Model", (Trees,), {"wire": wire}))()

    def applied() -> None:
        story.work("first", 4)
        story.commit("first", reply_lost=False)

    story.follow("first")
    applied()
    story.say(ROOT)
    applied()
    story.look("a~0")
    applied()
    story.say("a~0")
    applied()
    story.cancel(ROOT)
    applied()
    story.look("a~1")
    story.teardown()


BROKEN = {
    "a child begins after its parent's end": ("accept", "parent[1] ~= 'open' or not parent[2]", "not parent[2]"),
    "an end leaves those below it alone": ("commit", "if h and h[1] == 'open' then", "if false then"),
    "events have no place in the order": ("commit", "redis.call('XADD', key, 'NOMKSTREAM'", "redis.call('EXISTS', key"),
}


BROKEN_AWAY = {
    "a result finds no parent": ("inputs.tool_result", "append_frame(events, lease, run, away)", ""),
    "a run is put away while its child is not there": ("away.put_away", "== 'open'\n  end", "~= 'completed'\n  end"),
    "a run is put away while its child has ended": ("away.put_away", "== 'open'\n  end", "\n  end"),
}


def broken(monkeypatch: pytest.MonkeyPatch, name: str, part: str, instead: str) -> None:
    whole = declared[name].script.text
    assert part in whole, "the script is another by now"
    monkeypatch.setattr(declared[name], "script", LuaScript(name, lambda: whole.replace(part, instead)))


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_script_is_found(wire: Wire, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    short_story(wire)
    broken(monkeypatch, *BROKEN[what])
    with pytest.raises(AssertionError):
        short_story(wire)


def away_story(wire: Wire) -> None:
    """Whoever only waits for those below it is put away; the end of the child brings it back, and so does a cancel."""
    story = cast("type[Trees]", type("Model", (Trees,), {"wire": wire}))()

    def applied() -> None:
        story.work("first", 100)
        story.commit("first", reply_lost=False)

    def put_away(run: str, *, stays: bool = False) -> None:
        story.put_away("first", run)
        assert wire.redis.hexists(KEYS.run(run), "away") != stays
        applied()

    story.follow("first")
    applied()
    story.say(ROOT)
    applied()
    put_away(ROOT, stays=True)
    story.look("a~0")
    applied()
    put_away(ROOT, stays=True)
    story.look("a~1")
    applied()
    put_away(ROOT)
    for _ in range(2):
        story.say("a~0")
        applied()
    story.put_back(ROOT)
    applied()
    put_away(ROOT, stays=True)
    story.look("a~0")
    applied()
    put_away(ROOT)
    story.say("a~1")
    applied()
    story.look("a~1~0")
    applied()
    put_away("a~1")
    story.cancel("a~1~0")
    applied()
    story.die("first")
    story.teardown()


def test_a_parent_that_is_put_away_is_back_with_the_end_of_its_child(wire: Wire) -> None:
    away_story(wire)


@pytest.mark.parametrize("what", BROKEN_AWAY)
def test_each_guard_of_putting_parents_away_is_needed(wire: Wire, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    broken(monkeypatch, *BROKEN_AWAY[what])
    with pytest.raises(AssertionError):
        away_story(wire)
