"""A tool's own questions: what a call that asks comes to, and that it runs again with the answers."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from tests.services.tools.conftest import SAMPLES, call
from tests.services.tools.sample_tools import SEAT, SURE
from tokenbus.bus.liveness import Liveness
from tokenbus.events.frames import GivenAnswer, ToolAsked
from tokenbus.events.waits import Verdict
from tokenbus_services.settings import LimitSettings, PythonTool, Settings, ToolSettings
from tokenbus_services.tools.executor import ToolExecutor, ToolOutcome
from tokenbus_services.tools.questions import MOST_QUESTIONS

ASKING = (
    *("book", "ask_briefly", "ask_on_a_page", "ask_stubbornly", "ask_in_a_task", "ask_in_a_thread"),
    *("ask_then_crash_once", "ask_something_else", "ask_badly", "ask_on_and_on", "give"),
)
BOTH = pytest.mark.parametrize("in_executors", [True, False], ids=["in_executors", "in_the_worker"])


@asynccontextmanager
async def tools(*, in_executors: bool, questions: Literal["rerun", "wait"] = "rerun") -> AsyncGenerator[ToolExecutor]:
    declared: dict[str, ToolSettings] = {
        name: PythonTool(call=f"{SAMPLES}:{name}", answer_timeout_s=7200.0, questions=questions) for name in ASKING
    }
    settings = Settings(tools=declared, limits=LimitSettings(tool_executors=in_executors))
    made = ToolExecutor.from_settings(settings, {"BOOKING_TOKEN": "tk-very-secret"})
    await made.open(Liveness())
    try:
        yield made
    finally:
        await made.close()


async def asked(made: ToolExecutor, name: str, answers: list[GivenAnswer], **arguments: object) -> ToolAsked:
    found = await run(made, name, answers, **arguments)
    assert found.asked, found
    return found.asked


async def run(made: ToolExecutor, name: str, answers: list[GivenAnswer], **arguments: object) -> ToolOutcome:
    return await made.execute(msgspec.structs.replace(call(name, json.dumps(arguments)), answers=answers))


def given(question: ToolAsked, decision: Verdict = "accept", **content: object) -> GivenAnswer:
    text = json.dumps(content) if content else ""
    return GivenAnswer(question.question, decision, text, "ann", "http")


@BOTH
async def test_a_call_that_asks_ends_and_runs_again_with_the_answers(*, in_executors: bool) -> None:
    async with tools(in_executors=in_executors) as made:
        first = await asked(made, "book", [], flight="LH1")
        assert (first.text, first.schema, first.timeout_ms) == ("Which seat on LH1?", SEAT, 7_200_000)
        assert await asked(made, "book", [], flight="LH1") == first, "it asks the same"
        seat = given(first, seat="12A")
        second = await asked(made, "book", [seat], flight="LH1")
        assert (second.text, second.schema, second.timeout_ms) == ("Book 12A?", SURE, 3_600_000)
        assert await run(made, "book", [seat, given(second, sure=True)], flight="LH1") == ToolOutcome("LH1/12A")
        declined = await run(made, "book", [given(first, "decline")], flight="LH1")
        assert declined == ToolOutcome("not booked: decline by ann over http")


@BOTH
async def test_a_question_on_a_page_has_no_content(*, in_executors: bool) -> None:
    async with tools(in_executors=in_executors) as made:
        page = await asked(made, "ask_on_a_page", [])
        assert (page.url, page.schema) == ("https://sign.example/in", None)
        assert await run(made, "ask_on_a_page", [given(page)]) == ToolOutcome("accept, {}")
        assert await run(made, "ask_on_a_page", [given(page, "cancel")]) == ToolOutcome("cancel, None")


@BOTH
@pytest.mark.parametrize("name", ["ask_stubbornly", "ask_in_a_task", "ask_in_a_thread"])
async def test_a_tool_cannot_catch_the_end_of_its_call(name: str, *, in_executors: bool) -> None:
    async with tools(in_executors=in_executors) as made:
        question = await asked(made, name, [])
        assert question.text == "Really?"
        ended = await run(made, name, [given(question, sure=True)])
        assert ended in (ToolOutcome("answered"), ToolOutcome("went on"), ToolOutcome("accept"))
        assert await run(made, "give", [], size=2) == ToolOutcome("xx"), "the next call is not disturbed"


@BOTH
async def test_an_answer_is_never_taken_for_that_to_another_question(*, in_executors: bool) -> None:
    async with tools(in_executors=in_executors) as made:
        first = await asked(made, "ask_something_else", [])
        wrong = msgspec.structs.replace(given(first, sure=True), question="another")
        assert await run(made, "ask_something_else", [wrong]) == ToolOutcome(
            "question 1 is not the one that was answered, so the call cannot go on", is_error=True
        )


@pytest.mark.parametrize(
    ("schema", "text", "timeout_s", "why"),
    [
        ({"type": "string"}, "Which?", None, "its schema must be that of an object"),
        (None, "Which?", None, "its schema must be that of an object"),
        ({"type": "object", "required": 1}, "Which?", None, "schema: not a JSON schema: $.required"),
        ({"type": "object", "title": "x" * 70_000}, "Which?", None, "its schema has more than 65536 bytes"),
        (SURE, "", None, "its text must have 1 to 4000 characters"),
        (SURE, "x" * 4001, None, "its text must have 1 to 4000 characters"),
        (SURE, "Which?", 0, "timeout_s must be above 0, and at most 518400"),
        (SURE, "Which?", 600_000, "timeout_s must be above 0, and at most 518400"),
    ],
)
async def test_what_cannot_be_asked_is_an_error_that_says_why(
    schema: object, text: str, timeout_s: float | None, why: str
) -> None:
    async with tools(in_executors=False) as made:
        found = await run(made, "ask_badly", [], schema=schema, text=text, timeout_s=timeout_s)
        assert (found.is_error, why in found.content) == (True, True), found.content


async def test_a_call_asks_only_so_many_questions() -> None:
    async with tools(in_executors=False) as made:
        question = await asked(made, "ask_on_and_on", [])
        assert await asked(made, "ask_on_and_on", [given(question)] * (MOST_QUESTIONS - 1)) == question
        found = await run(made, "ask_on_and_on", [given(question)] * MOST_QUESTIONS)
        assert "it is number 101; a call may ask 100" in found.content


async def test_secrets_are_removed_from_questions() -> None:
    async with tools(in_executors=False) as made:
        schema = {"type": "object", "properties": {"ok": {"type": "boolean", "title": "with tk-very-secret"}}}
        found = await asked(made, "ask_badly", [], schema=schema, text="Send tk-very-secret?")
        assert "tk-very-secret" not in repr(found)
        assert found.schema


@BOTH
@pytest.mark.parametrize("name", ["book", "ask_in_a_thread"])
async def test_a_tool_that_cannot_run_again_waits_for_its_answers(name: str, *, in_executors: bool) -> None:
    seen: list[tuple[str, int, bool]] = []

    async def hold(question: ToolAsked) -> GivenAnswer:
        seen.append((question.text, question.number, 0 < question.timeout_ms <= 54_000))
        return given(question, seat="12A") if "seat" in question.text else given(question, sure=True)

    async with tools(in_executors=in_executors, questions="wait") as made:
        arguments = json.dumps({"flight": "LH1"} if name == "book" else {})
        outcome = await made.execute(call(name, arguments), None, hold)
        if name == "book":
            assert outcome == ToolOutcome("LH1/12A")
            assert seen == [("Which seat on LH1?", 0, True), ("Book 12A?", 1, True)]
        else:
            assert (outcome, seen) == (ToolOutcome("accept"), [("Really?", 0, True)])
        bad = await made.execute(call("ask_badly", json.dumps({"schema": SURE, "text": ""})), None, hold)
        assert (bad.is_error, "its text must have" in bad.content) == (True, True)


async def test_a_call_that_is_begun_again_in_its_worker_asks_the_same_question_again(tmp_path: Path) -> None:
    numbers: list[int] = []

    async def hold(question: ToolAsked) -> GivenAnswer:
        numbers.append(question.number)
        return given(question, sure=True)

    async with tools(in_executors=True, questions="wait") as made:
        await made.execute(call("give", '{"size": 1}'))
        arguments = json.dumps({"path": str(tmp_path / "crashed")})
        outcome = await made.execute(call("ask_then_crash_once", arguments), None, hold)
        assert (outcome, numbers) == (ToolOutcome("accept"), [0, 0])
