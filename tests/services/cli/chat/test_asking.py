"""What is asked, as it is read on a terminal, and what lines decide about it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tokenbus.errors import RequestInvalid
from tokenbus.events.public import Waiting
from tokenbus.events.requests import Answer, Approval, ToolResult, WaitDecision
from tokenbus.events.waits import WaitKind
from tokenbus_services.cli.chat.asking import decided, text_of


def asks(what: WaitKind = "approval", **more: Any) -> Waiting:
    fields = {"run": "r1", "seq": 3, "turn": 0, "attempt": 1, "wait": "0.1", "block": 0, "tool_id": "t1"}
    return Waiting(**{**fields, "what": what, "tool_name": "pay", "deadline_ms": 0, "arguments": '{"to":"x"}', **more})


def test_what_is_read_is_what_runs() -> None:
    hidden = asks(arguments='{"to":"a\u202eb\u200b\U000e0041"}')
    assert '{"to":"a\\u202eb\\u200b\\udb40\\udc41"}' in text_of(hidden)
    long = text_of(asks(arguments="x" * 10_000))
    assert "… (10004 characters; `tokenbus waiting r1 --json` has them all)" in long


@pytest.mark.parametrize(
    ("what", "line", "decision"),
    [
        ("approval", "yes", Approval),
        ("approval", "Y", Approval),
        ("approval", "no", Approval),
        ("approval", "yesterday", None),
        ("approval", "nothing", None),
        ("approval", "/now yes", None),
        ("tool_result", "yes", None),
        ("tool_result", "/answer yes", ToolResult),
        ("tool_result", "/decline", ToolResult),
        ("answer", "no", None),
        ("answer", "/decline", Answer),
    ],
)
def test_other_lines_than_those_of_the_kind_decide_nothing(
    what: WaitKind, line: str, decision: type[WaitDecision] | None
) -> None:
    found = decided(asks(what), line, "ada")
    assert type(found) is (decision or type(None))
    if not line.startswith(("/answer", "/decline")):
        assert decided(None, line, "ada") is None, "nothing was asked when it was typed"


def test_a_reason_other_arguments_and_values_are_what_follows() -> None:
    known: dict[str, Any] = {"run": "r1", "wait": "0.1", "by": "ada", "door": "chat", "decision_id": "d"}
    assert told(asks(), "no, too dear") == Approval(decision="deny", reason="too dear", **known)
    assert told(asks(), 'yes {"to": "y"}') == Approval(decision="allow", arguments={"to": "y"}, **known)
    text, schema = asks("tool_result"), asks("tool_result", schema={"type": "object"})
    assert told(text, "/answer 5") == ToolResult(content="5", **known)
    assert told(schema, '/answer {"a": 5}') == ToolResult(content={"a": 5}, **known)
    assert told(text, "/decline broken") == ToolResult(content="broken", is_error=True, **known)
    assert told(asks("answer"), '/answer {"a": 5}') == Answer(content={"a": 5}, **known)


def told(ask: Waiting, line: str) -> WaitDecision:
    found = decided(ask, line, "ada")
    assert found
    return msgspec.structs.replace(found, decision_id="d")


@pytest.mark.parametrize(
    ("ask", "line"),
    [
        (asks(), "yes please"),
        (asks(), "/answer 1"),
        (asks("answer"), "/answer bonn"),
        (None, "/answer 1"),
        (None, "/decline"),
    ],
)
def test_a_decision_in_other_words_says_what_is_wrong(ask: Waiting | None, line: str) -> None:
    with pytest.raises(RequestInvalid):
        decided(ask, line, "ada")
