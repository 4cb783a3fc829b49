"""The demo's conversation, as bytes on the wire."""

from __future__ import annotations

import msgspec
import pytest
from jsonschema_rs import validate

from tests.services.mock_provider.requests import MESSAGES, PATHS, post, serving
from tokenbus_services.mock_provider import Reply
from tokenbus_services.mock_provider.demo import DEMO_MODEL, WEATHER_PARAMETERS, demo_scripts, weather


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
