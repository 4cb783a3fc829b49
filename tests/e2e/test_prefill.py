"""Prefill mode through the running services: the model's text is cut into blocks, and its tools run inside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, Send
from tests.e2e.fleet import WITH_TOOLS, ended, fleet
from tokenbus.bus.keys import Keys
from tokenbus.bus.server import Server
from tokenbus_services.replay import Delivery, Random, ReplayServer, Reply, Script, ToolCall, Turn

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
        text=" Let me look, é.\n",
        tool_calls=tuple(ToolCall(name="weather", arguments={"city": city}) for city in ("Rome", "Oslo")),
    ),
    Reply(text="\nOne <b>more</b>.\n", tool_calls=(ToolCall(name="weather", arguments={"city": "Bern"}),)),
    Reply(text="\nIt is fine: {tool_result}"),
)
RESUMED = script(
    "resumed",
    Reply(text=" <thinking>User said hello.\nUser: hello</thinking>Well.\nUser: never heard", chunk_size=2),
)


def continuing(url: str) -> str:
    """A vendor of Chat Completions that goes on with a last message of the assistant."""
    return f"""
[providers.continuing]
api = "openai-chat"
base_url = "{url}/v1"
api_key_env = ""
quirks = {{ continues = "message" }}
"""


def told(log: judge.Log) -> list[dict[str, Any]]:
    """The run as a listener knows it: neighbouring chunks joined, without ids, times and counts."""
    out: list[dict[str, Any]] = []
    for event in log:
        if event.get("tool_call_part") == "id":
            continue
        hidden = ("run", "seq", "timing", "usage", "total", "tool_id", "provider", "model", "attempt")
        said = {name: value for name, value in event.items() if name not in hidden}
        last = out[-1] if out else {}
        if said["type"] == last.get("type") == "chunk" and {**said, "text": ""} == {**last, "text": ""}:
            last["text"] += said["text"]
        else:
            out.append(said)
    return out


@pytest.mark.timeout(90)
@pytest.mark.parametrize("provider_name", ["anthropic", "continuing"])
async def test_chat_and_prefill_parity(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path, provider_name: str
) -> None:
    async with (
        ReplayServer([WRITTEN, SPOKEN, RESUMED]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, WITH_TOOLS, continuing(provider.url)),
    ):
        written = await send("written", provider=provider_name, tools=[WEATHER], **PREFILL)
        spoken = await send("spoken", provider=provider_name, tools=[WEATHER])
        resumed = await send("resumed", provider=provider_name, **PREFILL)
        logs: Any = await ended(server.client, keys, [written, spoken, resumed])
    for log in logs.values():
        judge.check(log)
    if provider_name == "anthropic":
        assert told(logs[written]) == told(logs[spoken])
    # Chat Completions tells the end of a call only with the answer's: its blocks are the same, but end later.
    assert judge.blocks(logs[written]) == judge.blocks(logs[spoken])
    kinds = [kind for kind, _ in judge.blocks(logs[written])]
    one = ["text", "tool_call", "tool_call", "tool_result", "tool_result"]
    assert kinds == [*one, "text", "tool_call", "tool_result", "text"]
    assert logs[written][-1]["turn"] == 2
    # The provider stopped on a name inside thinking, and was asked to go on; in text that name ended the turn.
    assert judge.blocks(logs[resumed]) == [("thinking", "User said hello.\nUser: hello"), ("text", "Well.")]
    assert logs[resumed][-1]["type"] == "completed"
