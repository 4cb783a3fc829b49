"""The parser's clock through the running services: no run outlives its deadline, its tools or its workers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, Deploy, Send
from tests.e2e.fleet import PIPELINE, ended, fleet, log_of
from tests.run_calls import accept_call
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.run_scripts import run_script as send_script
from tokenbus.bus.server.server import Server
from tokenbus.events.frames import CONTROL_ATTEMPT, Accepted, EventFrame, RunLimits, TurnWork, encode, turn_decoder
from tokenbus_services.mock_provider import Delivery, Reply, Script, Stall, ToolCall, Turn

REPLY = "One two three."
CALLS = (ToolCall(name="weather", arguments={"city": "Bern"}), ToolCall(name="weather", arguments={"city": "Rome"}))
SCRIPTS = [
    Script(name="slow", turns=(Turn(says=Reply(text=REPLY), fault=Stall(after_text="two")),)),
    Script(name="silent", turns=(Turn(says=Reply(text=REPLY), delivery=Delivery(delay_s=3600)),)),
    Script(name="calls", turns=(Turn(says=Reply(text=REPLY, tool_calls=CALLS)), Turn(says=Reply(text="I see.")))),
]


async def test_a_deadline_ends_a_run_in_any_phase(server: Server, keys: Keys, send: Send, deployed: Deploy) -> None:
    # No tool executor runs: the calls stay open until the deadline.
    async with deployed(SCRIPTS, PIPELINE) as (provider, _):
        runs = [
            await send(model, f"hello {name}", id=name, deadline_s=5, **more)
            for name, (model, more) in {
                "mid-stream": ("slow", {"on_failure": "continue"}),
                "before": ("silent", {}),
                "whole": ("silent", {"stream": False}),
                "tools": ("calls", {"tools": [WEATHER]}),
            }.items()
        ]
        logs: Any = await ended(server.client, keys, runs)
        for exchange in [e for e in provider.requests if e.request and e.request.model != "calls"]:
            await provider.disconnected(exchange)
        assert len(provider.requests) == 4
    for run, log in logs.items():
        judge.check(log)
        end = log[-1]
        assert (end["type"], end["finish"]) == ("failed", "error"), end
        assert (end["error"]["code"], end["error"]["class"]) == ("deadline", "timeout"), run
        assert await server.client.hget(keys.run(run), "status") == b"failed"
    assert [text for kind, text in judge.blocks(logs["tools"]) if kind == "tool_result"] == [
        "the run's deadline has passed"
    ] * 2
    assert judge.text(logs["mid-stream"]) == "One two"


async def test_calls_without_an_executor_get_an_error_and_the_run_continues(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    quick = "\n[limits]\ntool_slack_s = 0.5\n"
    async with deployed(SCRIPTS, PIPELINE, quick):
        run = await send("calls", tools=[WEATHER], tool_timeout_s=0.5)
        log: Any = (await ended(server.client, keys, [run]))[run]
    judge.check(log)
    assert log[-1]["type"] == "completed"
    results = [e for e in log if e["type"] == "block_complete" and e["kind"] == "tool_result"]
    assert [(e["content"], e["is_error"]) for e in results] == [("the tool's result never came", True)] * 2


async def test_a_turn_that_was_lost_is_queued_again_and_one_that_still_waits_is_not(
    server: Server, server_url: str, keys: Keys, tmp_path: Path
) -> None:
    quick = "\n[limits]\nsilent_run_s = 1\n"
    now = time.time_ns() // 1_000_000
    async with fleet(tmp_path, server_url, keys, "http://127.0.0.1:9", ("normalizer", "parser"), quick):
        # As after a fail-over of the server that kept the one's turn, and lost the other's.
        await accept(server, keys, "waiting", now - 3_600_000, encode(TurnWork("waiting", 0, 1)))
        await accept(server, keys, "lost", now - 3_600_000, b"")
        turns = keys.topic(keys.partition_of("lost"), "turns")

        async def queued_again() -> list[TurnWork]:
            entries = await server.client.xrange(turns)
            found = [turn_decoder.decode(fields[b"lost"]) for _, fields in entries if b"lost" in fields]
            return [work for work in found if work.attempt == 2]

        await eventually(queued_again)
        log: Any = await log_of(server.client, keys, "lost")
        waiting: Any = await log_of(server.client, keys, "waiting")
    assert [e["type"] for e in log] == ["started", "retrying"]
    assert log[-1]["error"]["code"] == "worker_lost"
    assert [e["type"] for e in waiting] == ["started"]


async def accept(server: Server, keys: Keys, run: str, at_ms: int, work: bytes) -> None:
    rules = RunLimits()
    accepted = Accepted(provider="unknown", model="m", on_failure="continue", max_tool_depth=0, rules=rules, tools=[])
    frame = encode(EventFrame(0, CONTROL_ATTEMPT, at_ms, [accepted]))
    call = accept_call(keys, run, at_ms=at_ms, frame=frame, work=work)
    assert await send_script(server, call) == b"new"
