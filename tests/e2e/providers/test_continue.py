"""`on_failure` continue through the running services: a fetcher dies amid a text, and subscribers get one text."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, Send
from tests.e2e.fleet import PIPELINE, WITH_TOOLS, ended, fleet, provider_table
from tests.waiting import eventually
from tokenbus import Client
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.events.public import Chunk
from tokenbus_services.mock_provider import CutOff, MockProvider, Reply, Script, Stall, ToolCall, Turn

REPLY = "One two three four five, six seven."
CALL = '<function_calls><invoke name="weather"><parameter name="city">Bern</parameter></invoke></function_calls>'
DIES = (Stall(after_text="three"),)
CHAT = Script(
    name="chat",
    turns=(
        Turn(says=Reply(text=REPLY, tool_calls=(ToolCall(name="weather", arguments={"city": "Bern"}),)), first=DIES),
        Turn(says=Reply(text="Rain.")),
    ),
)
PREFILL = Script(
    name="prefill",
    turns=(Turn(says=Reply(text=f" {REPLY}\n{CALL}"), first=DIES), Turn(says=Reply(text="Rain."))),
)
GOES_ON = 'quirks = { models_continuing = [""] }'


def vendors(url: str) -> str:
    """Those that continue with a last message of their own, and one that does not say so."""
    return "".join(
        (
            provider_table("claude", "anthropic", url, GOES_ON),
            provider_table("twin", "gemini", url, GOES_ON),
            provider_table("vllm", "openai-chat", url, 'quirks = { continues = "message" }'),
            provider_table("completing", "openai-chat", url, 'quirks = { continues = "completions" }'),
        )
    )


RUNS = {
    "chat-claude": ("chat", "claude"),
    "chat-twin": ("chat", "twin"),
    "chat-vllm": ("chat", "vllm"),
    "chat-newest": ("chat", "anthropic"),
    "prefill-claude": ("prefill", "claude"),
    "prefill-completing": ("prefill", "completing"),
}
"""By run: mode and provider. `anthropic` has its defaults, and a model that cannot continue."""


async def listen(bus: Client, run: str, received: dict[str, str]) -> None:
    async for event in bus.follow(run):
        if isinstance(event, Chunk) and event.visible:
            received[run] = received.get(run, "") + event.text


async def test_a_subscriber_does_not_notice_a_fetcher_killed_in_the_middle_of_a_text(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    received: dict[str, str] = {}
    async with (
        MockProvider([CHAT, PREFILL]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, WITH_TOOLS, vendors(provider.url)) as workers,
        Client(server_url, prefix=keys.prefix) as bus,
    ):
        for run, (mode, name) in RUNS.items():
            more = {"mode": "prefill", "participant": "Claude"} if mode == "prefill" else {}
            await send(mode, f"hello {run}", provider=name, id=run, tools=[WEATHER], on_failure="continue", **more)
        listeners = [asyncio.create_task(listen(bus, run, received)) for run in RUNS]
        await eventually(lambda: all("three" in received.get(run, "") for run in RUNS))
        workers.workers[0].kill()
        await workers.start(PIPELINE[0])
        logs: Any = await ended(server.client, keys, list(RUNS))
        await asyncio.gather(*listeners)
    cut = logs.pop("chat-newest")
    for run, log in logs.items():
        judge.check(log)
        assert log[-1]["type"] == "completed", log[-1]
        text = "".join(kind_text for kind, kind_text in judge.blocks(log) if kind == "text")
        assert received[run] == judge.text(log) == text, "the subscriber's text is the log's text"
        assert received[run].replace("\n", "").strip() == f"{REPLY}Rain.", "no gap and no repeat"
        kinds = [kind for kind, _ in judge.blocks(log)]
        assert kinds == ["text", "tool_call", "tool_result", "text"], "one seamless block"
        [retrying] = [e for e in log if e["type"] in ("retrying", "restarted")]
        assert (retrying["type"], retrying["continues"], retrying["attempt"]) == ("retrying", True, 1)
        assert not [e for e in log if e.get("cut")]
    judge.check(cut)
    assert cut[-1]["type"] == "incomplete"
    assert "cannot continue the text" in str(cut[-1]["provider_extra"])
    assert REPLY.startswith(received["chat-newest"])


async def test_a_stream_that_breaks_twice_is_one_text_with_the_usage_of_all_tries(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    breaks = (CutOff(after_text="three"), CutOff(after_text="five"))
    script = Script(name="chat", turns=(Turn(says=Reply(text=REPLY), first=breaks),))
    quick = "\n[retry]\nbase_delay_s = 0.05\n"
    async with (
        MockProvider([script]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, WITH_TOOLS, vendors(provider.url) + quick),
    ):
        run = await send("chat", provider="claude", on_failure="continue")
        log: Any = (await ended(server.client, keys, [run]))[run]
    judge.check(log)
    assert judge.blocks(log) == [("text", REPLY)]
    assert judge.text(log) == REPLY
    usages = [e for e in log if e["type"] == "usage"]
    assert [e["attempt"] for e in usages] == [1, 2, 3]
    assert log[-1]["usage"]["input"] == sum(e["usage"]["input"] for e in usages) == 75
