"""Three people, two models of different providers, a tool, a policy that moderates what goes in and what comes out, and
a listener who interrupts, while a terminal, a browser and programs follow and every worker dies once: all of them get
the same conversation.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.console.browser import ALLOWED_ERRORS, browser, page_of
from tests.e2e.conftest import WEATHER
from tests.e2e.fleet import PIPELINE, WITH_TOOLS, Fleet, fleet
from tests.e2e.sessions.test_sessions import told
from tests.terminal import COLUMNS, Terminal, terminal
from tests.waiting import eventually
from tokenbus import Chunk, Client, Message
from tokenbus.bus.keys import Keys
from tokenbus.client.sessions.reader import SessionStep
from tokenbus.client.sessions.session import Session
from tokenbus.events.public import Restarted, Retrying
from tokenbus.events.requests import SessionMessage, TextPart
from tokenbus.events.sessions import Appended, Delivered, Fate, RunEnded
from tokenbus_services.cli.chat.rows import Rows
from tokenbus_services.cli.chat.transcript import Transcript
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, ToolCall, Turn
from tokenbus_services.mock_provider.request import ModelRequest

SETTINGS = """
[gateway]
[console]
roles_without_keys = ["see_content", "act"]
[policies.spelling]
use = "tokenbus.policy:ReplaceText"
[policies.spelling.options]
rules = [{ find = "colour", replace = "color" }]
[policies.manners]
use = "tests.e2e.policies.guards:StopAt"
options = { word = "rude" }
[[policy_routes]]
policies = ["spelling"]
input_policies = ["spelling", "manners"]
"""
REQUEST: dict[str, Any] = {
    "provider": "openai-chat",
    "model": "crew",
    "tools": [WEATHER],
    "on_failure": "restart",
    "names_in_text": True,
}
PEOPLE = ("ann", "ben", "cat")
LAST = "That is all"


def answer(request: ModelRequest) -> Turn:
    """Slow enough that somebody can interrupt it, and that workers die in the middle."""
    if request.tool_results:
        return Turn(says=Reply(text="It is warm there, and the colour of the sky is blue."), delivery=Delivery(pace=30))
    if "weather" in request.user_text:
        call = ToolCall(name="weather", arguments={"city": "Rome"})
        return Turn(says=Reply(thinking="A tool knows.", text="Let me look.", tool_calls=(call,)))
    said = " ".join(f"{n}: any colour you like." for n in range(8))
    return Turn(says=Reply(text=f"{said} So much for “{request.user_text}”."), delivery=Delivery(pace=30))


async def settled(session: Session, append: str) -> Fate:
    async def fate() -> Fate | None:
        found = await session.fate(append)
        return found if found and found.state != "appended" else None

    found = await eventually(fate, timeout=240)
    assert found
    return found


async def speak(session: Session, who: str) -> None:
    """One after the other: ben's go into the answer that is open, if they can."""
    for n, text in enumerate(("What is the weather?", f"I am {who}", "And another colour?")):
        await session.send(
            text, participant=who, append=f"{who}-{n}", when_busy="steer" if who == "ben" else None, wait_s=120
        )
        if who == "ann":
            await session.configure({**REQUEST, "provider": ("anthropic", "openai-chat")[n % 2]}, wait_s=120)


HEARD = 2
"""Characters of the last chunk that was heard."""


async def listen(session: Session) -> tuple[str, int]:
    """A voice: it is interrupted in the middle of a word of the second answer, and says how much was heard, which it
    returns: the run and its last event.
    """
    runs: list[str] = []
    async for step in session.follow():
        event = step.event
        if isinstance(event, Chunk) and event.visible:
            runs += [event.run] if event.run not in runs else []
            if len(runs) > 1:
                receipt = await session.interrupt(heard_through=event.seq, heard_characters=HEARD, wait_s=120)
                fate = await settled(session, receipt.append)
                if fate.state == "delivered":
                    return fate.run or "", event.seq
    raise AssertionError("the session goes on")


async def kill(workers: Fleet, provider: MockProvider) -> None:
    """kill -9 each worker in the middle of a call, and start another."""
    for n, kind in enumerate((*PIPELINE, "tools", "policy"), 1):
        await provider.requested(n)
        victim = next(one for one in workers.workers if one.kind == kind)
        victim.kill()
        await victim.process.wait()
        await workers.start(kind)  # pyright: ignore[reportArgumentType]


async def test_all_readers_of_a_crews_session_get_the_same_conversation_while_workers_die(
    server_url: str, keys: Keys, tmp_path: Path
) -> None:
    env = {"TOKENBUS_CONFIG": str(tmp_path / "tokenbus.toml")}
    kinds = (*WITH_TOOLS, "policy", "gateway")
    async with (
        browser() as chromium,
        MockProvider(choose=answer) as provider,
        fleet(tmp_path, server_url, keys, provider.url, kinds, SETTINGS) as workers,
        Client(server_url, prefix=keys.prefix) as bus,
        terminal("chat", "crew", "--as", "dan", "--provider", "openai-chat", "--model", "crew", **env) as screen,
        page_of(chromium, allowed=ALLOWED_ERRORS) as page,
    ):
        await screen.shows("crew · openai-chat/crew", "· /help")
        session, gateway = bus.session("crew"), workers.worker_of("gateway").url
        await session.configure(REQUEST)
        await page.goto(f"{gateway}/console/#session=crew")
        listening = asyncio.create_task(listen(session))
        killing = asyncio.create_task(kill(workers, provider))
        await asyncio.gather(*(speak(session, who) for who in PEOPLE))
        rude = await session.send("Something rude, and more", participant="cat", append="rude", wait_s=120)
        fates = [await settled(session, f"{who}-{n}") for who in PEOPLE for n in range(3)]
        assert [fate.state for fate in fates] == ["delivered"] * 9
        (cut, through), _ = await asyncio.gather(listening, killing)
        await session.send(LAST, participant="ann", append="last", when_busy="enqueue", wait_s=120)
        last = (await settled(session, "last")).run

        steps = await told(session, lambda step: isinstance(step.event, RunEnded) and step.event.run == last)
        assert [step async for step in session.follow(live=False)] == steps
        assert await from_gateway(gateway) == [(str(step.cursor), plain(step)) for step in steps]
        await eventually(lambda: on_terminal(screen) == as_rows(steps), timeout=30)
        texts = answers(steps)
        await eventually(lambda: in_browser(page, said(steps), texts))

        delivered = [step.event.append for step in steps if isinstance(step.event, Delivered)]
        assert sorted(one for one in delivered if "-" in one and one.partition("-")[0] in PEOPLE) == sorted(
            f"{who}-{n}" for who in PEOPLE for n in range(3)
        )
        assert (rude.fate.state, rude.fate.reason) == ("returned", "rejected")
        asked = " ".join(recorded.http_request.body.decode() for recorded in provider.requests)
        assert "another color?" in asked
        assert not [word for word in ("colour", "rude") if word in asked]
        assert not [step for step in steps if "Something rude" in str(step)]
        assert "cancelled" in [step.event.status for step in steps if isinstance(step.event, RunEnded)]
        assert not [text for text in texts.values() if "colour" in text]
        assert any("color" in text for text in texts.values())
        history = await session.messages()
        people = [(message.participant, message.content) for message in history if message.role == "user"]
        assert people == said(steps)
        heard, (*_, last_words) = as_heard(steps, cut, through), await bus.messages(cut)
        assert words(last_words) == heard
        assert last_words in history


def as_heard(steps: Sequence[SessionStep], run: str, through: int) -> str:
    """What was heard of the run's last block, of which only the beginning of the last chunk was."""
    chunks = [step.event for step in steps if isinstance(step.event, Chunk) and step.event.run == run]
    last = next(chunk for chunk in chunks if chunk.seq == through)
    before = [chunk.text for chunk in chunks if chunk.block == last.block and chunk.seq < through]
    return ("".join(before) + last.text[:HEARD]).rstrip()


def words(message: Message) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content if isinstance(part, TextPart))


def plain(step: SessionStep) -> Any:
    return json.loads(msgspec.json.encode(step.event))


async def from_gateway(gateway: str) -> list[tuple[str, Any]]:
    """Cursor and event of each server-sent event."""
    found: list[tuple[str, Any]] = []
    async with httpx.AsyncClient(base_url=gateway, timeout=60) as http:
        fields: dict[str, str] = {}
        for line in (await http.get("/sessions/crew/events?live=false")).text.splitlines():
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif "data" in fields:
                found.append((fields["id"], json.loads(fields["data"])))
                fields = {}
    return found


def on_terminal(screen: Terminal) -> list[str]:
    """Its rows, without the line to type on."""
    return [row for row in screen.rows if row != ">" and not row.startswith("crew ·")]


def as_rows(steps: Sequence[SessionStep]) -> list[str]:
    """What a terminal should show."""
    transcript, rows = Transcript(), Rows()
    for step in steps:
        for piece in transcript.feed(step):
            rows.add(piece, COLUMNS)
    rows.end()
    text = ("".join(part for _, part, *_ in row).rstrip() for row in rows.take())
    return [row for row in text if row]


def said(steps: Sequence[SessionStep]) -> list[tuple[str | None, Any]]:
    """Who said what, in the order in which it took effect."""
    appended: dict[str, SessionMessage] = {}
    found: list[tuple[str | None, Any]] = []
    for step in steps:
        match step.event:
            case Appended(append=append, item=SessionMessage() as message):
                appended[append] = message
            case Delivered(append=append) if append in appended:
                found.append((appended[append].participant, appended[append].content))
            case _:
                pass
    return found


def answers(steps: Sequence[SessionStep]) -> dict[str, str]:
    """The visible text of each run, without what became void."""
    blocks: dict[str, dict[int, str]] = defaultdict(dict)
    for step in steps:
        match step.event:
            case Chunk(visible=True, run=run, block=block, text=text):
                blocks[run][block] = blocks[run].get(block, "") + text
            case Retrying(run=run, drop_from=first) | Restarted(run=run, drop_from=first):
                blocks[run] = {block: text for block, text in blocks[run].items() if block < first}
            case _:
                pass
    return {run: "".join(text for _, text in sorted(of.items())) for run, of in blocks.items()}


async def in_browser(page: Any, people: list[tuple[str | None, Any]], texts: dict[str, str]) -> bool:
    shown: Any = await page.evaluate(
        """() => {
          const text = (node) => node.querySelector(".model-text").textContent;
          const author = (node) => node.querySelector("h3").textContent;
          const said = [...document.querySelectorAll(".told .utterance")].map((one) => [author(one), text(one)]);
          const answers = {};
          for (const one of document.querySelectorAll(".told .answer")) {
            const parts = [...one.querySelectorAll(".k-text:not(.s-void) .model-text")].map((part) => part.textContent);
            answers[one.dataset.run] = (answers[one.dataset.run] ?? "") + parts.join("");
          }
          return { said, answers };
        }"""
    )
    assert shown["said"] == [list(one) for one in people]
    assert {run: text for run, text in shown["answers"].items() if text} == {r: t for r, t in texts.items() if t}
    return True
