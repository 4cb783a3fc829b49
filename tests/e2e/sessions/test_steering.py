"""A message with `now` at a provider that steers its own answers: it ends the answer and begins the next one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e2e.fleet import PIPELINE, Fleet, fleet, provider_table
from tests.e2e.sessions.test_sessions import run_over, said, texts, told
from tokenbus import Chunk, Client
from tokenbus.bus.keys import Keys
from tokenbus.events.public import BlockComplete
from tokenbus.events.requests import ImagePart, Message, TextPart, UrlSource
from tokenbus.events.sessions import Fate, RunEnded
from tokenbus_services.mock_provider import CutOff, MockProvider, Reply, Script, Stall, Turn
from tokenbus_services.mock_provider.request import ModelRequest
from tokenbus_services.mock_provider.script import Fault

ANSWER = Turn(says=Reply(text="one two three four"), fault=Stall(after_text="three"))
REST = (Turn(says=Reply(text="Short.")), Turn(says=Reply(text="Bye.")))
SCRIPTS = [
    Script(name="deaf", turns=(msgspec.structs.replace(ANSWER, refuses_steering=True), *REST)),
    *(Script(name=name, turns=(ANSWER, *REST)) for name in ("steered", "breaks", "stalls")),
]
NEXT_ANSWER: dict[str, Fault] = {"breaks": CutOff(after_text="Sh"), "stalls": Stall(after_text="Sh")}
"""What goes wrong with the answer that the provider gives to a steering message, by model."""


def next_answer(request: ModelRequest) -> Turn | None:
    fault = NEXT_ANSWER.get(request.model) if "previous_response_id" in request.body else None
    return msgspec.structs.replace(REST[0], fault=fault) if fault else None


@asynccontextmanager
async def running(server_url: str, keys: Keys, tmp_path: Path) -> AsyncGenerator[tuple[MockProvider, Fleet, Client]]:
    async with (
        MockProvider(SCRIPTS, choose=next_answer) as provider,
        fleet(
            tmp_path,
            server_url,
            keys,
            provider.url,
            PIPELINE,
            provider_table("steering", "openai-responses", provider.url, "steering = true"),
        ) as workers,
        Client(server_url, prefix=keys.prefix) as bus,
    ):
        yield provider, workers, bus


def asked(provider: MockProvider, number: int) -> list[tuple[str, str]]:
    """The conversation in the body of a request to the provider."""
    body: Any = json.loads(provider.requests[number].http_request.body)
    found: list[tuple[str, str]] = []
    for item in body["input"]:
        content = item["content"]
        found.append((item["role"], content if isinstance(content, str) else "".join(p["text"] for p in content)))
    return found


def over_http(provider: MockProvider) -> list[int]:
    """Which requests began with a call: not those that the provider made of what it was steered with."""
    return [
        number
        for number, exchange in enumerate(provider.requests)
        if "previous_response_id" not in json.loads(exchange.http_request.body)
    ]


CONVERSATION = [("user", "hello"), ("assistant", "one two three"), ("user", "shorter")]


@pytest.mark.parametrize(
    ("model", "calls"),
    [("steered", [0, 2]), ("deaf", [0, 1, 2]), ("breaks", [0, 2, 3])],
    ids=["by the provider", "by the bus, if the provider refuses", "by the bus, if the next answer breaks"],
)
async def test_a_message_goes_into_the_answer(
    server_url: str, keys: Keys, tmp_path: Path, model: str, calls: list[int]
) -> None:
    async with running(server_url, keys, tmp_path) as (provider, _, bus):
        session = bus.session("hurry")
        await session.configure({"provider": "steering", "model": model, "on_failure": "restart"})
        await session.send("hello")
        await told(session, said)
        await session.send("waits")
        steer = await session.steer("shorter", now=True)
        steps = await told(session, run_over, 2)
        first = next(step.event.run for step in steps if isinstance(step.event, RunEnded))
        assert await session.fate(steer.append) == Fate(state="delivered", run=first, turn=1)
        blocks = [s.event for s in steps if isinstance(s.event, BlockComplete) and s.event.run == first]
        assert [(b.turn, b.content) for b in blocks if not b.cut] == [(0, "one two three"), (1, "Short.")]
        assert asked(provider, 1) == CONVERSATION
        assert over_http(provider) == calls
        history = [*CONVERSATION, ("assistant", "Short."), ("user", "waits")]
        assert asked(provider, -1) == history
        assert texts(await session.messages()) == [*history, ("assistant", "Bye.")]
        ends = [step.event.status for step in steps if isinstance(step.event, RunEnded)]
        assert ends == ["completed", "completed"]


async def test_a_picture_goes_with_a_call_of_its_own(server_url: str, keys: Keys, tmp_path: Path) -> None:
    async with running(server_url, keys, tmp_path) as (provider, _, bus):
        session = bus.session("hurry")
        await session.configure({"provider": "steering", "model": "steered"})
        await session.send("hello")
        await told(session, said)
        look = Message(
            role="user",
            content=[TextPart(text="this"), ImagePart(source=UrlSource(url="https://pictures.test/a.png"))],
        )
        await session.send(messages=[look], when_busy="steer", now=True)
        await told(session, run_over)
        assert over_http(provider) == [0, 1]
        assert "https://pictures.test/a.png" in provider.requests[1].http_request.body.decode()


async def test_the_fetcher_that_reads_the_next_answer_may_die(server_url: str, keys: Keys, tmp_path: Path) -> None:
    async with running(server_url, keys, tmp_path) as (provider, workers, bus):
        session = bus.session("hurry")
        await session.configure({"provider": "steering", "model": "stalls", "on_failure": "restart"})
        await session.send("hello")
        await told(session, said)
        steer = await session.steer("shorter", now=True)
        await told(session, lambda step: isinstance(step.event, Chunk) and step.event.turn == 1)
        fetcher = workers.worker_of("fetcher")
        fetcher.kill()
        await fetcher.process.wait()
        await workers.start("fetcher")
        steps = await told(session, run_over)
        (end,) = (step.event for step in steps if isinstance(step.event, RunEnded))
        assert await session.fate(steer.append) == Fate(state="delivered", run=end.run, turn=1)
        assert over_http(provider) == [0, 2]
        assert asked(provider, 2) == asked(provider, 1) == CONVERSATION
        assert texts(await session.messages()) == [*CONVERSATION, ("assistant", "Short.")]


async def test_a_redirect_takes_the_key_of_the_provider_nowhere(server_url: str, keys: Keys, tmp_path: Path) -> None:
    came: list[bytes] = []

    async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(await reader.read(1))
        writer.close()

    async def redirects(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(
            b"HTTP/1.1 302 Found\r\nlocation: ws://127.0.0.1:%d/\r\ncontent-length: 0\r\n\r\n" % port_of(other)
        )
        writer.close()

    def port_of(server: asyncio.Server) -> int:
        return server.sockets[0].getsockname()[1]

    asked: list[bytes] = []
    async with (
        await asyncio.start_server(elsewhere, "127.0.0.1", 0) as other,
        await asyncio.start_server(redirects, "127.0.0.1", 0) as server,
    ):
        url = f"http://127.0.0.1:{port_of(server)}"
        table = provider_table("steering", "openai-responses", url, "steering = true")
        async with (
            fleet(tmp_path, server_url, keys, url, PIPELINE, table),
            Client(server_url, prefix=keys.prefix) as bus,
        ):
            session = bus.session("redirected")
            await session.configure({"provider": "steering", "model": "steered"})
            await session.send("hello")
            steps = await told(session, run_over)
    assert asked
    assert not came
    assert [step.event.status for step in steps if isinstance(step.event, RunEnded)] == ["failed"]
