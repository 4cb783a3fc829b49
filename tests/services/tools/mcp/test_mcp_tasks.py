"""Calls that become tasks at their server: asked for their state, by whichever worker has the call."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.services.tools.conftest import call
from tests.services.tools.mcp.conftest import Notes, Start, answer
from tests.waiting import eventually
from tokenbus.events.frames import GivenAnswer, ToolReported
from tokenbus_services.settings import McpStdio
from tokenbus_services.tools.executor import ToolExecutor, ToolOutcome

SERVER = Path(__file__).with_name("task_server.py")


def tasks(**settings: Any) -> McpStdio:
    return McpStdio(command=sys.executable, args=(str(SERVER),), **settings)


class Kept:
    """What the bus keeps of a call."""

    def __init__(self) -> None:
        self.task = ""
        self.wanted = True

    async def find(self) -> str:
        return self.task

    async def keep(self, task: str) -> bool:
        self.task = task
        return self.wanted

    async def is_wanted(self) -> bool:
        return self.wanted


def begin(executor: ToolExecutor, kept: Kept, word: str, reports: list[str] | None = None) -> asyncio.Task[ToolOutcome]:
    async def deliver(report: ToolReported) -> None:
        if reports is not None:
            reports.append(report.message or "")

    asked = call("here__report", f'{{"word": "{word}"}}')
    return asyncio.create_task(executor.execute(asked, deliver, None, kept))


async def test_a_task_is_asked_until_it_has_its_result(start: Start, notes: Notes) -> None:
    executor, kept, reports = await start(here=tasks()), Kept(), list[str]()
    working = begin(executor, kept, "one", reports)
    await eventually(lambda: reports)
    await eventually(lambda: notes.lines.count("asked") >= 3)
    assert kept.task
    with notes.path.open("a") as file:
        file.write("go one\n")
    assert await asyncio.wait_for(working, 60) == ToolOutcome("one")
    assert reports == ["half of it"], "what it says is told once"


async def test_the_next_worker_asks_on_and_calls_nothing_again(start: Start, notes: Notes) -> None:
    kept = Kept()
    first = begin(await start(here=tasks()), kept, "one")
    await eventually(lambda: kept.task)
    first.cancel()  # its worker is asked to stop: the call is still wanted
    with suppress(asyncio.CancelledError):
        await first
    with notes.path.open("a") as file:
        file.write("go one\n")
    assert await asyncio.wait_for(begin(await start(here=tasks()), kept, "one"), 60) == ToolOutcome("one")
    assert [line for line in notes.lines if line.startswith("called")] == ["called report one"]
    assert "cancelled" not in notes.lines


async def test_a_task_whose_result_nobody_wants_is_cancelled(start: Start, notes: Notes) -> None:
    executor, kept = await start(here=tasks()), Kept()
    working = begin(executor, kept, "one")
    await eventually(lambda: kept.task)
    kept.wanted = False
    working.cancel()
    with suppress(asyncio.CancelledError):
        await working
    await notes.has("cancelled")


async def test_a_task_beyond_the_calls_timeout_is_cancelled(start: Start, notes: Notes) -> None:
    executor = await start(here=tasks(timeout_s=1.0))
    outcome = await asyncio.wait_for(begin(executor, Kept(), "one"), 60)
    assert (outcome.is_error, "no result within 1 s" in outcome.content) == (True, True)
    await notes.has("cancelled")


async def test_what_a_task_asks_is_a_question_and_the_task_gets_the_answer(start: Start, notes: Notes) -> None:
    first, second = await start(here=tasks(answer_timeout_s=3600.0)), await start(here=tasks())
    seat = (await answer(first, "here__book")).asked
    assert seat
    assert (seat.text, seat.timeout_ms) == ("Which seat?", 3_600_000)
    chosen = GivenAnswer(seat.question, "accept", '{"seat": "12A"}', "ann", "http")
    sure = (await answer(second, "here__book", answers=[chosen], state=seat.state)).asked
    assert sure
    assert sure.text == "Sure?", "the first is not asked again"
    answers = [chosen, GivenAnswer(sure.question, "decline", "", "ann", "http")]
    done = await answer(first, "here__book", answers=answers, state=sure.state)
    assert done == ToolOutcome("12A, decline")
    again = await answer(second, "here__book", answers=answers, state=sure.state)
    assert again == done, "the worker died before it delivered the result"
    assert [line for line in notes.lines if line.startswith("called")] == ["called book "]


async def test_a_task_that_fails_is_an_error(start: Start) -> None:
    outcome = await answer(await start(here=tasks()), "here__breaks")
    assert outcome == ToolOutcome("MCP error -32000: out of paper", is_error=True)


async def test_a_server_that_restarts_is_asked_again(start: Start, notes: Notes) -> None:
    executor, kept = await start(here=tasks()), Kept()
    working = begin(executor, kept, "one")
    await eventually(lambda: kept.task)
    os.kill(notes.pids[0], signal.SIGKILL)
    await eventually(lambda: len(notes.pids) == 2)
    with notes.path.open("a") as file:
        file.write("go one\n")
    assert await asyncio.wait_for(working, 60) == ToolOutcome("one")
    assert [line for line in notes.lines if line.startswith("called")] == ["called report one"]
