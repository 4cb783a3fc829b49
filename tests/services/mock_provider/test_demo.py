"""The demo's conversation, as bytes on the wire."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from jsonschema_rs import validate

from tests.services.mock_provider.requests import MESSAGES, PATHS, post, serving
from tokenbus_services.mock_provider import Reply, ToolCall
from tokenbus_services.mock_provider.demo import DEMO_MODEL, answer, demo_scripts
from tokenbus_services.mock_provider.demo.own_tools import named_call
from tokenbus_services.mock_provider.request import ModelRequest
from tokenbus_services.weather import WEATHER_PARAMETERS, weather


@pytest.mark.parametrize("path", PATHS)
async def test_a_person_sees_it_stream(path: str) -> None:
    (script,) = demo_scripts()
    assert {turn.delivery.pace for turn in script.turns} == {40}
    async with serving(script.paced(None)) as (server, client):
        body = (await client.post(**post(path, model=DEMO_MODEL))).content
    # 40 reads a second: about two seconds a turn.
    assert 40 <= server.requests[0].reads_sent <= 90
    assert "Zür".encode() in body
    assert (b"event: ping\n" in body) is (path == MESSAGES)


def test_the_call_of_the_demo_suits_its_tool() -> None:
    (script,) = demo_scripts()
    reply = script.turns[0].says
    assert isinstance(reply, Reply)
    (call,) = reply.tool_calls
    arguments = msgspec.json.decode(call.raw)
    validate(WEATHER_PARAMETERS, arguments)
    assert (call.name, weather(**arguments)["city"]) == ("weather", "Zürich")


def test_a_message_that_steers_the_demo_gets_the_weather_all_the_same() -> None:
    request = ModelRequest(
        api="anthropic",
        headers={},
        body={},
        model=DEMO_MODEL,
        stream=True,
        turn=1,
        user_text="In Celsius please",
        tool_results=(msgspec.json.encode(weather(city="Zürich")).decode(),),
        key="k",
    )
    says = answer(request).says
    assert isinstance(says, Reply)
    assert says.text.startswith("You wrote meanwhile: “In Celsius please”. Yes, take it along.")


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "days", "unit"],
}
OF_EACH_API: dict[str, Any] = {
    "anthropic": [{"name": "look_up", "input_schema": SCHEMA}],
    "openai chat": [{"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}],
    "openai responses": [{"type": "web_search"}, {"type": "function", "name": "look_up", "parameters": SCHEMA}],
    "gemini": [{"functionDeclarations": [{"name": "look_up", "parametersJsonSchema": SCHEMA}]}],
}


@pytest.mark.parametrize("api", OF_EACH_API)
def test_a_newcomers_own_tool_is_called_if_the_text_names_it(api: str) -> None:
    def arguments(text: str) -> object:
        call = named_call(text, OF_EACH_API[api])
        return call and call.arguments

    assert arguments('Please look_up "Bern" for 3 days.') == {"city": "Bern", "days": 3, "unit": "C"}
    assert arguments("LOOK_UP!") == {"city": "example", "days": 1, "unit": "C"}
    assert arguments('look_up {"city": "Rome"} now') == {"city": "Rome"}
    assert arguments("I look_upon the sea") is None
    validate(SCHEMA, arguments("look_up"))
    assert named_call("look_up", None) is None
    assert isinstance(named_call("look_up", OF_EACH_API[api]), ToolCall)
