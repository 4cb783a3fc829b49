"""What servers ask before a call can end: questions of the call, answered by any client, in any worker."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.services.tools.conftest import call
from tests.services.tools.mcp.conftest import Notes, Start, answer, stdio
from tokenbus.events.frames import GivenAnswer, ToolAsked
from tokenbus.events.waits import Verdict
from tokenbus_services.settings import McpStdio
from tokenbus_services.tools.executor import ToolExecutor, ToolOutcome
from tokenbus_services.tools.questions import Hold

OLDER = Path(__file__).with_name("older_server.py")


def older(tool: str, **settings: Any) -> McpStdio:
    """A server of an older version with this tool."""
    return McpStdio(command=sys.executable, args=(str(OLDER), tool), **settings)


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
    executor = await start(here=older("visit"))
    page = await asked(executor, "here__visit")
    assert (page.text, page.url) == ("The tool asks for input.", "https://sign.example/1")
    left = await answer(executor, "here__visit", answers=[given(page, "cancel")], state=page.state)
    assert left == ToolOutcome("nobody visited the page that the tool needs", is_error=True)
    done = await answer(executor, "here__visit", answers=[given(page)], state=page.state)
    assert done == ToolOutcome('{"degrees":7}')


async def choose(executor: ToolExecutor, hold: Hold | None, **changes: Any) -> ToolOutcome:
    return await asyncio.wait_for(executor.execute(call("here__choose", **changes), None, hold), 60)


async def test_what_an_older_server_asks_within_a_call_waits_in_the_worker_and_no_longer_than_the_call(
    start: Start,
) -> None:
    executor = await start(here=older("choose", timeout_s=30.0))
    questions: list[ToolAsked] = []

    async def says(asked: ToolAsked) -> GivenAnswer:
        questions.append(asked)
        return given(asked, content='{"seat": "12A"}')

    assert await choose(executor, says) == ToolOutcome('{"action": "accept", "content": {"seat": "12A"}}')
    (question,) = questions
    assert (question.text, question.number, 0 < question.timeout_ms <= 27_000) == ("Which seat?", 0, True)

    async def leaves(asked: ToolAsked) -> GivenAnswer:
        return given(asked, "cancel")

    assert await choose(executor, leaves) == ToolOutcome('{"action": "cancel"}')
    assert await choose(executor, None) == ToolOutcome('"nobody can be asked"')


async def test_a_question_that_no_call_can_be_named_for_is_refused(start: Start) -> None:
    executor = await start(here=older("choose"))
    told = asyncio.Event()

    async def waits(asked: ToolAsked) -> GivenAnswer:
        told.set()
        await asyncio.Event().wait()
        raise AssertionError

    first = asyncio.create_task(choose(executor, waits))
    await told.wait()
    refused = choose(executor, waits)
    second = asyncio.create_task(refused)
    # The server answers the call that it had first with whatever it is told next.
    assert await first == ToolOutcome('"2 calls are in progress, and one of them cannot be asked for"')
    second.cancel()
    with suppress(asyncio.CancelledError):
        await second
