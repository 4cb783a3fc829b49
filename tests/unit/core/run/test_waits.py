"""Calls that wait for somebody: which do, and what a decision makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.core.run.gated_scripts import HeldStory
from tests.unit.core.run.script import Story, call, of_type, text
from tokenbus.core.run.blocks.block_table import CompleteCall
from tokenbus.core.run.effects import EndRun, EndWait, GiveAnswer, MoveDeadline, NextTurn, RunTools, Wait
from tokenbus.core.run.waits import needs_approval, waits_only
from tokenbus.events import normalized as n
from tokenbus.events.frames import (
    CancelRequested,
    GivenAnswer,
    PolicyVerdict,
    ToolAsked,
    ToolReturned,
    ToolWaits,
    ToolWork,
    WaitDecided,
)
from tokenbus.events.public import BlockComplete, Cancelled, Resumed, Waiting
from tokenbus.events.waits import Condition, Excluded, Verdict

ALWAYS = ToolWaits([{}], approval_ms=5_000, schema={"type": "object"})
BY_CLIENT = ToolWaits(client_ms=7_000, result={"type": "string"})


def asked(*, waits: dict[str, ToolWaits], **changes: Any) -> Story:
    """A turn with the calls of blocks 0 (`f`) and 1 (`g`)."""
    story = Story(waits=waits, **changes)
    story.provider(*call(0, "a", "f", '{"n":1}'), *call(1, "b", "g", '{"n":2}'), n.Done("tool_use"))
    return story


def allow(wait: str, arguments: str | None = None) -> WaitDecided:
    return WaitDecided(wait, "approval", "allow", "d1", "ann", "cli", arguments=arguments)


def handed_out(story: Story) -> list[tuple[str, str]]:
    return [(w.name, w.arguments) for e in story.effects if isinstance(e, RunTools) for w in e.work]


def results(story: Story) -> list[tuple[str | None, str | None]]:
    return [(e.tool_name, e.content) for e in of_type(story.events, BlockComplete) if e.kind == "tool_result"]


def test_a_call_that_waits_is_handed_out_once_it_is_allowed() -> None:
    story = asked(waits={"f": ALWAYS})
    assert handed_out(story) == [("g", '{"n":2}')], "the other call waits for nobody"
    (waiting,) = of_type(story.events, Waiting)
    at_ms = story.at_ms
    assert (waiting.wait, waiting.what, waiting.block, waiting.arguments) == ("0.0", "approval", 0, '{"n":1}')
    assert (waiting.deadline_ms, waiting.on_deadline, waiting.schema) == (at_ms + 5_000, "deny", {"type": "object"})
    assert [e.info.wait for e in story.effects if isinstance(e, Wait)] == ["0.0"]
    story.reborn()
    story.control(allow("0.0"))
    assert handed_out(story)[1:] == [("f", '{"n":1}')]
    (resumed,) = of_type(story.events, Resumed)
    assert (resumed.decision, resumed.by, resumed.door, resumed.decision_id) == ("allow", "ann", "cli", "d1")
    story.control(ToolReturned(0, "one", False), ToolReturned(1, "two", False))
    assert results(story) == [("f", "one"), ("g", "two")]


def test_a_second_decision_changes_nothing() -> None:
    story = asked(waits={"f": ALWAYS})
    story.control(allow("0.0"))
    before = len(story.events), handed_out(story)
    story.control(allow("0.0"), WaitDecided("0.0", "approval", "deny", "d2", reason="no"), allow("7.0"))
    assert (len(story.events), handed_out(story)) == before


def test_the_model_reads_that_a_call_was_denied_and_why() -> None:
    story = asked(waits={"f": ALWAYS, "g": ALWAYS})
    story.control(WaitDecided("1.0", "approval", "deny", "d1", reason="too dear"))
    assert results(story) == [], "results are published in the order of the calls"
    story.control(WaitDecided("0.0", "approval", "deny", "d2"))
    assert results(story) == [
        ("f", "the call was denied, and did not run"),
        ("g", "the call was denied, and did not run: too dear"),
    ]
    assert handed_out(story) == []
    assert [e.history is not None for e in story.effects if isinstance(e, NextTurn)] == [True]


def test_an_allowed_call_runs_with_the_arguments_that_a_person_gave_it() -> None:
    story = asked(waits={"f": ALWAYS})
    story.control(allow("0.0", '{"n":9}'))
    assert handed_out(story)[1:] == [("f", '{"n":9}')]
    story.control(ToolReturned(0, "nine", False), ToolReturned(1, "two", False))
    (turn,) = [e for e in story.effects if isinstance(e, NextTurn)]
    assert turn.history
    read = [part.content for part in turn.history[-1].content]  # type: ignore[union-attr]
    assert read == ['[a person changed the arguments of this call to {"n":9}]\nnine', "two"]
    assert results(story)[0] == ("f", "nine")


def test_a_tool_of_the_client_waits_for_its_result_alone() -> None:
    story = asked(waits={"f": BY_CLIENT, "g": BY_CLIENT})
    assert handed_out(story) == []
    assert [(e.what, e.deadline_ms) for e in of_type(story.events, Waiting)] == [
        ("tool_result", story.at_ms + 7_000)
    ] * 2
    assert waits_only(story.run.state)
    story.control(WaitDecided("0.0", "tool_result", "result", "d1", content="here"))
    story.control(WaitDecided("1.0", "tool_result", "deny", "1.0.deadline", door="deadline", reason="too late"))
    assert results(story) == [("f", "here"), ("g", "too late")]


def test_a_tool_of_the_client_may_need_leave_first() -> None:
    story = asked(waits={"f": ToolWaits([{}], client_ms=7_000)})
    story.control(allow("0.0"))
    assert [(e.wait, e.what) for e in of_type(story.events, Waiting)] == [("0.0", "approval"), ("0.1", "tool_result")]
    story.control(WaitDecided("0.1", "tool_result", "result", "d1", content="here"), ToolReturned(1, "two", False))
    assert results(story) == [("f", "here"), ("g", "two")]


def handed_out_with(story: Story, block: int) -> list[ToolWork]:
    return [w for e in story.effects if isinstance(e, RunTools) for w in e.work if w.block == block]


def test_a_call_that_asks_runs_again_with_all_answers_so_far() -> None:
    story = asked(waits={"f": ALWAYS})
    story.control(allow("0.0"))
    schema: dict[str, object] = {"type": "object"}
    story.control(ToolAsked(0, "q1", "Which seat?", 9_000, schema, state="here"))
    waiting = of_type(story.events, Waiting)[-1]
    assert (waiting.wait, waiting.what, waiting.text, waiting.schema) == ("0.1", "answer", "Which seat?", schema)
    assert (waiting.deadline_ms, waiting.on_deadline, waiting.arguments) == (story.at_ms + 9_000, "cancel", None)
    story.control(ToolReturned(1, "two", False))
    assert waits_only(story.run.state)
    story.reborn()
    story.control(WaitDecided("0.1", "answer", "accept", "d2", "ann", "http", content='{"seat":"12A"}'))
    given = GivenAnswer("q1", "accept", '{"seat":"12A"}', "ann", "http")
    last = handed_out_with(story, 0)[-1]
    assert (last.answers, last.state) == ([given], "here")
    story.control(ToolAsked(0, "q2", "Sure?", 9_000, url="https://sign.example/in"))
    story.control(WaitDecided("0.2", "answer", "cancel", "0.2.deadline", door="deadline"))
    last = handed_out_with(story, 0)[-1]
    assert (last.answers, last.state) == ([given, GivenAnswer("q2", "cancel", door="deadline")], "")
    assert len(handed_out_with(story, 0)) == 3
    story.control(ToolReturned(0, "one", False))
    assert results(story) == [("f", "one"), ("g", "two")]
    assert [(e.wait, e.decision, e.content) for e in of_type(story.events, Resumed)] == [
        ("0.0", "allow", None),
        ("0.1", "accept", '{"seat":"12A"}'),
        ("0.2", "cancel", None),
    ]


def held(number: int, question: str = "q1") -> ToolAsked:
    return ToolAsked(1, question, "Which?", 9_000, number=number)


def test_a_call_that_waits_in_its_worker_gets_the_answer_there() -> None:
    story = asked(waits={"f": ALWAYS})
    story.control(held(0), held(0), held(1))
    waiting = of_type(story.events, Waiting)
    assert [(e.wait, e.what) for e in waiting] == [("0.0", "approval"), ("1.0", "answer")], "each is asked once"
    (info,) = [e.info for e in story.effects if isinstance(e, Wait) and e.info.wait == "1.0"]
    assert info.held
    assert not waits_only(story.run.state)
    story.reborn()
    story.control(WaitDecided("1.0", "answer", "accept", "d1", "ann", content="{}"))
    (answer,) = [e for e in story.effects if isinstance(e, GiveAnswer)]
    assert answer == GiveAnswer(1, 0, GivenAnswer("q1", "accept", "{}", "ann"))
    assert len(handed_out_with(story, 1)) == 1, "it is not handed out again"
    story.control(held(0), held(1, "q2"))
    assert [e.wait for e in of_type(story.events, Waiting)[2:]] == ["1.1"]
    story.control(ToolReturned(1, "two", False))
    assert [e.wait for e in story.effects if isinstance(e, EndWait)] == ["1.1"]
    last = of_type(story.events, Resumed)[-1]
    assert (last.wait, last.decision, last.door, last.reason) == ("1.1", "cancel", "deadline", "the call ended before")
    story.control(held(2), WaitDecided("1.1", "answer", "accept", "d2"))
    assert len(of_type(story.events, Resumed)) == 2
    assert waits_only(story.run.state)


def test_a_question_of_a_call_that_nobody_runs_is_none() -> None:
    story = asked(waits={"f": ALWAYS})
    before = len(story.events)
    story.control(ToolAsked(0, "q1", "Which?", 9_000), ToolAsked(7, "q1", "Which?", 9_000))
    story.control(ToolReturned(1, "two", False), ToolAsked(1, "q1", "Which?", 9_000))
    assert len(story.events) == before
    story.control(CancelRequested("enough"), ToolAsked(0, "q1", "Which?", 9_000))
    assert len(of_type(story.events, Waiting)) == 1


def test_a_cancel_ends_what_is_waited_for() -> None:
    story = asked(waits={"f": ALWAYS})
    story.control(CancelRequested("enough"))
    assert results(story)[0] == ("f", "cancelled")
    assert isinstance(story.events[-1], Cancelled)
    assert isinstance(story.effects[-1], EndRun)
    assert story.control(allow("0.0")) == []
    assert handed_out(story) == [("g", '{"n":2}')]


def test_under_policies_a_call_waits_as_they_changed_it_under_the_number_that_it_was_published_with() -> None:
    story = HeldStory(waits={"f": ALWAYS})
    story.provider(*text(0, "Hm."), *call(1, "a", "f", '{"n":1}'), n.Done("tool_use"))
    kept = [d for d in story.drafts if getattr(d, "block", 1) != 0]
    story.ruled = len(story.drafts)
    passed = [PolicyVerdict(d.seq, events=[d] if d in kept else []) for d in story.drafts]
    story.rule(*passed)
    story.pass_all()
    (waiting,) = of_type(story.published, Waiting)
    (shown,) = [e for e in of_type(story.published, BlockComplete) if e.kind == "tool_call"]
    assert (waiting.block, waiting.arguments, waiting.wait) == (shown.block, '{"n":1}', "1.0")
    assert story.of(RunTools) == []
    story.reborn()
    story.control(allow("1.0"))
    story.pass_all()
    (resumed,) = of_type(story.published, Resumed)
    assert (resumed.block, len(story.of(RunTools))) == (shown.block, 1)


@pytest.mark.parametrize("arguments", ['{"n":', "[]", "1"])
def test_a_malformed_call_waits_for_nobody_since_its_worker_refuses_it(arguments: str) -> None:
    story = Story(waits={"f": ALWAYS})
    story.provider(*call(0, "a", "f", arguments), n.Done("tool_use"))
    assert of_type(story.events, Waiting) == []
    assert handed_out(story) == [("f", arguments)]


@pytest.mark.parametrize(
    ("arguments", "waits"),
    [
        ('{"amount": 101, "to": {"land": "FR"}}', True),
        ('{"amount": 100, "to": {"land": "FR"}}', False),
        ('{"amount": 101, "to": {"land": "DE"}}', False),
        ('{"amount": 101}', True),
        ('{"amount": "101", "to": {"land": "FR"}}', True),
        ('{"amount": true, "to": {"land": "FR"}}', True),
        ("{}", True),
        ("", True),
    ],
)
def test_conditions_are_read_so_that_what_is_missing_does_not_go_around_them(arguments: str, *, waits: bool) -> None:
    rule = {"amount": Condition(exclusive_minimum=100), "to.land": Condition(not_=Excluded(enum=["DE"]))}
    assert needs_approval(CompleteCall(0, "a", "pay", arguments), [rule]) is waits


@pytest.mark.parametrize(
    ("condition", "value", "waits"),
    [
        (Condition(enum=[1]), "1.0", True),
        (Condition(enum=[1]), "true", False),
        (Condition(enum=[None]), "null", True),
        (Condition(enum=[None]), "0", False),
        (Condition(enum=["a", "b"]), '"b"', True),
        (Condition(enum=["a", "b"]), '"c"', False),
        (Condition(minimum=1, maximum=2), "2", True),
        (Condition(minimum=1, maximum=2), "0", False),
        (Condition(exclusive_maximum=2), "2", False),
        (Condition(not_=Excluded(enum=["a"])), '"a"', False),
        (Condition(not_=Excluded(enum=["a"])), '"b"', True),
    ],
)
def test_each_word_of_a_condition(condition: Condition, value: str, *, waits: bool) -> None:
    call = CompleteCall(0, "a", "f", f'{{"x": {value}}}')
    assert needs_approval(call, [{"x": condition}]) is waits
    assert needs_approval(call, [{"x": condition}, {"x": Condition(enum=["never"])}]) is waits, "one must hold"


def test_free_text_fulfils_any_condition() -> None:
    assert needs_approval(CompleteCall(0, "a", "sh", "ls", free_text=True), [{"x": Condition(enum=[1])}])
    assert not needs_approval(CompleteCall(0, "a", "sh", "ls", free_text=True), [])


HOSTED = (
    n.ItemStart(0, "openai-responses.mcp_approval_request", "del", "mcpr_1"),
    n.ToolCallDelta(0, '{"id":"mcpr_1"}'),
    n.ApprovalAsked(
        *(0, "mcpr_1", "del", '{"n":1}', "files", "openai-responses.mcp_approval_response"),
        allow='{"approve":true}',
        deny='{"approve":false}',
    ),
    n.BlockStop(0),
)
"""A call that the provider runs once somebody has allowed it."""


def answered(story: Story) -> list[tuple[str | None, str | None]]:
    items = [e for e in of_type(story.events, BlockComplete) if e.kind == "server_tool"]
    return [(e.item, e.content) for e in items[1:]]


@pytest.mark.parametrize(
    ("decision", "reason", "answer"),
    [
        ("allow", "", '{"approve":true}'),
        ("deny", "", '{"approve":false}'),
        ("deny", "too dear", '{"approve":false,"reason":"too dear"}'),
    ],
)
@pytest.mark.parametrize("max_tool_depth", [0, 10])
def test_a_call_that_the_provider_runs_waits_and_the_decision_goes_back_to_it(
    decision: Verdict, reason: str, answer: str, max_tool_depth: int
) -> None:
    story = Story(max_tool_depth=max_tool_depth)
    story.provider(*HOSTED, n.Done("tool_use", "completed"))
    (waiting,) = of_type(story.events, Waiting)
    assert (waiting.what, waiting.tool_id, waiting.tool_name) == ("approval", "mcpr_1", "del")
    assert (waiting.arguments, waiting.schema, waiting.text) == ('{"n":1}', None, "MCP server: files")
    assert waiting.deadline_ms == story.at_ms + 86_400_000
    assert waits_only(story.run.state)
    story.reborn()
    story.control(WaitDecided("0.0", "approval", decision, "d1", "ann", "cli", reason=reason))
    item = "openai-responses.mcp_approval_response"
    assert answered(story) == [(item, answer)]
    (turn,) = [e for e in story.effects if isinstance(e, NextTurn)]
    assert turn.history
    (said,) = turn.history
    assert [(part.name, part.json) for part in said.content] == [  # type: ignore[union-attr]
        ("openai-responses.mcp_approval_request", '{"id":"mcpr_1"}'),
        (item, answer),
    ]
    story.control(WaitDecided("0.0", "approval", "deny", "d2"))
    assert len(answered(story)) == 1


def test_a_turn_with_calls_of_both_goes_on_once_all_are_answered() -> None:
    story = Story()
    story.provider(*HOSTED, *call(1, "b", "g", '{"n":2}'), n.Done("tool_use"))
    assert handed_out(story) == [("g", '{"n":2}')]
    story.control(ToolReturned(1, "two", False))
    assert results(story) == [], "the answers come in the order of the calls"
    story.control(WaitDecided("0.0", "approval", "allow", "d1"))
    assert results(story) == [("g", "two")]
    (turn,) = [e for e in story.effects if isinstance(e, NextTurn)]
    assert turn.history
    assert [(message.role, len(message.content)) for message in turn.history] == [("assistant", 3), ("tool", 1)]


def test_a_run_whose_client_runs_the_calls_ends_with_them_and_with_what_the_provider_asks() -> None:
    story = Story(max_tool_depth=0)
    story.provider(*HOSTED, *call(1, "b", "g", '{"n":2}'), n.Done("tool_use"))
    assert not of_type(story.events, Waiting)
    assert [e.status for e in story.effects if isinstance(e, EndRun)] == ["completed"]


def test_a_cancelled_run_has_denied_what_the_provider_asks() -> None:
    story = Story()
    story.provider(*HOSTED, n.Done("tool_use"))
    story.control(CancelRequested("enough"))
    assert answered(story) == [("openai-responses.mcp_approval_response", '{"approve":false,"reason":"cancelled"}')]
    assert of_type(story.events, Cancelled)


def test_the_time_for_which_a_run_only_waits_does_not_count_for_its_deadline() -> None:
    story = asked(waits={"f": ALWAYS, "g": ALWAYS}, deadline_after_ms=1_000)
    begun, before = story.at_ms, story.run.state.accepted.deadline_ms
    assert story.run.state.waits_since_ms == begun
    story.reborn()
    story.at_ms += 4_000
    story.control(allow("0.0"))
    moved = before + story.at_ms - begun
    assert story.run.state.accepted.deadline_ms == moved
    assert [e.deadline_ms for e in story.effects if isinstance(e, MoveDeadline)] == [moved]
    assert not story.run.state.waits_since_ms, "a worker has a call"
    story.control(ToolReturned(0, "one", False))
    assert story.run.state.waits_since_ms, "the other call waits"
    story.control(WaitDecided("1.0", "approval", "deny", "d2"))
    assert story.run.state.phase == "streaming"
    assert len([e for e in story.effects if isinstance(e, MoveDeadline)]) == 2
