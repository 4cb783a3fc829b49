"""What servers ask before a call can end: questions of the call, answered by any client, in any worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.services.tools.mcp.conftest import Notes, Start, answer, stdio
from tokenbus.events.frames import GivenAnswer, ToolAsked
from tokenbus.events.waits import Verdict
from tokenbus_services.tools.executor import ToolExecutor, ToolOutcome

OLDER = Path(__file__).with_name("older_server.py").read_text()


async def asked(executor: ToolExecutor, name: str, arguments: str = "{}", **changes: Any) -> ToolAsked:
    found = await answer(executor, name, arguments, **changes)
    assert found.asked, found
    return found.asked


def given(question: ToolAsked, decision: Verdict = "accept", content: str = "") -> GivenAnswer:
    return GivenAnswer(question.question, decision, content, "ann", "http")


async def test_each_request_of_a_round_is_a_question_and_another_worker_sends_the_responses(
    start: Start, notes: Notes
) -> None:
    first, second = await start(here=stdio(answer_timeout_s=3600.0)), await start(here=stdio())
    seat = await asked(first, "here__book", '{"flight": "LH1"}')
    assert (seat.text, seat.url, seat.timeout_ms) == ("Which seat on LH1?", None, 3_600_000)
    assert (seat.schema or {})["required"] == ["seat"]
    chosen = given(seat, content='{"seat": "12A"}')
    page = await asked(second, "here__book", '{"flight": "LH1"}', answers=[chosen], state=seat.state)
    assert (page.text, page.url, page.schema) == ("Sign.", "https://sign.example/1", None)
    answers = [chosen, given(page)]
    booked = await answer(second, "here__book", '{"flight": "LH1"}', answers=answers, state=page.state)
    assert booked == ToolOutcome("LH1/12A, accept, None")
    assert [line for line in notes.lines if line.startswith("book")] == [
        "book None None",
        "book first ['page', 'seat']",
    ]
    refused = [given(seat, "decline"), given(page, "cancel")]
    outcome = await answer(first, "here__book", '{"flight": "LH1"}', answers=refused, state=page.state)
    assert outcome == ToolOutcome("not booked: decline, cancel")


async def test_a_server_that_is_not_ready_and_asks_nobody_is_called_again(start: Start) -> None:
    assert await answer(await start(here=stdio()), "here__polled") == ToolOutcome("ready")


async def test_other_input_than_that_of_a_person_is_an_error(start: Start) -> None:
    outcome = await answer(await start(here=stdio()), "here__asks_for_roots")
    assert (outcome.is_error, "roots/list, which is not supported" in outcome.content) == (True, True)


async def test_an_older_server_is_called_again_once_its_page_was_visited(start: Start) -> None:
    executor = await start(here=stdio(script=OLDER.replace('"name": "wait"', '"name": "visit"')))
    page = await asked(executor, "here__visit")
    assert (page.text, page.url) == ("The tool asks for input.", "https://sign.example/1")
    left = await answer(executor, "here__visit", answers=[given(page, "cancel")], state=page.state)
    assert left == ToolOutcome("nobody visited the page that the tool needs", is_error=True)
    done = await answer(executor, "here__visit", answers=[given(page)], state=page.state)
    assert done == ToolOutcome('{"degrees":7}')
