"""Failures of providers through the running services: retried before visible text, reported after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, Deploy, Send
from tests.e2e.fleet import BASE_PATHS, PIPELINE, WITH_TOOLS, ended, fleet, provider_table
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import (
    CutOff,
    Delivery,
    ErrorEvent,
    HangUp,
    MockProvider,
    Random,
    Reply,
    Script,
    Stall,
    Status,
    ToolCall,
    Turn,
)
from tokenbus_services.mock_provider.script import Fault

REPLY_TEXT = "It was said in full, and only once."
THOUGHT = "Let me think of it first."
REPLY = Reply(thinking=THOUGHT, text=REPLY_TEXT)
APIS = [*BASE_PATHS]
BEFORE_TEXT: dict[str, tuple[Fault, str]] = {
    "rate limit": (Status(status=429, headers={"retry-after": "0.2"}), "rate_limit"),
    "overloaded": (Status(status=529), "overloaded"),
    "hang up": (HangUp(), "network"),
    "cut in thinking": (CutOff(after_text="think"), "network"),
    "reset in thinking": (CutOff(after_text="think", reset=True), "network"),
    "stall in thinking": (Stall(after_text="think"), "timeout"),
}
"""What goes wrong, and the class of the error."""
IN_TEXT: dict[str, tuple[Fault, str, str]] = {
    "cut": (CutOff(after_text="full"), "network", "incomplete"),
    "stall": (Stall(after_text="full"), "timeout", "incomplete"),
}
"""The same, and how the run ends."""
ERROR_EVENT = {
    "anthropic": (529, "overloaded"),
    "openai-chat": (500, "server"),
    "openai-responses": (500, "server"),
    "gemini": (503, "overloaded"),
    "gemini-interactions": (503, "overloaded"),
}
"""What each API says of itself inside of a stream that began with status 200; OpenAI's have no word for overloaded."""
QUICK = """
[retry]
base_delay_s = 0.05
"""


def named(api: str, name: str) -> str:
    return f"{api}-{name.replace(' ', '-')}"


def faults_of(api: str) -> tuple[dict[str, tuple[Fault, str]], dict[str, tuple[Fault, str, str]]]:
    """What goes wrong with this API before visible text and in it, by the run's id."""
    status, body = ERROR_EVENT[api]
    before_text = {**BEFORE_TEXT, "error in thinking": (ErrorEvent(status=status, after_text="think"), body)}
    in_text = {**IN_TEXT, "error": (ErrorEvent(status=status, after_text="full"), body, "failed")}
    return {named(api, n): row for n, row in before_text.items()}, {named(api, n): row for n, row in in_text.items()}


async def test_a_failure_is_retried_unless_visible_text_was_emitted(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    faults = {api: faults_of(api) for api in APIS}
    scripts: list[Script] = []
    for before_text, in_text in faults.values():
        scripts += [Script(name=n, turns=(Turn(says=REPLY, first=(fault,)),)) for n, (fault, _) in before_text.items()]
        scripts += [Script(name=n, turns=(Turn(says=REPLY, fault=fault),)) for n, (fault, _, _) in in_text.items()]
    async with MockProvider(scripts) as provider:
        tables = [provider_table(f"impatient-{api}", api, provider.url, "idle_timeout_s = 3") for api in APIS]
        async with fleet(tmp_path, server_url, keys, provider.url, PIPELINE, QUICK + "".join(tables)):
            for api, rows in faults.items():
                for name in (name for row in rows for name in row):
                    await send(name, name, provider=f"impatient-{api}", id=name)
            logs: Any = await ended(server.client, keys, [script.name for script in scripts])
    for api, (before_text, in_text) in faults.items():
        for run, (_, kind) in before_text.items():
            log = logs[run]
            judge.check(log)
            assert log[-1]["type"] == "completed", log[-1]
            [retrying] = [e for e in log if e["type"] == "retrying"]
            assert retrying["error"]["class"] == kind, run
            assert retrying["delay_ms"] >= 1000 * retrying["error"].get("retry_after_s", 0), run
            assert judge.blocks(log) == [("thinking", THOUGHT), ("text", REPLY_TEXT)], run
            assert judge.text(log) == REPLY_TEXT, run
        assert logs[named(api, "rate limit")][1]["error"]["retry_after_s"] == 0.2
        where = {
            run: next(e for e in logs[run] if e["type"] == "retrying")["error"].get("where") for run in before_text
        }
        assert where[named(api, "hang up")] is None
        assert where[named(api, "cut in thinking")] == where[named(api, "reset in thinking")] == "answer"
        for run, (_, kind, end) in in_text.items():
            log = logs[run]
            judge.check(log)
            assert (log[-1]["type"], log[-1]["error"]["class"]) == (end, kind), run
            assert log[-1]["error"]["retryable"], run
            assert REPLY_TEXT.startswith(judge.text(log)), run
            assert judge.text(log).endswith("full,"), "visible text stays, and nothing is repeated"


async def test_restart_repeats_the_answer_and_reports_which_blocks_are_void(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    script = Script(name="again", turns=(Turn(says=REPLY, first=(CutOff(after_text="full"),)),))
    async with deployed([script], PIPELINE, QUICK):
        run = await send("again", on_failure="restart")
        log: Any = (await ended(server.client, keys, [run]))[run]
    judge.check(log)
    [restarted] = [e for e in log if e["type"] == "restarted"]
    assert (restarted["drop_from"], restarted["next_attempt"]) == (0, 2)
    assert judge.blocks(log) == [("thinking", THOUGHT), ("text", REPLY_TEXT)]


async def test_a_deadline_ends_the_run_and_closes_the_socket(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    script = Script(name="slow", turns=(Turn(says=REPLY, fault=Stall(after_text="think")),))
    async with deployed([script], PIPELINE) as (provider, _):
        run = await send("slow", deadline_s=4)
        log: Any = (await ended(server.client, keys, [run]))[run]
        await provider.disconnected(provider.requests[0])
    judge.check(log)
    assert (log[-1]["error"]["code"], log[-1]["error"]["class"]) == ("deadline", "timeout")


async def test_a_call_that_does_not_stream_gives_the_same_blocks_with_one_chunk_each(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    turns = (
        Turn(says=Reply(text=REPLY_TEXT, tool_calls=(ToolCall(name="weather", arguments={"city": "Bern"}),))),
        Turn(says=Reply(text="Take it along."), delivery=Delivery(cuts=Random(seed=1, largest=9))),
    )
    async with deployed([Script(name="both", turns=turns)], WITH_TOOLS):
        runs = {
            (api, stream): await send("both", provider=api, tools=[WEATHER], stream=stream)
            for api in APIS
            for stream in (True, False)
        }
        logs: Any = await ended(server.client, keys, [*runs.values()])
    for api in APIS:
        streamed, whole = logs[runs[api, True]], logs[runs[api, False]]
        judge.check(streamed)
        judge.check(whole)
        assert judge.blocks(whole) == judge.blocks(streamed), api
        for number in {e["block"] for e in whole if e["type"] == "block_start"}:
            parts = [e.get("tool_call_part") for e in whole if e["type"] == "chunk" and e["block"] == number]
            assert parts in ([None], ["name", "id", "input"]), f"{api}: one chunk a block, a call's three parts apart"


async def test_the_model_receives_a_tools_failure(server: Server, keys: Keys, send: Send, deployed: Deploy) -> None:
    calls = (
        ToolCall(name="weather", arguments='{"city": '),
        ToolCall(name="weather", arguments={"town": "Bern"}),
        ToolCall(name="unknown", arguments={}),
        ToolCall(name="weather", arguments={"city": "Bern"}),
    )
    turns = (Turn(says=Reply(tool_calls=calls)), Turn(says=Reply(text="I see.")))
    async with deployed([Script(name="calls", turns=turns)], WITH_TOOLS) as (provider, _):
        run = await send("calls", tools=[WEATHER, {"name": "unknown", "parameters": {"type": "object"}}])
        log: Any = (await ended(server.client, keys, [run]))[run]
        body = provider.requests[-1].http_request.body
    judge.check(log)
    assert log[-1]["type"] == "completed"
    results = [e for e in log if e["type"] == "block_complete" and e["kind"] == "tool_result"]
    assert [e.get("is_error", False) for e in results] == [True, True, True, False]
    assert "JSON" in results[0]["content"]
    assert "city" in results[1]["content"]
    assert "unknown" in results[2]["content"]
    assert body.count(b'"is_error":true') == 3, "the model sees each error"
