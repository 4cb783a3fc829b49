"""Tools whose input is free text: declared by a request or a deployment, in both APIs that have them."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import msgspec
import openai
import pytest

from tokenbus.events.public import BlockComplete, BlockStarted, Chunk
from tokenbus.testing import LocalBus
from tokenbus_services.mock_provider import Reply, ToolCall

SECRET = "sk-ant-api03-" + "a1B2" * 20
SQL = 'SELECT "é" FROM t\n-- {not json'
CALL = Reply(text="I look.", tool_calls=(ToolCall(name="sql", arguments=SQL, free_text=True),))
LEAKS = Reply(tool_calls=(ToolCall(name="sql", arguments=f"SELECT '{SECRET}'", free_text=True),))
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"}
APIS = ("openai-responses", "openai-chat")
SETTINGS = """
[gateway]
tools = ["sql"]
[tools.sql]
kind = "python"
call = "tests.services.tools.sample_tools:echo"
description = "Runs SQL."
format = { type = "grammar", syntax = "lark", definition = "start: /.+/s" }
[policies.hide]
use = "tokenbus.policy:RedactSecrets"
"""


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus(SETTINGS) as running:
        running.model_says("calls", CALL)
        running.model_says("by-bus", CALL, "Done.")
        running.model_says("leaks", LEAKS, "Done.")
        running.model_says("says", "Well.")
        yield running


def as_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def finished(bus: LocalBus, model: str, **fields: Any) -> tuple[Any, list[Any], list[dict[str, Any]]]:
    """The response of a run, its events, and the bodies that the provider got."""
    before = len(bus.requests)
    with bus.sync_client() as client:
        run = client.publish(bus.request(model, **fields))
        events = list(client.follow(run))
        return client.result(run), events, bus.requests[before:]


@pytest.mark.parametrize("policies", [[], ["hide"]])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", APIS)
def test_the_bus_runs_a_custom_tool_with_the_text_and_sends_the_result_back(
    bus: LocalBus, api: str, stream: bool, policies: list[str]
) -> None:
    fields = {"provider": api, "stream": stream, "policies": policies, "tools": [{"name": "sql"}]}
    response, events, bodies = finished(bus, "by-bus", **fields)
    [call] = [e for e in events if isinstance(e, BlockComplete) and e.kind == "tool_call"]
    assert (call.arguments, call.free_text, call.input, call.input_error) == (SQL, True, None, None)
    pieces = [e.text for e in events if isinstance(e, Chunk) and e.tool_call_part == "input"]
    assert "".join(pieces) == SQL
    [begun] = [e for e in events if isinstance(e, BlockStarted) and e.kind == "tool_call"]
    assert begun.free_text
    [result] = [e for e in events if isinstance(e, BlockComplete) and e.kind == "tool_result"]
    assert (result.is_error, response.text) == (None, "I look.\n\nDone.")
    first, second = bodies
    [tool] = first["tools"]
    if api == "openai-responses":
        assert tool == {"type": "custom", "name": "sql", "description": "Runs SQL.", "format": GRAMMAR}
        called, output = second["input"][-2:]
        assert (called["type"], called["input"]) == ("custom_tool_call", SQL)
        assert (output["type"], output["output"]) == ("custom_tool_call_output", result.content)
    else:
        grammar = {name: GRAMMAR[name] for name in ("syntax", "definition")}
        custom = {"name": "sql", "description": "Runs SQL.", "format": {"type": "grammar", "grammar": grammar}}
        assert tool == {"type": "custom", "custom": custom}
        called, output = second["messages"][-2:]
        assert called["tool_calls"][0]["custom"] == {"name": "sql", "input": SQL}
        assert (output["role"], output["content"]) == ("tool", result.content)
    assert result.content == '{"input":' + as_json(SQL) + "}"


@pytest.mark.parametrize("api", APIS)
def test_a_policy_rewrites_the_text_that_the_tool_gets(bus: LocalBus, api: str) -> None:
    fields = {"provider": api, "policies": ["hide"], "tools": [{"name": "sql"}]}
    response, events, bodies = finished(bus, "leaks", **fields)
    assert SECRET not in repr(events)
    [result] = [e for e in events if isinstance(e, BlockComplete) and e.kind == "tool_result"]
    assert result.content == '{"input":"SELECT \'[redacted]\'"}'
    assert response.text == "Done."
    assert len(bodies) == 2


def test_an_api_without_custom_tools_refuses_them_by_name_and_takes_their_calls_as_json(bus: LocalBus) -> None:
    tools = [{"name": "sql", "format": {"type": "text"}}]
    for provider in ("anthropic", "gemini"):
        with bus.sync_client() as client:
            run = client.publish(bus.request("says", provider=provider, tools=tools))
            with pytest.raises(Exception, match=r"tools\[0\]\.format"):
                client.result(run)
        call = {"type": "tool_call", "tool_id": "c1", "tool_name": "sql", "arguments": SQL, "free_text": True}
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [call]},
            {"role": "tool", "content": [{"type": "tool_result", "tool_id": "c1", "content": "1"}]},
        ]
        response, _, [body] = finished(bus, "says", provider=provider, messages=messages)
        assert response.text == "Well."
        assert f'"input":{as_json({"input": SQL})}' in as_json(body) or f'"args":{as_json({"input": SQL})}' in as_json(
            body
        )


@pytest.mark.parametrize("model", [f"{api}/calls" for api in APIS])
def test_a_client_of_responses_declares_a_custom_tool_and_answers_its_call(bus: LocalBus, model: str) -> None:
    tool: Any = {"type": "custom", "name": "sql", "format": GRAMMAR}
    with openai.OpenAI(api_key="k", base_url=f"{bus.gateway}/v1", max_retries=0) as client:
        events = list(client.responses.create(model=model, input="hi", tools=[tool], stream=True))
        deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == SQL
        [done] = [e for e in events if e.type == "response.custom_tool_call_input.done"]
        assert done.input == SQL
        last = events[-1]
        assert last.type == "response.completed"
        [call] = [item for item in last.response.output if item.type == "custom_tool_call"]
        assert (call.name, call.input) == ("sql", SQL)
        answer: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "1 row"}
        items: Any = [{"role": "user", "content": "hi"}, *last.response.output, answer]
        client.responses.create(model=model.replace("calls", "says"), input=items, tools=[tool])
    sent = str(bus.requests[-1])
    assert "1 row" in sent
    assert ("custom_tool_call_output" if "responses" in model else "'custom': {'name': 'sql'") in sent


@pytest.mark.parametrize("model", [f"{api}/calls" for api in APIS])
def test_a_client_of_chat_completions_declares_a_custom_tool_and_answers_its_call(bus: LocalBus, model: str) -> None:
    grammar = {"syntax": "regex", "definition": ".+"}
    tool: Any = {"type": "custom", "custom": {"name": "sql", "format": {"type": "grammar", "grammar": grammar}}}
    user: Any = {"role": "user", "content": "hi"}
    with openai.OpenAI(api_key="k", base_url=f"{bus.gateway}/v1", max_retries=0) as client:
        text, ids = "", list[str]()
        for chunk in client.chat.completions.create(model=model, messages=[user], tools=[tool], stream=True):
            for call in (chunk.choices[0].delta.tool_calls or ()) if chunk.choices else ():
                given: Any = call.model_dump()
                text += given["custom"]["input"]
                ids += [call.id] if call.id else []
        assert (text, len(ids)) == (SQL, 1)
        whole = client.chat.completions.create(model=model, messages=[user], tools=[tool])
        message = whole.choices[0].message
        assert message.tool_calls
        [called] = message.tool_calls
        assert called.type == "custom"
        assert (called.custom.name, called.custom.input) == ("sql", SQL)
        result: Any = {"role": "tool", "tool_call_id": called.id, "content": "1 row"}
        messages: Any = [user, message, result]
        client.chat.completions.create(model=model.replace("calls", "says"), messages=messages, tools=[tool])
    assert "1 row" in str(bus.requests[-1])


def test_a_tool_has_a_schema_or_a_format(bus: LocalBus) -> None:
    tool = {"name": "sql", "parameters": {"type": "object"}, "format": {"type": "text"}}
    with bus.sync_client() as client:
        run = client.publish(bus.request("says", provider="openai-chat", tools=[tool]))
        with pytest.raises(Exception, match=r"tools\[0\]\.format.*not both"):
            client.result(run)
