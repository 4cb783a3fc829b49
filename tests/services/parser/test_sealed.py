"""The end of a durable run waits until all before it is replicated, and is the same whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.services.parser.test_logic import ANSWER, RUN, Parser, answer
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import (
    CONTROL_ATTEMPT,
    HAS_ENDED,
    Accepted,
    CancelRequested,
    DeadlinePassed,
    EventFrame,
    PolicyPlan,
    PolicyVerdict,
    PolicyVerdicts,
    RunLimits,
    Stored,
    encode,
)
from tokenbus.events.public import BlockComplete, Cancelled, Completed, Incomplete

LOST = ErrorInfo(code="lost", kind="internal", message="gone")


def durable(parser: Parser, policies: Sequence[str] = ()) -> None:
    plan = PolicyPlan(tuple(policies), "block", 60_000) if policies else None
    accepted = Accepted(
        provider="anthropic",
        model="m",
        on_failure="fail",
        max_tool_depth=0,
        rules=RunLimits(),
        tools=[],
        durable=True,
        policy_plan=plan,
    )
    parser.feed(accepted, attempt=CONTROL_ATTEMPT)


def stored(parser: Parser, run: str = RUN) -> None:
    (state,) = parser.logic.sealed()
    parser.feed(Stored(state.events_applied), attempt=CONTROL_ATTEMPT, run=run)


def test_all_but_the_end_is_published_at_once_and_the_end_once_it_is_stored() -> None:
    parser = Parser()
    durable(parser)
    written = answer(parser)
    assert parser.kinds()[-1] is BlockComplete
    assert "status" not in written
    assert parser.logic.is_open(RUN)
    seq = parser.events[-1].seq
    stored(parser)
    assert parser.kinds()[-1] is Completed
    assert parser.events[-1].seq == seq + 1
    assert not parser.logic.is_open(RUN)
    assert parser.logic.sealed() == []


def test_nothing_that_comes_after_the_decision_changes_the_end() -> None:
    parser = Parser()
    durable(parser)
    answer(parser)
    count = len(parser.events)
    parser.feed(CancelRequested("late"), attempt=CONTROL_ATTEMPT)
    parser.feed(DeadlinePassed("deadline"), attempt=CONTROL_ATTEMPT)
    parser.feed(Stored(1), attempt=CONTROL_ATTEMPT)  # of a state before
    parser.logic.abandon(RUN, LOST)
    parser.commit()
    assert len(parser.events) == count
    stored(parser)
    assert parser.kinds()[count:] == [Completed]


@pytest.mark.parametrize("in_pieces", [False, True])
def test_another_worker_publishes_the_end_that_this_one_decided(in_pieces: bool) -> None:
    parser, later = Parser(), Parser()
    durable(parser)
    answer(parser)
    if in_pieces and (snapshot := parser.logic.snapshot_in_pieces(RUN)):
        later.logic.restore_from_pieces(RUN, snapshot.head, snapshot.new)
    else:
        later.logic.restore(RUN, parser.logic.snapshot(RUN))
    stored(parser)
    stored(later)
    assert later.events == parser.events[-1:]


def test_events_and_their_storing_in_one_commit_are_published_in_order() -> None:
    parser, replayed = Parser(), Parser()
    for each in (parser, replayed):
        durable(each)
    answer(parser)
    stored(parser)
    answered = encode(EventFrame(0, 1, 5, ANSWER))
    replayed.logic.apply(RUN, answered)
    (state,) = replayed.logic.sealed()
    replayed.logic.apply(RUN, encode(EventFrame(0, CONTROL_ATTEMPT, 5, [Stored(state.events_applied)])))
    replayed.commit()
    assert replayed.events == parser.events


def test_a_cancelled_run_waits_too_and_one_that_lost_events_as_well() -> None:
    for ended in (Cancelled, Incomplete):
        parser = Parser()
        durable(parser)
        if ended is Cancelled:
            parser.feed(CancelRequested("enough"), attempt=CONTROL_ATTEMPT)
        else:
            parser.logic.abandon(RUN, LOST)
            parser.commit()
        assert ended not in parser.kinds()
        stored(parser)
        assert parser.kinds()[-1] is ended


def test_a_run_under_policies_waits_after_their_verdicts() -> None:
    parser = Parser()
    durable(parser, ["p"])
    answer(parser)
    assert not parser.logic.sealed()
    (state,) = parser.logic.states()
    assert state.gate
    verdicts = [PolicyVerdict(draft) for draft in range(state.gate.draft_count)]
    parser.feed(PolicyVerdicts("w", verdicts, 0), attempt=CONTROL_ATTEMPT)
    assert Completed not in parser.kinds()
    stored(parser)
    assert parser.kinds()[-1] is Completed


def test_a_run_whose_log_has_its_end_is_forgotten() -> None:
    parser = Parser()
    durable(parser)
    answer(parser)
    count = len(parser.events)
    parser.feed(DeadlinePassed("silent", HAS_ENDED), attempt=CONTROL_ATTEMPT)
    assert len(parser.events) == count
    assert not parser.logic.is_open(RUN)


def test_a_state_that_is_given_up_gives_the_end_that_was_decided() -> None:
    parser = Parser()
    durable(parser)
    answer(parser)
    parser.logic.fail(RUN, LOST)
    parser.commit()
    assert parser.kinds()[-1] is Completed


def test_a_run_that_is_not_durable_ends_at_once() -> None:
    parser = Parser()
    accepted = Accepted(provider="a", model="m", on_failure="fail", max_tool_depth=0, rules=RunLimits(), tools=[])
    parser.feed(accepted, attempt=CONTROL_ATTEMPT)
    answer(parser)
    assert parser.kinds()[-1] is Completed
    assert not parser.logic.is_open(RUN)
