"""Webhooks through the running services: every end of a run is told once, whoever dies in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Send
from tests.e2e.fleet import PIPELINE, ended, fleet
from tests.services.webhooks.test_receiver import OLD, Receiver, served
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, Stall, Status, ToolCall, Turn

SCRIPTS = [
    Script(name="fine", turns=(Turn(says=Reply(text="All is well."), delivery=Delivery(pace=50)),)),
    Script(name="refuses", turns=(Turn(says=Reply(text="never"), first=(Status(status=400),) * 9),)),
    Script(name="stalls", turns=(Turn(says=Reply(text="Some of it was said."), fault=Stall(after_text="said")),)),
    Script(
        name="asks",
        turns=(
            Turn(says=Reply(tool_calls=(ToolCall(name="where", arguments={"of": "Ada"}),))),
            Turn(says=Reply(text="Nobody said.")),
        ),
    ),
]
TOML = """
[tools.where]
kind = "client"
parameters = {{ type = "object" }}
timeout_s = 0.5

[webhooks.all]
url = "{url}/all"
secret_env = "HOOK_SECRET"
every_run = true
allow_private = true
timeout_s = 1

[webhooks.asked]
url = "{url}/asked"
secret_env = "HOOK_SECRET"
allow_private = true
"""


@pytest.mark.leaves_pending  # of the workers that are killed
async def test_each_end_of_a_run_is_told_to_who_asked_also_when_workers_die(
    server: Server, server_url: str, keys: Keys, tmp_path: Path, send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_SECRET", OLD)
    receiver = Receiver()
    receiver.hangs.clear()
    async with (
        served(receiver) as url,
        MockProvider(SCRIPTS) as provider,
        fleet(tmp_path, server_url, keys, provider.url, (*PIPELINE, "webhooks"), TOML.format(url=url)) as workers,
    ):
        asked = await send("fine", webhooks=["asked"], metadata={"tenant": "ada", "order": 7})
        refused = await send("refuses")
        unknown = await send("fine", webhooks=["nobody"])
        stalled = await send("stalls")
        await eventually(lambda: _says(server, keys, stalled))
        await server.client.xadd(keys.requests, {"__data__": json.dumps({"type": "cancel", "run": stalled})})
        asks = await send("asks", tools=[{"name": "where"}])
        runs = [asked, refused, unknown, stalled, asks]
        logs = await ended(server.client, keys, runs)
        await eventually(lambda: receiver.got)  # it holds on to what it got
        worker = workers.worker_of("webhooks")
        worker.ends_with = (0, -9)
        worker.process.kill()
        receiver.hangs.set()
        await workers.start("webhooks")
        told = await eventually(lambda: _told(receiver, {*runs}))
    assert {run: {kind for _, of, kind in told if of == run} for run in runs} == {
        asked: {"run.completed"},
        refused: {"run.failed"},
        unknown: {"run.failed"},
        stalled: {"run.cancelled"},
        asks: {"run.waiting", "run.completed"},
    }
    data = told["/asked", asked, "run.completed"]
    end = {name: value for name, value in logs[asked][-1].items() if name not in ("type", "provider_extra")}
    assert data == {**end, "tenant": "ada", "metadata": {"tenant": "ada", "order": 7}}
    assert {run for path, run, _ in told if path == "/asked"} == {asked}
    assert told["/all", unknown, "run.failed"]["error"]["message"].endswith("there is no webhook 'nobody' here")
    waits = told["/all", asks, "run.waiting"]
    assert (waits["tool_name"], json.loads(waits["arguments"])) == ("where", {"of": "Ada"})
    by_id = {(headers["webhook-id"], body) for headers, body in receiver.got}
    assert len(by_id) == len(told), "a repeated delivery has the id and the words of the first"


def _told(receiver: Receiver, runs: set[str]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """What was told by path, run and type, once each end was."""
    told = dict[tuple[str, str, str], dict[str, Any]]()
    for path, body in receiver.paths():
        notice = json.loads(body)
        told[path, notice["data"]["run"], notice["type"]] = notice["data"]
    ended = {(path, run) for path, run, kind in told if kind != "run.waiting"}
    return told if {run for path, run in ended if path == "/all"} == runs and len(ended) > len(runs) else {}


async def _says(server: Server, keys: Keys, run: str) -> bool:
    return bool(await server.client.xlen(keys.log(run)) > 1)
