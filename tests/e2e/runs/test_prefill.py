"""Prefill mode through the running services: the model's text is cut into blocks, and its tools run inside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, Send
from tests.e2e.fleet import PIPELINE, WITH_TOOLS, ended, fleet, provider_table
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, MockProvider, Random, Reply, Script, ToolCall, Turn

PREFILL: dict[str, Any] = {"mode": "prefill", "participant": "Claude"}


def calls(*cities: str) -> str:
    inner = "".join(f'<invoke name="weather">\n<parameter name="city">{c}</parameter>\n</invoke>\n' for c in cities)
    return f"<function_calls>\n{inner}</function_calls>"


def script(name: str, *replies: Reply) -> Script:
    """Each read is cut somewhere else: in the middle of tags, of characters, of events."""
    cuts = [Delivery(cuts=Random(seed=seed, largest=60)) for seed in range(len(replies))]
    return Script(name=name, turns=tuple(Turn(says=r, delivery=d) for r, d in zip(replies, cuts, strict=True)))


WRITTEN = script(
    "written",
    Reply(text=f" Let me look, é.\n{calls('Rome', 'Oslo')}\n<function_results>no</function_results>", chunk_size=3),
    Reply(text=f"\nOne <b>more</b>.\n{calls('Bern')}", chunk_size=1),
    Reply(text="\nIt is fine: {tool_result}", chunk_size=7),
)
SPOKEN = script(
    "spoken",
    Reply(
        text="Let me look, é.\n",
        tool_calls=tuple(ToolCall(name="weather", arguments={"city": city}) for city in ("Rome", "Oslo")),
    ),
    Reply(text="\nOne <b>more</b>.\n", tool_calls=(ToolCall(name="weather", arguments={"city": "Bern"}),)),
    Reply(text="\nIt is fine: {tool_result}"),
)
RESUMED = script(
    "resumed",
    Reply(text=" <thinking>User said hello.\nUser: hello</thinking>Well.\nUser: never heard", chunk_size=2),
)
TURNED = script("turned", Reply(text=" Hi <b>all</b><|eot|>Alice: never heard", chunk_size=1))
CITIES = ["text", "tool_call", "tool_call", "tool_result", "tool_result"]


def providers(url: str) -> str:
    """Vendors that continue a text, beside Anthropic: Chat Completions in both of its ways, and Gemini."""
    return "".join(
        (
            provider_table("continuing", "openai-chat", url, 'quirks = { continues = "message" }'),
            provider_table("completing", "openai-chat", url, 'quirks = { continues = "completions" }'),
            provider_table("turning", "gemini", url, 'quirks = { models_continuing = [""] }'),
        )
    )


def stable_fields(log: judge.Log) -> list[dict[str, Any]]:
    """The run as a listener knows it: neighbouring chunks joined, without ids, times, counts and what one API says."""
    out: list[dict[str, Any]] = []
    for event in log:
        if event.get("tool_call_part") == "id":
            continue
        hidden = (
            "run",
            "seq",
            "timing",
            "usage",
            "total",
            "tool_id",
            "provider",
            "model",
            "attempt",
            "response_id",
            "participant",
            "opaque",
            "provider_extra",
        )
        fields = {name: value for name, value in event.items() if name not in hidden}
        last = out[-1] if out else {}
        if fields["type"] == last.get("type") == "chunk" and {**fields, "text": ""} == {**last, "text": ""}:
            last["text"] += fields["text"]
        else:
            out.append(fields)
    return out


def clean(log: judge.Log, *, stream: bool) -> None:
    """No tag in any chunk, but for what is none; results whole; unstreamed, one chunk a block."""
    chunks = [event for event in log if event["type"] == "chunk" and event.get("tool_call_part") in (None, "input")]
    everything = "".join(chunk["text"] for chunk in chunks)
    assert not any(tag in everything for tag in ("function_", "invoke", "parameter"))
    assert "One <b>more</b>." in judge.text(log)
    results = [event for event in log if event["type"] == "block_complete" and event["kind"] == "tool_result"]
    assert [json.loads(result["content"])["city"] for result in results] == ["Rome", "Oslo", "Bern"]
    if not stream:
        numbers = [chunk["block"] for chunk in chunks]
        assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", ["anthropic", "continuing", "completing", "turning"])
async def test_chat_and_prefill_parity(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path, name: str, stream: bool
) -> None:
    async with (
        MockProvider([WRITTEN, SPOKEN]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, WITH_TOOLS, providers(provider.url)),
    ):
        written = await send("written", provider=name, tools=[WEATHER], stream=stream, **PREFILL)
        spoken = await send("spoken", provider=name, tools=[WEATHER], stream=stream)
        logs: Any = await ended(server.client, keys, [written, spoken])
    for log in logs.values():
        judge.check(log)
    assert stable_fields(logs[written]) == stable_fields(logs[spoken])
    assert judge.blocks(logs[written]) == judge.blocks(logs[spoken])
    kinds = [kind for kind, _ in judge.blocks(logs[written])]
    assert kinds == [*CITIES, "text", "tool_call", "tool_result", "text"]
    assert logs[written][-1]["turn"] == 2
    clean(logs[written], stream=stream)


@pytest.mark.parametrize("name", ["anthropic", "continuing", "completing"])
async def test_an_answer_that_stops_inside_thinking_is_resumed_and_one_that_stops_in_text_is_done(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path, name: str
) -> None:
    async with (
        MockProvider([RESUMED]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, PIPELINE, providers(provider.url)),
    ):
        run = await send("resumed", provider=name, **PREFILL)
        logs: Any = await ended(server.client, keys, [run])
    judge.check(logs[run])
    assert judge.blocks(logs[run]) == [("thinking", "User said hello.\nUser: hello"), ("text", "Well.")]
    assert logs[run][-1]["type"] == "completed"


async def test_the_end_of_turn_token_ends_the_turn_and_is_never_published(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    names = [("Alice", "Hello"), ("Bob", "Hi there")]
    messages = [{"role": "user", "participant": who, "content": text} for who, text in names]
    async with (
        MockProvider([TURNED]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, PIPELINE, providers(provider.url)),
    ):
        runs = [
            await send(
                "turned",
                provider="turning",
                messages=messages,
                prefill={"stop_on_end_of_turn": stops},
                stream=stream,
                **PREFILL,
            )
            for stops in (True, False)
            for stream in (True, False)
        ]
        logs: Any = await ended(server.client, keys, runs)
        bodies = [exchange.request.body for exchange in provider.requests if exchange.request]
    for run in runs:
        judge.check(logs[run])
        assert judge.blocks(logs[run]) == [("text", "Hi <b>all</b>")]
        assert (logs[run][-1]["type"], logs[run][-1]["finish"]) == ("completed", "stop")
    written = {body["contents"][-1]["parts"][0]["text"] for body in bodies}
    assert written == {"Alice: Hello<|eot|>Bob: Hi there<|eot|>Claude:"}
    told_to_stop = [body["generationConfig"]["stopSequences"][0] == "<|eot|>" for body in bodies]
    assert sorted(told_to_stop) == [False, False, True, True]
