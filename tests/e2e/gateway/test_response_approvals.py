"""Approvals over the Responses API, with OpenAI's own Python client: of tools here, and of those at the provider."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import openai
import pytest

from tokenbus.testing import LocalBus
from tokenbus_services.mock_provider import ModelRequest, Reply, ToolCall, Turn, Wire

SETTINGS = """
[gateway]
tools = ["weather"]
keep_alive_s = 0.2
early_status_s = 60
[tools.weather]
kind = "python"
call = "tokenbus_services.weather:weather"
approval = "always"
"""
CITY: dict[str, object] = {"city": "Rome"}
BY_BUS: Any = {"model": "anthropic/pays", "input": "go", "extra_body": {"tokenbus": {"tools": ["weather"]}}}
ASKED = {"type": "mcp_approval_request", "id": "mcpr_p1", "server_label": "crm", "name": "del", "arguments": '{"n":1}'}
HOSTED: Any = {
    "model": "openai-responses/hosted",
    "input": "go",
    "tools": [
        {"type": "mcp", "server_label": "crm", "server_url": "https://crm.example", "require_approval": "always"}
    ],
}


def wire() -> Wire:
    whole = {"object": "response", "id": "resp_1", "model": "hosted", "status": "completed", "output": [ASKED]}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {**whole, "status": "in_progress", "output": []}},
        {"type": "response.output_item.added", "output_index": 0, "item": ASKED},
        {"type": "response.output_item.done", "output_index": 0, "item": ASKED},
        {"type": "response.completed", "response": whole},
    ]
    stream = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)
    return Wire(stream=stream, body=json.dumps(whole).encode())


def hosted(request: ModelRequest) -> Reply | Turn:
    """Asks, until it has an answer."""
    answered = any(item.get("type") == "mcp_approval_response" for item in request.body["input"])
    return Reply(text="Gone.") if answered else Turn(says=wire())


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    call = ToolCall(name="weather", arguments=CITY)
    with LocalBus(SETTINGS) as running:
        running.model_says("pays", Reply(text="I look.", tool_calls=(call,)), "Sunny.")
        running.model_says("twice", Reply(tool_calls=(call,)), Reply(tool_calls=(call,)), "Both sunny.")
        other = ToolCall(name="weather", arguments={"city": "Bonn"})
        running.model_says("both", Reply(tool_calls=(call, other)), "Ok.")
        running.model_says("hosted", hosted)
        yield running


@pytest.fixture(scope="module")
def client(bus: LocalBus) -> Generator[openai.OpenAI]:
    with openai.OpenAI(api_key="k", base_url=f"{bus.gateway}/v1", max_retries=0) as made:
        yield made


def requests_in(response: Any) -> list[Any]:
    return [item for item in response.output if item.type == "mcp_approval_request"]


def answer(request: Any, *, approve: bool = True, **more: Any) -> Any:
    return {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": approve, **more}


def test_the_program_of_the_guide_asks_and_goes_on(bus: LocalBus, tmp_path: Path) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "gateway-responses.md").read_text()
    (program,) = re.findall(r"```python\n(# approve\.py\n.*?)```", guide, re.DOTALL)
    for shown, here in (("http://127.0.0.1:8088", bus.gateway), ("sonnet", "anthropic/pays"), ('"pay"', '"weather"')):
        assert shown in program
        program = program.replace(shown, here)
    script = tmp_path / "approve.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, str(script)], input="yes\n", capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("Sunny.\n")
    assert json.dumps(CITY, separators=(",", ":")) in done.stdout.replace(" ", "")


def test_a_stream_ends_with_the_request_and_another_one_goes_on_after_the_answer(client: Any) -> None:
    events = list(client.responses.create(**BY_BUS, stream=True))
    assert events[-1].type == "response.completed"
    first = events[-1].response
    (asked,) = requests_in(first)
    assert (asked.name, asked.server_label, json.loads(asked.arguments)) == ("weather", "tokenbus", CITY)
    assert [e.item.type for e in events if e.type == "response.output_item.done"] == ["message", "mcp_approval_request"]
    assert client.responses.retrieve(first.id).model_dump(exclude={"completed_at"}) == first.model_dump(
        exclude={"completed_at"}
    )
    rest = list(
        client.responses.create(
            model="anthropic/pays", previous_response_id=first.id, input=[answer(asked)], stream=True
        )
    )
    assert [e.sequence_number for e in rest] == list(range(len(rest)))
    assert (rest[0].type, rest[-1].type) == ("response.created", "response.completed")
    last = rest[-1].response
    assert (last.output_text, last.previous_response_id, last.id != first.id) == ("Sunny.", first.id, True)
    (called,) = [item for item in last.output if item.type == "mcp_call"]
    assert (called.approval_request_id, called.name, called.status) == (asked.id, "weather", "completed")
    assert called.output
    assert first.usage
    assert last.usage
    assert last.usage.input_tokens == first.usage.input_tokens, "each counts what it took itself"
    assert client.responses.retrieve(last.id).model_dump() == last.model_dump()
    assert client.responses.retrieve(first.id).output_text == "I look.", "it has ended"
    again = list(client.responses.retrieve(last.id, stream=True, starting_after=2))
    assert [e.sequence_number for e in again] == [e.sequence_number for e in rest][3:]
    items = client.responses.input_items.list(last.id).data
    assert [(item.type, item.approve) for item in items] == [("mcp_approval_response", True)]  # type: ignore[union-attr]


def test_a_denial_with_its_reason_reaches_the_model_and_other_answers_are_refused(client: Any) -> None:
    first = client.responses.create(**BY_BUS)
    (asked,) = requests_in(first)
    assert first.status == "completed"
    denied = [answer(asked, approve=False, reason="too far")]
    last = client.responses.create(model="anthropic/pays", previous_response_id=first.id, input=denied)
    assert last.output_text == "Sunny."
    assert not [item for item in last.output if item.type == "mcp_call"], "it did not run"
    same = client.responses.create(model="anthropic/pays", previous_response_id=first.id, input=denied)
    assert same.id == last.id, "a client that lost the answer sends it again"
    with pytest.raises(openai.ConflictError):
        client.responses.create(model="anthropic/pays", previous_response_id=first.id, input=[answer(asked)])
    unknown = {"type": "mcp_approval_response", "approval_request_id": f"{asked.id}9", "approve": True}
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="anthropic/pays", input=[unknown])


def test_several_requests_are_answered_at_once_and_nothing_else_is_said(client: Any) -> None:
    asks: Any = {**BY_BUS, "model": "anthropic/both"}
    first = client.responses.create(**asks)
    one, other = requests_in(first)
    with pytest.raises(openai.BadRequestError, match="answers not all"):
        client.responses.create(model="anthropic/both", previous_response_id=first.id, input=[answer(one)])
    said: Any = [{"role": "user", "content": "and?"}, answer(one), answer(other)]
    with pytest.raises(openai.BadRequestError, match="says nothing else"):
        client.responses.create(model="anthropic/both", previous_response_id=first.id, input=said)
    last = client.responses.create(
        model="anthropic/both", previous_response_id=first.id, input=[answer(one), answer(other, approve=False)]
    )
    assert [item.type for item in last.output] == ["mcp_call", "message"]
    go_on = client.responses.create(model="anthropic/both", previous_response_id=last.id, input="and then?")
    assert go_on.output_text


def test_a_run_that_asks_again_has_a_response_for_each_part_and_all_go_at_once(client: Any) -> None:
    asks: Any = {**BY_BUS, "model": "anthropic/twice"}
    parts = [client.responses.create(**asks)]
    while asked := requests_in(parts[-1]):
        parts.append(client.responses.create(model="x/x", input=[answer(asked[0])], background=len(parts) == 1))
        if len(parts) == 2:
            parts[-1] = ended(client, parts[-1].id)
    assert len({part.id for part in parts}) == len(parts) == 3
    assert parts[-1].output_text == "Both sunny."
    client.responses.delete(parts[1].id)
    for part in parts:
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(part.id)


def ended(client: Any, name: str) -> Any:
    events = list(client.responses.retrieve(name, stream=True))
    return events[-1].response  # type: ignore[union-attr]


@pytest.mark.parametrize("approve", [True, False])
def test_what_the_provider_asks_is_asked_here_and_it_gets_the_answer(bus: LocalBus, client: Any, approve: bool) -> None:
    first = client.responses.create(**HOSTED)
    (asked,) = requests_in(first)
    assert (asked.server_label, asked.name, asked.arguments) == ("crm", "del", '{"n":1}')
    last = client.responses.create(
        model="openai-responses/hosted", previous_response_id=first.id, input=[answer(asked, approve=approve)]
    )
    assert last.output_text == "Gone."
    sent = bus.requests[-1]["input"]
    own = {"type": "mcp_approval_response", "approval_request_id": "mcpr_p1", "approve": approve}
    assert [item for item in sent if str(item.get("type")).startswith("mcp")] == [ASKED, own]


def test_a_conversation_keeps_the_requests_and_the_answers_of_a_run_that_waited(client: Any) -> None:
    conversation = client.conversations.create()
    first = client.responses.create(**HOSTED, conversation=conversation.id)
    (asked,) = requests_in(first)
    client.responses.create(model="openai-responses/hosted", conversation=conversation.id, input=[answer(asked)])
    kept = [item.type for item in client.conversations.items.list(conversation.id, order="asc").data]
    assert kept == ["message", "mcp_approval_request", "mcp_approval_response", "message"]
    again = client.responses.create(model="openai-responses/hosted", conversation=conversation.id, input="and?")
    assert again.status == "completed"


@pytest.mark.filterwarnings("ignore:connect\\(\\) must be used as a context manager:DeprecationWarning")
def test_a_socket_asks_and_goes_on(client: Any) -> None:
    with client.responses.connect(extra_headers={"x-tokenbus-tools": "weather"}) as connection:
        connection.response.create(model="anthropic/pays", input="go")
        first = answered(connection)
        (asked,) = requests_in(first)
        connection.response.create(model="anthropic/pays", input=[answer(asked)])
        last = answered(connection)
    assert (last.output_text, last.previous_response_id) == ("Sunny.", first.id)


def answered(connection: Any) -> Any:
    for event in connection:
        if event.type in ("response.completed", "error"):
            return event.response
    raise AssertionError("the socket has ended")
