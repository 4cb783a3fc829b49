"""`tokenbus chat` on real terminals, when a call of the session waits for a person or a client."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import aclosing

import pytest

from tests.e2e.tools.test_waits import SETTINGS, calls
from tests.services.cli.process import fed
from tests.terminal import TAB, Terminal, terminal
from tests.waiting import eventually
from tokenbus import Client, WaitInfo
from tokenbus.events.public import BlockComplete, Resumed
from tokenbus.testing import LocalBus

READY, ASKS = "· /help", "it asks, Ctrl-C interrupts"
HINT = "yes, no REASON, or yes {…} with other arguments"


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus(SETTINGS) as running:
        running.model_says("pays", calls(("pay", {"amount": 500})), "Done.")
        running.model_says("pays twice", calls(("pay", {"amount": 500}), ("pay", {"amount": 900})), "Done.")
        running.model_says("books", calls(("book", {"flight": "LH1"})), "Done.")
        running.model_says("shows", calls(("show", {})), "Done.")
        yield running


def talk(model: str, tool: str = "pay") -> tuple[str, ...]:
    return ("--provider", "anthropic", "--model", model, "--tool", tool)


async def decisions(bus: LocalBus, session: str) -> tuple[list[tuple[str, str | None, str]], list[str | None]]:
    """How each wait of a session ended, by whom and over which door; and the results that the model read."""
    resumed: list[tuple[str, str | None, str]] = []
    results: list[str | None] = []
    async with bus.client() as client, aclosing(client.session(session).follow(live=False)) as steps:
        async for step in steps:
            if isinstance(event := step.event, Resumed):
                resumed.append((event.decision, event.by, event.door))
            elif isinstance(event, BlockComplete) and event.kind == "tool_result":
                results.append(event.content)
    return resumed, results


async def test_one_terminal_asks_and_the_call_runs_with_the_arguments_that_were_edited_there(bus: LocalBus) -> None:
    async with terminal("chat", "edits", *talk("pays"), "--as", "ada", **bus.environment) as ada:
        await ada.shows(READY)
        ada.type("pay it\r")
        await ada.shows("  may this run?\n", '  pay {"amount":500}\n', "  until ", ", then deny\n", HINT, ASKS)
        ada.type("yes please\r")
        await ada.shows("yes: what follows is no JSON object", HINT, ASKS)
        ada.type('yes {"amount": "much"}\r')
        await ada.shows("arguments.amount", HINT, ASKS)
        ada.type(f"yes {TAB}")
        await ada.shows('> yes {"amount":500}')
        ada.type("\x7f" * 3 + "7}\r")
        text = await ada.shows('pay allowed by ada, over chat: {"amount":57}\n', "pays > Done.\n", READY)
        assert text.count("may this run?") == 1
    assert await decisions(bus, "edits") == ([("allow", "ada", "chat")], ['{"amount":57}'])
    audited = await fed(b"", "audit", "--json", **bus.environment)
    assert '"action":"decide"' in audited.out


async def test_another_terminal_decides_first_and_the_late_word_decides_nothing_else(bus: LocalBus) -> None:
    async with (
        terminal("chat", "two", *talk("pays twice"), "--as", "ada", **bus.environment) as ada,
        terminal("chat", "two", *talk("pays twice"), "--as", "bob", **bus.environment) as bob,
    ):
        await shows(ada, bob, READY)
        ada.type("pay it\r")
        await shows(ada, bob, '  pay {"amount":500} (1 of 2)\n', ASKS)
        bob.type("yes")  # about the first call, and Enter comes too late
        await bob.shows("> yes")
        ada.type("no, too dear\r")
        await shows(ada, bob, "pay denied by ada, over chat: too dear\n", '  pay {"amount":900}\n', ASKS)
        bob.type("\r")
        await bob.shows("was decided before: deny by", '  pay {"amount":900}\n', ASKS)
        bob.type("y\r")
        await shows(ada, bob, "pay allowed by bob, over chat\n", "pays twice > Done.\n", READY)
    resumed, results = await decisions(bus, "two")
    assert resumed == [("deny", "ada", "chat"), ("allow", "bob", "chat")]
    assert results == ["the call was denied, and did not run: too dear", '{"amount":900}']


async def shows(ada: Terminal, bob: Terminal, *parts: str) -> None:
    for each in (ada, bob):
        await each.shows(*parts)


async def test_a_terminal_that_comes_later_asks_too_and_other_words_are_messages(bus: LocalBus) -> None:
    async with terminal("chat", "later", *talk("pays"), "--as", "ada", **bus.environment) as ada:
        await ada.shows(READY)
        ada.type("pay it\r")
        await ada.shows(HINT)
    async with terminal("chat", "later", "--as", "bob", **bus.environment) as bob:
        await bob.shows("ada > pay it\n", "  may this run?\n", HINT, ASKS)
        bob.type("well, it depends\r")
        await bob.shows("bob > well, it depends (goes in at the next turn, or follows)\n", HINT)
        bob.type("No\r")
        await bob.shows("pay denied by bob, over chat\n", "bob > well, it depends\n", "pays > Done.\n", READY)
    assert await decisions(bus, "later") == ([("deny", "bob", "chat")], ["the call was denied, and did not run"])


async def test_a_terminal_is_the_client_that_returns_a_result(bus: LocalBus) -> None:
    async with terminal("chat", "shows", *talk("shows", "show"), "--as", "ada", **bus.environment) as ada:
        await ada.shows(READY)
        ada.type("show it\r")
        await ada.shows("  what is the result of this?\n", "  show {}\n", "/answer RESULT, or /decline REASON", ASKS)
        ada.type("/answer seen\r")
        await ada.shows('"seen" is', ASKS)
        ada.type('/answer {"seen": true}\r')
        await ada.shows("show the result came by ada, over chat\n", "shows > Done.\n", READY)
        ada.type("/answer again\r")
        await ada.shows("/answer: nothing asks for it")
    assert await decisions(bus, "shows") == ([("result", "ada", "chat")], ['{"seen":true}'])


async def test_a_tools_questions_are_answered_on_the_line(bus: LocalBus) -> None:
    async with terminal("chat", "books", *talk("books", "book"), "--as", "ada", **bus.environment) as ada:
        await ada.shows(READY)
        ada.type("book it\r")
        await ada.shows("  Which seat on LH1?\n", "  book\n", "/answer {…}, or /decline", ASKS)
        ada.type('/answer {"seat": "12A"}\r')
        await ada.shows("book answered by ada, over chat\n", "  Book 12A?\n", ASKS)
        ada.type("/decline\r")
        await ada.shows("book declined by ada, over chat\n", "books > Done.\n", READY)
    resumed, results = await decisions(bus, "books")
    assert resumed == [("accept", "ada", "chat"), ("decline", "ada", "chat")]
    assert results == ["not booked: decline"]


async def test_through_a_pipe_it_is_said_where_to_decide(bus: LocalBus) -> None:
    await fed(b"", "--version")  # from here on a start blocks nothing
    async with bus.client() as client:
        talking = asyncio.create_task(fed(b"pay it\n", "chat", "piped", *talk("pays"), **bus.environment))
        info = await eventually(lambda: first_wait(client))
        assert info
        await client.deny(info.run, info.wait, by="ann")
    ended = await talking
    assert (ended.code, ended.out) == (0, "Done.\n")
    assert ended.err.startswith('may this run?\npay {"amount":500}\nuntil ')
    assert ended.err.endswith(f"`tokenbus waiting {info.run}` lists it\npay denied by ann, over bus\n")


async def first_wait(client: Client) -> WaitInfo | None:
    async with aclosing(client.waiting()) as listed:
        return await anext(listed, None)
