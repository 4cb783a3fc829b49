"""An image from a tool reaches the model, in the form of each API and in prefill mode, and the subscribers."""

from __future__ import annotations

import re
from base64 import b64encode
from typing import Any

from tests.e2e import judge
from tests.e2e.conftest import Deploy, Send
from tests.e2e.fleet import BASE_PATHS, WITH_TOOLS, ended
from tests.services.tools.sample_tools import draw
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Reply, Script, ToolCall, Turn

DRAW = '\n[tools.draw]\nkind = "python"\ncall = "tests.services.tools.sample_tools:draw"\n'
TOOL = {"name": "draw", "parameters": {"type": "object", "properties": {}}}
SPOKEN = Script(
    name="spoken",
    turns=(Turn(says=Reply(text="Look:", tool_calls=(ToolCall(name="draw"),))), Turn(says=Reply(text="Nice."))),
)
WRITTEN = Script(
    name="written",
    turns=(
        Turn(says=Reply(text=' Look:\n<function_calls><invoke name="draw"></invoke></function_calls>')),
        Turn(says=Reply(text="Nice.")),
    ),
)


async def test_an_image_of_a_tool_reaches_the_model_and_the_subscribers(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    image = b64encode(draw().data).decode()
    async with deployed([SPOKEN, WRITTEN], WITH_TOOLS, DRAW) as (provider, _):
        runs = [await send("spoken", f"hello {api}", provider=api, id=api, tools=[TOOL]) for api in BASE_PATHS]
        prefill = {"mode": "prefill", "participant": "Claude"}
        runs.append(await send("written", "hello prefill", id="prefill", tools=[TOOL], **prefill))
        logs: Any = await ended(server.client, keys, runs)
        bodies = [e.http_request.body.decode() for e in provider.requests]
    for run, log in logs.items():
        judge.check(log)
        assert log[-1]["type"] == "completed", log[-1]
        [result] = [e for e in log if e["type"] == "block_complete" and e["kind"] == "tool_result"]
        # No blob service runs here, so events hold the bytes themselves.
        assert result["images"] == [{"media_type": "image/png", "base64": image}]
        requests = [body for body in bodies if re.search(rf"hello {run}(?!-)", body)]
        assert [image in body for body in requests] == [False, True], run
