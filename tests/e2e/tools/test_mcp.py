"""Tools of an MCP server, through the running services: a request names them, and the server has the rest."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import judge
from tests.e2e.conftest import Deploy, Send
from tests.e2e.fleet import WITH_TOOLS, ended, log_of
from tests.services.tools.mcp.conftest import alive
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Reply, Script, ToolCall, Turn

SAMPLE = Path(__file__).parents[2] / "services/tools/mcp/sample_server.py"


def says(*calls: ToolCall) -> tuple[Turn, ...]:
    return Turn(says=Reply(tool_calls=calls)), Turn(says=Reply(text="I see."))


async def test_a_request_names_a_servers_tools_and_gets_their_schemas_and_results(
    server: Server, keys: Keys, send: Send, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deployed: Deploy
) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setenv("NOTES", str(notes))
    both = (
        ToolCall(name="here__echo", arguments={"text": "well"}),
        ToolCall(name="here__fail", arguments={"why": "x"}),
    )
    scripts = [
        Script(name="both", turns=says(*both)),
        Script(name="never", turns=says(ToolCall(name="here__slow", arguments={}))),
        Script(name="again", turns=says(ToolCall(name="here__echo", arguments={"text": "again"}))),
    ]
    toml = f"""
[mcp.here]
kind = "stdio"
command = {json.dumps(sys.executable)}
args = [{json.dumps(str(SAMPLE))}]
env_pass = ["NOTES"]
"""
    named = [{"name": "here__echo"}, {"name": "here__fail"}]
    async with deployed(scripts, WITH_TOOLS, toml) as (provider, _):
        run = await send("both", tools=named)
        unlisted = await send("both", tools=[{"name": "here__echo"}, {"name": "here__nothing"}])
        logs: Any = await ended(server.client, keys, [run, unlisted])
        request_body = json.loads(provider.requests[0].http_request.body)

        killed = await send("never", tools=[{"name": "here__slow"}])
        await eventually(lambda: "began" in notes.read_text(), timeout=60)

        async def made_progress() -> bool:
            return any(e["type"] == "tool_progress" for e in await log_of(server.client, keys, killed))

        await eventually(made_progress, timeout=60)
        [pid] = _pids(notes)
        os.kill(pid, signal.SIGKILL)
        logs |= await ended(server.client, keys, [killed])

        await eventually(lambda: len(_pids(notes)) == 2, timeout=60)

        async def works() -> bool:
            after = await send("again", tools=named)
            log: Any = (await ended(server.client, keys, [after]))[after]
            return _results(log)[0]["content"] == "again"

        await eventually(works, timeout=60)
    judge.check(logs[run])
    assert request_body["tools"][0]["description"] == "Says it again."
    assert request_body["tools"][0]["input_schema"]["required"] == ["text"]
    first, second = _results(logs[run])
    assert (first["content"], first.get("is_error", False)) == ("well", False)
    assert (second["content"].strip(), second["is_error"]) == ("Error executing tool fail: x", True)
    error = logs[unlisted][-1]["error"]
    assert (error["where"], "lists no tool 'nothing'" in error["message"]) == ("tools[1]", True)
    judge.check(logs[killed])
    [progress] = [e for e in logs[killed] if e["type"] == "tool_progress"]
    assert (progress["tool_name"], progress["progress"], progress["total"], progress["message"]) == (
        "here__slow",
        1,
        4,
        "one of four",
    )
    assert _results(logs[killed])[0]["is_error"]
    assert logs[killed][-1]["type"] == "completed", "the model continues after a tool's error"
    assert not [pid for pid in _pids(notes) if alive(pid)], "a server outlived the services"


def _pids(notes: Path) -> list[int]:
    return [int(line.removeprefix("pid ")) for line in notes.read_text().splitlines() if line.startswith("pid ")]


def _results(log: Any) -> list[Any]:
    return [e for e in log if e["type"] == "block_complete" and e["kind"] == "tool_result"]
