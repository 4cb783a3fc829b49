"""The parser's logic alone: frames in, the writes of one commit out. Needs no server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.commits import commit_call
from tokenbus.bus.keys import Keys, PublicTopic
from tokenbus.bus.run_record import RunLifetimes
from tokenbus.bus.scripts import Commit
from tokenbus.events import normalized as n
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import CONTROL_ATTEMPT, Accepted, BusEvent, CancelRequested, EventFrame, RunLimits, encode
from tokenbus.events.public import Cancelled, Chunk, Completed, PublicEvent, RunFailedEvent, Started
from tokenbus_services.parser.logic import ParserLogic

KEYS = Keys("t", 1)
RUN = "r1"


class Parser:
    """A logic with its published events; each frame is its own commit."""

    def __init__(self, topics: Sequence[PublicTopic] = ("visible", "chunks", "blocks")) -> None:
        self.events: list[PublicEvent] = []
        self.logic = ParserLogic(
            0, KEYS, topics=topics, lifetimes=RunLifetimes(60_000, 60_000), on_published=self.events.append
        )

    def feed(self, *events: BusEvent, attempt: int = 1, run: str = RUN) -> list[Any]:
        """Apply one frame; return the arguments of its commit."""
        self.logic.apply(run, encode(EventFrame(0, attempt, 5, list(events))))
        return self.commit()

    def commit(self) -> list[Any]:
        commit = Commit(KEYS.lease(0, "parser"), KEYS.topic(0, "events"))
        self.logic.flush(commit)
        call = commit_call(commit, end="1-0")
        return [*call.keys, *call.args]

    def kinds(self) -> list[type]:
        return [type(event) for event in self.events]


@pytest.fixture
def parser() -> Parser:
    return Parser()


def accept(parser: Parser, run: str = RUN) -> list[Any]:
    accepted = Accepted(
        provider="anthropic", model="m", on_failure="fail", max_tool_depth=0, rules=RunLimits(), tools=[]
    )
    return parser.feed(accepted, attempt=CONTROL_ATTEMPT, run=run)


ANSWER: list[BusEvent] = [
    n.Start(model="m", provider_id="p"),
    n.BlockStart(0, "text"),
    n.TextDelta(0, "Hello."),
    n.BlockStop(0),
    n.Done("stop", "stop"),
]


def answer(parser: Parser) -> list[Any]:
    return parser.feed(*ANSWER)


def test_an_accepted_run_is_open_and_published_as_started(parser: Parser) -> None:
    accept(parser)
    assert parser.logic.is_open(RUN)
    assert parser.kinds() == [Started]
    assert [state.run for state in parser.logic.states()] == [RUN]


def test_a_completed_answer_closes_the_run_and_writes_its_status(parser: Parser) -> None:
    accept(parser)
    written = answer(parser)
    assert not parser.logic.is_open(RUN)
    assert parser.kinds()[-1] is Completed
    assert KEYS.run(RUN) in written
    assert "completed" in written


def test_frames_of_a_run_that_is_over_are_ignored(parser: Parser) -> None:
    accept(parser)
    answer(parser)
    before = list(parser.events)
    parser.feed(CancelRequested("late"), attempt=CONTROL_ATTEMPT)
    assert parser.events == before


def test_visible_text_goes_to_its_topics_and_only_to_those_that_are_configured() -> None:
    every, blocks = Parser(), Parser(topics=["blocks"])
    for parser in (every, blocks):
        accept(parser)
    assert {KEYS.topic(0, "visible"), KEYS.topic(0, "chunks")} <= set(map(str, answer(every)))
    assert not {KEYS.topic(0, "visible"), KEYS.topic(0, "chunks")} & set(map(str, answer(blocks)))
    assert [e.text for e in blocks.events if isinstance(e, Chunk)] == ["Hello."], "the log has it nevertheless"


def test_a_cancel_ends_the_run_as_cancelled(parser: Parser) -> None:
    accept(parser)
    parser.feed(CancelRequested("the user left"), attempt=CONTROL_ATTEMPT)
    end = parser.events[-1]
    assert isinstance(end, Cancelled)
    assert end.reason == "the user left"
    assert not parser.logic.is_open(RUN)


def test_a_poisoned_run_fails_and_the_others_continue(parser: Parser) -> None:
    accept(parser)
    accept(parser, "r2")
    parser.logic.fail(RUN, ErrorInfo(code="poison", kind="internal", message="it broke", retryable=False))
    parser.commit()
    assert isinstance(parser.events[-1], RunFailedEvent)
    assert parser.events[-1].run == RUN
    assert parser.logic.is_open("r2")


def test_discarded_outputs_are_not_written_but_the_state_is_kept(parser: Parser) -> None:
    frame = EventFrame(0, CONTROL_ATTEMPT, 5, [CancelRequested("x")])
    accept(parser)
    before = list(parser.events)
    parser.logic.apply(RUN, encode(frame))
    parser.logic.discard_outputs()
    parser.commit()
    assert parser.events == before
    assert not parser.logic.is_open(RUN)


def test_a_run_restored_from_its_snapshot_continues_where_it_was(parser: Parser) -> None:
    accept(parser)
    parser.feed(n.Start(model="m", provider_id="p"), n.BlockStart(0, "text"), n.TextDelta(0, "Hel"))
    other = Parser()
    other.logic.restore(RUN, parser.logic.snapshot(RUN))
    other.feed(n.TextDelta(0, "lo."), n.BlockStop(0), n.Done("stop", "stop"))
    assert [e.seq for e in other.events] == list(range(len(parser.events), len(parser.events) + len(other.events)))
    assert [e.text for e in other.events if isinstance(e, Chunk)] == ["lo."]
    assert other.kinds()[-1] is Completed
