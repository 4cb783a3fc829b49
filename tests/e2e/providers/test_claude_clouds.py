"""Claude on Bedrock and on Vertex AI: the tables of docs/guides/providers.md, as they are, give the events of the
Messages API."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, Send
from tests.e2e.fleet import WITH_TOOLS, ended, fleet
from tests.unit.docs.pages import page
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import (
    CutOff,
    Delivery,
    ErrorEvent,
    MockProvider,
    Random,
    Reply,
    Script,
    Status,
    ToolCall,
    Turn,
)

CLOUDS = ("claude-bedrock", "claude-vertex")
CALLS = Reply(thinking="Hm.", text="Let me see.", tool_calls=(ToolCall(name="weather", arguments={"city": "Bonn"}),))
CUT = Delivery(cuts=Random(seed=3, largest=30))
SCRIPTS = [
    Script(name="us.anthropic.claude-v1:0", turns=(Turn(says=CALLS, delivery=CUT), Turn(says=Reply(text="Rain 🌧️.")))),
    Script(
        name="retry", turns=(Turn(says=Reply(text="Yes."), first=(Status(status=429), ErrorEvent(after_events=2))),)
    ),
    Script(name="cut", turns=(Turn(says=Reply(text="It was said"), fault=CutOff(after_text="said")),)),
]


def tables(url: str) -> str:
    """The tables of the page, at the mock provider's address."""
    text = page("guides/providers.md")
    found = [f"[providers.{name}]" + re.split(rf"\[providers\.{name}\]", text)[1].split("```")[0] for name in CLOUDS]
    return re.sub(r'base_url = "https://[^/"]+', f'base_url = "{url}', "\n".join(found))


async def test_claude_in_a_cloud_is_claude(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path, monkeypatch: Any
) -> None:
    token = tmp_path / "token"
    token.write_text("none")
    monkeypatch.setenv("AWS_BEARER_TOKEN_BEDROCK", "none")
    monkeypatch.setenv("VERTEX_TOKEN_FILE", str(token))
    async with MockProvider(SCRIPTS) as provider:
        more = tables(provider.url) + "\n[retry]\nbase_delay_s = 0.05\n"
        async with fleet(tmp_path, server_url, keys, provider.url, WITH_TOOLS, more):
            runs: dict[tuple[str, str, bool], str] = {}
            for stream in (True, False):
                for name in ("anthropic", *CLOUDS):
                    how: dict[str, Any] = {"provider": name, "stream": stream}
                    runs[name, "said", stream] = await send(SCRIPTS[0].name, tools=[WEATHER], **how)
            for name in CLOUDS:
                runs[name, "retry", True] = await send("retry", "try again", provider=name)
                runs[name, "cut", True] = await send("cut", "speak", provider=name)
            logs: Any = await ended(server.client, keys, list(runs.values()))
            requests = [exchange.http_request for exchange in provider.requests]
    assert {one.path.rpartition("/")[2] for one in requests if "bedrock-20" in one.body.decode()} == {
        "invoke",
        "invoke-with-response-stream",
    }
    for (name, what, stream), run in runs.items():
        log = logs[run]
        judge.check(log)
        if what == "cut":
            assert (log[-1]["type"], log[-1]["error"]["class"]) == ("incomplete", "network")
            continue
        assert log[-1]["type"] == "completed", log[-1]
        if what == "said":
            ours = [event for event in log if event["type"] == "block_complete"]
            theirs = [event for event in logs[runs["anthropic", "said", stream]] if event["type"] == "block_complete"]
            assert [shown(event) for event in ours] == [shown(event) for event in theirs], (name, stream)
        else:
            errors = [event["error"]["class"] for event in log if event["type"] == "retrying"]
            assert errors == ["rate_limit", "server" if name == "claude-bedrock" else "overloaded"]


def shown(event: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(event.get(key) for key in ("kind", "text", "tool_name", "arguments", "signature", "result"))
