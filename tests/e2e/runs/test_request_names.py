"""Unknown names in a request, through the running services: the client refuses them, intake accepts them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e import judge
from tests.e2e.conftest import Deploy, Send
from tests.e2e.fleet import WITH_TOOLS, ended
from tokenbus import Client
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.errors import RequestInvalid
from tokenbus_services.mock_provider import Reply, Script, ToolCall, Turn

SAYS = Script(name="says", turns=(Turn(says=Reply(text="Hello there.")),), repeat_last=True)
CALLS = Script(
    name="calls",
    turns=(
        Turn(says=Reply(tool_calls=(ToolCall(name="weather", arguments={"city": "Bern"}),))),
        Turn(says=Reply(text="It rains.")),
    ),
)


async def test_an_unknown_field_is_refused_by_the_client_and_noted_by_intake(
    server: Server, server_url: str, keys: Keys, send: Send, deployed: Deploy
) -> None:
    async with deployed([SAYS], WITH_TOOLS):
        messages = [{"role": "user", "content": "Hi", "mood": "good"}]
        run = await send("says", max_token=5, messages=messages)
        log: Any = (await ended(server.client, keys, [run]))[run]
        request = {"provider": "anthropic", "model": "says", "messages": messages, "id": "by-client"}
        async with Client(server_url, prefix=keys.prefix) as bus:
            with pytest.raises(RequestInvalid) as caught:
                await bus.publish(request)
        assert not await server.client.exists(keys.run("by-client"))
    judge.check(log)
    assert log[-1]["type"] == "completed", log[-1]
    assert judge.text(log) == "Hello there."
    assert log[0]["notes"] == [
        "messages[0].mood has no effect: there is no such field, only 'role', 'content', 'participant', 'id', 'extra'",
        "max_token has no effect: there is no such field; did you mean 'max_tokens'?",
    ]
    assert caught.value.where == "messages[0].mood"


async def test_a_tool_by_its_name_alone_must_be_declared(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    async with deployed([SAYS, CALLS], WITH_TOOLS):
        misspelt = await send("says", tools=[{"name": "weather"}, {"name": "wether"}])
        strange = await send("says", tools=[{"name": "xyzzy"}])
        declared = await send("calls", tools=[{"name": "weather"}])
        own = await send("says", tools=[{"name": "wave", "description": "Wave at the user."}], max_tool_depth=0)
        logs: Any = await ended(server.client, keys, [misspelt, strange, declared, own])
    [end] = logs[misspelt]
    assert (end["error"]["code"], end["error"]["where"]) == ("request_invalid", "tools[1]")
    assert "no tool 'wether' is declared here" in end["error"]["message"]
    assert end["error"]["message"].endswith("did you mean 'weather'?")
    [end] = logs[strange]
    assert (end["error"]["where"], "did you mean" in end["error"]["message"]) == ("tools[0]", False)
    for run in (declared, own):
        judge.check(logs[run])
        assert logs[run][-1]["type"] == "completed", logs[run][-1]
