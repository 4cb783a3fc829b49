"""Each example of the docs does what it says, as a process beside the running services."""

from __future__ import annotations

import asyncio
import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.examples.conftest import EXAMPLES, Deployment, parsed
from tests.waiting import eventually
from tokenbus.errors import RunCancelled

TALE = "Dr. Grey came in. Nobody saw her! That was all."
LINES = 40
LINES_OF = {"chat_window.py": 110}


def test_each_example_is_short() -> None:
    examples = sorted(EXAMPLES.glob("*.py"))
    assert len(examples) == 5
    for example in examples:
        lines = LINES_OF.get(example.name, LINES)
        assert len(example.read_text().splitlines()) < lines, example.name


async def test_the_speech_worker_speaks_sentence_by_sentence(deployment: Deployment) -> None:
    async with deployment.example("speech_worker") as printed:
        run = await deployment.bus.publish(deployment.request("tale"))
        spoken = [(await printed.readline()).decode().strip() for _ in range(3)]
    assert spoken == [f"{run.id}: Dr. Grey came in.", f"{run.id}: Nobody saw her!", f"{run.id}: That was all."]


@asynccontextmanager
async def chat_window(deployment: Deployment) -> AsyncGenerator[httpx.AsyncClient]:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = (sys.executable, "-m", "uvicorn", "chat_window:app", "--port", str(port), "--log-level", "warning")
    async with (
        deployment.process(*command),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http,
    ):

        async def answers() -> bool:
            try:
                return (await http.get("/")).status_code == 200
            except httpx.ConnectError:
                return False

        await eventually(answers, timeout=60)
        yield http


def test_the_chat_window_says_what_to_set() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("CHAT_")}
    command = (sys.executable, "-c", "import chat_window")
    done = subprocess.run(command, cwd=EXAMPLES, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, "set CHAT_PROVIDER and CHAT_MODEL" in done.stderr) == (1, True), done.stderr


async def begun(http: httpx.AsyncClient) -> str:
    return (await http.post("/chat", json={"text": "Go on."})).json()["run"]


def shown(body: str) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line[6:]) for line in body.splitlines() if line.startswith("data: ")]


async def test_the_chat_window_shows_the_answer_as_it_comes_and_nothing_else(deployment: Deployment) -> None:
    deployment.env["CHAT_MODEL"] = "thinks"
    async with chat_window(deployment) as http:
        body = (await http.get(f"/chat/{await begun(http)}")).text
        assert (await http.post("/chat", json={"txt": ""})).status_code == 400
        assert (await http.get("/chat/x", headers={"last-event-id": "x"})).status_code == 400
    events = shown(body)
    assert "".join(event.get("text", "") for event in events) == TALE
    assert events[-1] == {"end": "completed", "finish": "stop"}
    assert "secret thought" not in body
    assert "signature" not in body


async def test_a_chat_window_that_lost_its_connection_resumes_where_it_was(deployment: Deployment) -> None:
    async with chat_window(deployment) as http:
        run = await begun(http)
        whole = (await http.get(f"/chat/{run}")).text
        ids = [line[4:] for line in whole.splitlines() if line.startswith("id: ")]
        for at, last in enumerate(ids[:-1]):
            rest = (await http.get(f"/chat/{run}", headers={"last-event-id": last})).text
            assert shown(rest)[-1] == {"end": "completed", "finish": "stop"}
            texts = ["".join(event.get("text", "") for event in shown(part)) for part in (whole, rest)]
            assert texts[0].endswith(texts[1])
            assert len(texts[1]) < len(texts[0]) or at == 0


@pytest.mark.parametrize("keep", [False, True])
async def test_closing_the_chat_window_cancels_the_answer_unless_it_is_kept(deployment: Deployment, keep: bool) -> None:
    deployment.env["CHAT_MODEL"] = "fruit"
    async with chat_window(deployment) as http:
        run = await begun(http)
        async with http.stream("GET", f"/chat/{run}" + "?keep=1" * keep) as response:
            async for line in response.aiter_lines():
                if "kum" in line or "pe" in line:
                    break
        if keep:
            exchange = await deployment.provider.requested()
            await deployment.provider.until(lambda: exchange.state == "stalled")
            deployment.provider.resume(exchange)
            assert (await deployment.bus.result(run)).text == "apples, a kumquat, pears, plums"
        else:
            with pytest.raises(RunCancelled, match="the window was closed"):
                await deployment.bus.result(run)


async def test_moderation_stops_a_run_in_the_middle_of_what_it_says(deployment: Deployment) -> None:
    async with deployment.example("moderation", "Kumquat") as printed:
        await eventually(lambda: deployment.watches("visible", "moderation"), timeout=60)
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
    amounts = sorted((str(line["tenant"]), int(str(line["output"]))) for line in lines)
    assert not any("total" in line for line in lines), "nobody reported it"
    assert amounts == [("blue", spent), ("red", spent), ("red", 2 * spent)]
