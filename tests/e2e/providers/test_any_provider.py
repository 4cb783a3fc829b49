"""Every provider through the running services: the request sent, and the events that subscribers receive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e import judge
from tests.e2e.conftest import Deploy, Send
from tests.e2e.fleet import BASE_PATHS, PIPELINE, ended, fleet, provider_table
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, MockProvider, Random, Reply, Script, Status, Turn

HELLO = Script(
    name="hello", turns=(Turn(says=Reply(text="Hello there"), first=(Status(status=529),)),), repeat_last=True
)
"""At the second try."""
ORPHANS: list[dict[str, Any]] = [
    {"role": "user", "content": "Is it raining?"},
    {
        "role": "assistant",
        "content": [{"type": "tool_call", "tool_id": "t1", "tool_name": "weather", "arguments": "{}"}],
    },
    {"role": "user", "content": "Well?"},
    {"role": "tool", "content": [{"type": "tool_result", "tool_id": "t9", "content": "sunny"}]},
]
"""A call without a result, and a result without a call."""
QUICK = "[retry]\nbase_delay_s = 0.01\n"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


async def test_a_repaired_history_is_noted_at_the_runs_end(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    async with deployed([HELLO], PIPELINE, QUICK) as (provider, _):
        runs = [await send("hello", provider=api, messages=ORPHANS) for api in BASE_PATHS]
        logs: Any = await ended(server.client, keys, runs)
        bodies = [exchange.http_request.body for exchange in provider.requests]
    for run in runs:
        log = logs[run]
        judge.check(log)
        assert log[-1]["type"] == "completed", log[-1]
        assert [extra for extra in log[-1]["provider_extra"] if "note" in extra] == [
            {"note": "messages[3]: the result of call t9 has no call before it and was left out"},
            {"note": "messages[1]: the call t1 of weather has no result; an error result was inserted"},
        ], "once, however often the request was made"
    assert len(bodies) == 2 * len(runs)
    assert all(b"sunny" not in body and b"never answered" in body for body in bodies)


async def test_the_schema_of_the_answer_reaches_each_provider(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    async with deployed([HELLO], PIPELINE, QUICK) as (provider, _):
        output_schema = {"schema": CITY, "name": "city", "strict": True}
        runs = [await send("hello", provider=api, output_schema=output_schema) for api in BASE_PATHS]
        await ended(server.client, keys, runs)
        bodies = {exchange.request.api: exchange.request.body for exchange in provider.requests if exchange.request}
    assert bodies["anthropic"]["output_config"]["format"]["schema"] == CITY
    assert bodies["openai-chat"]["response_format"]["json_schema"] == output_schema
    assert bodies["openai-responses"]["text"]["format"] == {"type": "json_schema", **output_schema}
    assert bodies["gemini"]["generationConfig"]["responseJsonSchema"] == CITY


async def test_thinking_that_a_vendor_leaves_in_the_text_is_never_visible(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    reply = Reply(text="<think>Is it?\nI think so.</think>\n\nYes, it <b>is</b>.", chunk_size=3)
    script = Script(name="inline", turns=(Turn(says=reply, delivery=Delivery(cuts=Random(seed=3, largest=50))),))
    async with MockProvider([script]) as provider:
        toml = "".join(
            provider_table(f"{api}-inline", api, provider.url, 'quirks = { inline_thinking = ["think"] }')
            for api in BASE_PATHS
        )
        async with fleet(tmp_path, server_url, keys, provider.url, PIPELINE, toml):
            runs = [
                await send("inline", provider=f"{api}-inline", stream=stream)
                for api in BASE_PATHS
                for stream in (True, False)
            ]
            logs: Any = await ended(server.client, keys, runs)
    for run in runs:
        judge.check(logs[run])
        assert logs[run][-1]["type"] == "completed"
        assert judge.blocks(logs[run]) == [("thinking", "Is it?\nI think so."), ("text", "\n\nYes, it <b>is</b>.")]
        assert judge.text(logs[run]) == "\n\nYes, it <b>is</b>."
