"""Each example of the docs does what it says, as a process beside the running services."""

from __future__ import annotations

import asyncio
import socket
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.examples.conftest import EXAMPLES, Deployment, parsed
from tests.waiting import eventually
from tokenbus.errors import RunCancelled
from tokenbus.events.public import Chunk, Completed, decode

TALE = "Dr. Grey came in. Nobody saw her! That was all."
LINES = 40


def test_each_example_is_short() -> None:
    examples = sorted(EXAMPLES.glob("*.py"))
    assert len(examples) == 5
    for example in examples:
        assert len(example.read_text().splitlines()) < LINES, example.name


async def test_the_speech_worker_speaks_sentence_by_sentence(deployment: Deployment) -> None:
    async with deployment.example("speech_worker") as printed:
        run = await deployment.bus.publish(deployment.request("tale"))
        spoken = [(await printed.readline()).decode().strip() for _ in range(3)]
    assert spoken == [f"{run.id}: Dr. Grey came in.", f"{run.id}: Nobody saw her!", f"{run.id}: That was all."]


async def test_the_chat_window_shows_the_answer_as_it_comes(deployment: Deployment) -> None:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = (sys.executable, "-m", "uvicorn", "chat_window:app", "--port", str(port), "--log-level", "warning")
    async with deployment.process(*command), httpx.AsyncClient(trust_env=False, timeout=60) as http:

        async def answer() -> str:
            try:
                return (await http.post(f"{url}/chat", json={"text": "Tell me a tale."})).text
            except httpx.ConnectError:
                return ""

        body = await eventually(answer, timeout=60)
    events = [decode(line[6:].encode()) for line in body.splitlines() if line.startswith("data: ")]
    assert "".join(event.text for event in events if isinstance(event, Chunk) and event.visible) == TALE
    assert isinstance(events[-1], Completed)


async def test_moderation_stops_a_run_in_the_middle_of_what_it_says(deployment: Deployment) -> None:
    async with deployment.example("moderation", "Kumquat") as printed:
        run = await deployment.bus.publish(deployment.request("fruit"))
        with pytest.raises(RunCancelled) as caught:
            await run.result()
        assert (await printed.readline()).decode().strip() == f"stopped {run.id}: kumquat"
        fine = await (await deployment.bus.publish(deployment.request("tale"))).result()
    assert fine.text == TALE
    assert caught.value.result
    assert "kumquat" in caught.value.result.text
    assert "plums" not in caught.value.result.text
    assert caught.value.result.heard_through is not None


async def test_the_transcript_store_keeps_each_block_once(deployment: Deployment, tmp_path: Path) -> None:
    path = tmp_path / "transcripts.db"

    def stored() -> list[tuple[str, str, str]]:
        with closing(sqlite3.connect(path)) as database:
            return database.execute("SELECT kind, tool, content FROM blocks ORDER BY run, seq").fetchall()

    async with deployment.example("transcript_store", str(path)):
        tools = [{"name": "weather", "parameters": {"type": "object"}}]
        run = await deployment.bus.publish(deployment.request("asks", tools=tools))
        expected = [(b.kind, b.tool_name, b.content or b.arguments) for b in (await run.result()).blocks]
        assert len(expected) == 3
        await eventually(lambda: path.exists() and path.stat().st_size and stored() == expected, timeout=60)
    async with deployment.example("transcript_store", str(path)):
        again = await (await deployment.bus.publish(deployment.request("tale"))).result()
        await eventually(lambda: stored()[3:] == [("text", None, again.text)], timeout=60)


async def test_token_accounting_adds_up_by_tenant(deployment: Deployment) -> None:
    async with deployment.example("token_accounting") as printed:
        spent = 0
        for tenant in ("red", "blue", "red"):
            request = deployment.request("tale", metadata={"tenant": tenant})
            result = await (await deployment.bus.publish(request)).result()
            assert result.usage
            spent = result.usage.output or 0
        async with asyncio.timeout(60):
            lines = [parsed(await printed.readline()) for _ in range(3)]
    assert spent
    told = sorted((str(line["tenant"]), int(str(line["output"]))) for line in lines)
    assert told == [("blue", spent), ("red", spent), ("red", 2 * spent)]
