"""A run ends while its tool runs elsewhere: the tool's worker is notified, and the log has a result of the call."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import judge
from tests.e2e.conftest import Deploy, Send
from tests.e2e.fleet import WITH_TOOLS, ended
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Reply, Script, ToolCall, Turn

SAMPLE = Path(__file__).parents[2] / "services/tools/mcp/sample_server.py"
Elsewhere = Callable[[Path], AbstractAsyncContextManager[tuple[str, str]]]
"""Runs a tool that never ends by itself and writes `began` and `cancelled` into the file; yields the tool's name and
its part of the settings."""


def note(notes: Path, line: str) -> None:
    with notes.open("a") as file:
        file.write(line + "\n")


@asynccontextmanager
async def an_http_endpoint(notes: Path) -> AsyncIterator[tuple[str, str]]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length:" in line)
        await reader.readexactly(length)
        note(notes, "began")
        with suppress(ConnectionError):
            await reader.read()  # until the other side closes
        note(notes, "cancelled")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        yield "far", f'[tools.far]\nkind = "http"\nurl = "http://127.0.0.1:{port}/"\nallow_private = true\n'


@asynccontextmanager
async def an_mcp_child(notes: Path) -> AsyncIterator[tuple[str, str]]:
    command = f"command = {json.dumps(sys.executable)}\nargs = [{json.dumps(str(SAMPLE))}]\n"
    yield "far__slow", f'[mcp.far]\nkind = "stdio"\n{command}env_pass = ["NOTES"]\n'


@asynccontextmanager
async def an_mcp_server_over_http(notes: Path) -> AsyncIterator[tuple[str, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    server = await asyncio.create_subprocess_exec(
        sys.executable, str(SAMPLE), str(port), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await eventually(lambda: listens(port), timeout=60)
        yield "far__slow", f'[mcp.far]\nkind = "http"\nurl = "http://127.0.0.1:{port}/mcp"\nallow_private = true\n'
    finally:
        server.kill()
        await server.wait()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("elsewhere", "deadline_s"),
    [(an_http_endpoint, None), (an_mcp_child, None), (an_mcp_server_over_http, None), (an_http_endpoint, 8.0)],
    ids=["http", "mcp child", "mcp over http", "http, deadline"],
)
async def test_a_tool_worker_learns_that_its_run_is_over_and_the_call_gets_a_result(
    server: Server,
    keys: Keys,
    send: Send,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    elsewhere: Elsewhere,
    deadline_s: float | None,
    deployed: Deploy,
) -> None:
    notes = tmp_path / "notes"
    notes.touch()
    monkeypatch.setenv("NOTES", str(notes))
    async with elsewhere(notes) as (tool, toml):
        turns = (Turn(says=Reply(tool_calls=(ToolCall(name=tool, arguments={}),))), Turn(says=Reply(text="never said")))
        async with deployed([Script(name="calling", turns=turns)], WITH_TOOLS, toml) as (provider, _):
            tools = [{"name": tool, "parameters": {"type": "object"}}]
            run = await send("calling", tools=tools, **({"deadline_s": deadline_s} if deadline_s else {}))
            await eventually(lambda: "began" in notes.read_text(), timeout=60)
            if not deadline_s:
                await server.client.xadd(keys.requests, {"__data__": f'{{"type":"cancel","run":"{run}"}}'})
            log: Any = (await ended(server.client, keys, [run]))[run]
            await eventually(lambda: "cancelled" in notes.read_text())
            assert len(provider.requests) == 1
    judge.check(log)
    results = [e for e in log if e["type"] == "block_complete" and e["kind"] == "tool_result"]
    why, end = ("the run's deadline has passed", "failed") if deadline_s else ("cancelled", "cancelled")
    assert [(r["tool_name"], r["content"], r["is_error"]) for r in results] == [(tool, why, True)]
    assert log[-1]["type"] == end


async def test_a_call_that_is_queued_when_its_run_is_cancelled_never_runs(
    server: Server, keys: Keys, send: Send, tmp_path: Path, deployed: Deploy
) -> None:
    notes = tmp_path / "notes"
    notes.touch()
    async with an_http_endpoint(notes) as (tool, toml):
        turns = (Turn(says=Reply(tool_calls=(ToolCall(name=tool, arguments={}),))), Turn(says=Reply(text="never said")))
        one_at_once = f"{toml}\n[limits]\ntool_calls_per_worker = 1\n"
        async with deployed([Script(name="calling", turns=turns)], WITH_TOOLS, one_at_once):
            tools = [{"name": tool, "parameters": {"type": "object"}}]
            first = await send("calling", tools=tools)
            await eventually(lambda: "began" in notes.read_text(), timeout=60)
            queued = await send("calling", tools=tools)

            async def calls() -> int:
                return sum([await server.client.xlen(keys.topic(p, "tools")) for p in range(keys.partitions)])

            async def both() -> bool:
                return await calls() == 2

            await eventually(both, timeout=60)
            for run in (queued, first):
                await server.client.xadd(keys.requests, {"__data__": f'{{"type":"cancel","run":"{run}"}}'})
                await ended(server.client, keys, [run])

            async def none() -> bool:
                return not await calls()

            await eventually(none, timeout=60)
    assert notes.read_text().split() == ["began", "cancelled"]
