"""Tools that keep the interpreter's lock, die or take all memory, in running services: each costs its own call."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import judge
from tests.e2e.conftest import Deploy, Send
from tests.e2e.fleet import PIPELINE, ended
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Reply, Script, ToolCall, Turn

HARMFUL = "tests.services.tools.python.harmful_tools"
TIMEOUT_S = 6.0
CALLS = 25
TOML = "[limits]\ntool_memory_bytes = 134217728\n" + "".join(
    f'\n[tools.{name}]\nkind = "python"\ncall = "{HARMFUL}:{name}"\ntimeout_s = {timeout_s}\n'
    for name, timeout_s in {
        "backtrack": TIMEOUT_S,
        "sleep_with_lock": TIMEOUT_S,
        "exit_now": 60.0,
        "allocate": 60.0,
        "pid": 60.0,
        "touch": 120.0,
    }.items()
)
OVERDUE = f"the tool returned no result within {TIMEOUT_S:g} s"
BLAME = {
    "backtrack": OVERDUE,
    "sleep_with_lock": OVERDUE,
    "exit_now": "the tool's process ended during the call",
    "allocate": "the tool's process took more memory than `limits.tool_memory_bytes`",
}


def calling(tool: str, **arguments: str) -> Script:
    """A model that calls the tool once, and then says so."""
    call = ToolCall(name=tool, arguments=dict(arguments))
    return Script(name=tool, turns=(Turn(says=Reply(tool_calls=(call,))), Turn(says=Reply(text="There it is."))))


def result_of(log: Any) -> tuple[str, bool]:
    [result] = [e for e in log if e["type"] == "block_complete" and e["kind"] == "tool_result"]
    return result["content"], result.get("is_error", False)


@pytest.mark.timeout(240)
async def test_of_25_calls_those_that_harm_their_process_end_with_the_blame_on_them_and_the_others_as_usual(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    models = [*BLAME, *BLAME, *["pid"] * (CALLS - 2 * len(BLAME))]
    async with deployed([calling(name) for name in (*BLAME, "pid")], (*PIPELINE, "tools"), TOML) as (_, services):
        runs = {await send(model, tools=[{"name": model}]): model for model in models}
        logs: Any = await ended(server.client, keys, list(runs), timeout=180)
        worker = services.worker_of("tools")
        assert worker.process.returncode is None
        await eventually(lambda: worker.log.read_text().count('"tool_executor_ended"') >= 2 * len(BLAME))
    for run, model in runs.items():
        judge.check(logs[run])
        assert logs[run][-1]["type"] == "completed"
        content, is_error = result_of(logs[run])
        assert (content, is_error) == ((BLAME[model], True) if model in BLAME else (content, False))
        assert model in BLAME or content.isdigit()


async def test_an_executor_that_is_killed_costs_its_call_alone_and_its_worker_nothing(
    server: Server, keys: Keys, send: Send, tmp_path: Path, deployed: Deploy
) -> None:
    files = {f"touch{n}": tmp_path / f"file{n}" for n in range(2)}
    scripts = [
        Script(
            name=name,
            turns=(
                Turn(says=Reply(tool_calls=(ToolCall(name="touch", arguments={"file": str(file)}),))),
                Turn(says=Reply(text="There it is.")),
            ),
        )
        for name, file in files.items()
    ]
    async with deployed(scripts, (*PIPELINE, "tools"), TOML) as (_, services):
        killed, other = [await send(name, tools=[{"name": "touch"}]) for name in files]
        await eventually(lambda: all(file.exists() and file.read_text() for file in files.values()))
        first = files["touch0"].read_text()
        os.kill(int(first), signal.SIGKILL)
        again = await eventually(lambda: (text := files["touch0"].read_text()) != first and text)
        os.kill(int(again), signal.SIGKILL)
        logs: Any = await ended(server.client, keys, [killed])
        for file in files.values():
            file.unlink()
        logs |= await ended(server.client, keys, [other])
        assert services.worker_of("tools").process.returncode is None
    assert result_of(logs[killed]) == ("the tool's process ended during the call", True)
    assert result_of(logs[other]) == ("gone", False)
