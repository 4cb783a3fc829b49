"""The Responses API through the gateway, with OpenAI's own Python client, its responses strictly validated."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
import redis
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from tests.waiting import eventually_sync
from tokenbus.testing import LocalBus
from tokenbus_services.mock_provider import CutOff, Reply, Stall, Status, ToolCall, Turn

TOOL: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
CALL = (ToolCall(name="weather", arguments={"city": "Rome"}),)
SETTINGS = """
[gateway]
tools = ["weather"]
keep_alive_s = 0.2
[tools.weather]
kind = "python"
call = "tokenbus_services.weather:weather"
"""
TEXT = "one two three"
GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "gateway-responses.md"
READY_S = 60.0
MODEL = "anthropic/text"


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus(SETTINGS) as running:
        running.model_says("text", Reply(thinking="let me see", text=TEXT))
        running.model_says("calls", Reply(thinking="hm", tool_calls=CALL))
        running.model_says("by-bus", Reply(text="I look.", tool_calls=CALL), "Sunny.")
        running.model_says("refuses", Turn(says=Reply(), fault=Status(status=400)))
        running.model_says("cut", Turn(says=Reply(text=TEXT), fault=CutOff(after_text="two")))
        running.model_says("slow", Turn(says=Reply(text=TEXT), fault=Stall(after_text="two")))
        running.model_says("long", Reply(text=TEXT, finish="length"))
        yield running


@pytest.fixture(scope="module")
def client(bus: LocalBus) -> Generator[openai.OpenAI]:
    with openai.OpenAI(
        api_key="k", base_url=f"{bus.gateway}/v1", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


@pytest.fixture(scope="module")
def lenient(bus: LocalBus) -> Generator[openai.OpenAI]:
    """As people use it. The strict client knows no reason `cancelled`."""
    with openai.OpenAI(api_key="k", base_url=f"{bus.gateway}/v1", max_retries=0) as made:
        yield made


def ended(client: openai.OpenAI, name: str) -> Any:
    def look() -> Any:
        found = client.responses.retrieve(name)
        return found if found.status not in ("queued", "in_progress") else None

    return eventually_sync(look)


@pytest.mark.parametrize("model", ["anthropic/text", "openai-responses/text"])
def test_a_streamed_text_and_its_thinking_are_read(client: openai.OpenAI, model: str) -> None:
    events = list(client.responses.create(model=model, input="hello", stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == TEXT
    assert "".join(e.delta for e in events if e.type == "response.reasoning_summary_text.delta") == "let me see"
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == TEXT
    assert last.response.usage
    assert last.response.usage.input_tokens == 25
    assert [e.sequence_number for e in events] == list(range(len(events)))


def test_the_streaming_helper_gives_the_final_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model="anthropic/text", input="hello") as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == TEXT
    assert kinds[0] == "response.created"


def test_a_second_step_may_name_items_by_their_ids(client: openai.OpenAI) -> None:
    """As the AI SDK does, for which a response is stored unless it says otherwise."""
    user: Any = {"role": "user", "content": "hello"}
    first = client.responses.create(model="anthropic/text", input=[user])
    named: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    assert len(named) == 2
    second = client.responses.create(model="openai-responses/text", input=[user, *named, user])
    assert second.output_text == TEXT
    listed = client.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in listed] == ["message", "reasoning", "message", "message"]
    unknown: Any = [{"type": "item_reference", "id": "msg_nobody_0"}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="anthropic/text", input=unknown)
    assert (caught.value.code, caught.value.param) == ("item_not_found", "input[0].id")


def test_a_response_that_is_not_stored_cannot_be_read_again(client: openai.OpenAI) -> None:
    made = client.responses.create(model="anthropic/text", input="x", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list(made.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="anthropic/text", input="x", previous_response_id=made.id)
    assert caught.value.code == "previous_response_not_found"


def test_a_whole_answer_names_its_run_in_a_header(client: openai.OpenAI) -> None:
    answer = client.responses.with_raw_response.create(model="anthropic/text", input="hello", instructions="be brief")
    response = answer.parse()
    assert response.output_text == TEXT
    assert response.id == f"resp_{answer.headers['x-tokenbus-run']}"
    assert response.instructions == "be brief"


def test_a_call_of_a_tool_of_the_client_and_its_result_in_the_next_request(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "weather?"}]
    response = client.responses.create(model="anthropic/calls", input=messages, tools=[TOOL])
    [call] = [item for item in response.output if item.type == "function_call"]
    assert (call.name, call.arguments) == ("weather", '{"city":"Rome"}')
    messages += response.output
    messages.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    assert client.responses.create(model="anthropic/text", input=messages, tools=[TOOL]).output_text == TEXT


def test_calls_of_the_deployments_tools_are_sent_only_on_request(client: openai.OpenAI) -> None:
    extension: Any = {"tools": ["weather"]}
    hidden = client.responses.create(model="anthropic/by-bus", input="x", extra_body={"tokenbus": extension})
    assert {item.type for item in hidden.output} == {"message"}
    extension["show_tools"] = True
    shown = client.responses.create(model="anthropic/by-bus", input="x", extra_body={"tokenbus": extension})
    assert [item.type for item in shown.output] == ["message", "function_call", "function_call_output", "message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_refusal_by_the_provider_keeps_its_status(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="anthropic/refuses", input="x", stream=stream)


def test_a_cut_stream_ends_as_failed(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="anthropic/cut", input="x", stream=True))
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error
    assert last.response.error.code == "server_error"
    assert last.response.error.message.startswith("network: ")
    with pytest.raises(openai.APIStatusError):
        client.responses.create(model="anthropic/cut", input="x")


def test_a_limit_of_tokens_ends_as_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model="anthropic/long", input="x")
    assert response.status == "incomplete"
    assert response.incomplete_details
    assert response.incomplete_details.reason == "max_output_tokens"


def test_a_parameter_without_a_counterpart_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="anthropic/text", input="x", max_tool_calls=3)
    assert (caught.value.param, caught.value.code) == ("max_tool_calls", "unsupported_parameter")


def test_a_client_that_leaves_ends_the_call_of_the_provider(client: openai.OpenAI, bus: LocalBus) -> None:
    stream = client.responses.create(model="anthropic/slow", input="x", stream=True)
    next(iter(stream))
    stream.close()
    eventually_sync(lambda: bus.exchanges[-1].state == "disconnected")


def test_a_background_response_is_queued_and_looked_up(client: openai.OpenAI) -> None:
    queued = client.responses.create(model="anthropic/text", input="x", background=True, store=True)
    assert queued.status == "queued"
    assert ended(client, queued.id).output_text == TEXT


def test_a_background_response_continues_without_its_client_until_it_is_cancelled(
    client: openai.OpenAI, lenient: openai.OpenAI, bus: LocalBus
) -> None:
    stream = client.responses.create(model="anthropic/slow", input="x", background=True, stream=True)
    created = next(iter(stream))
    assert created.type == "response.created"
    stream.close()
    name = created.response.id
    eventually_sync(lambda: "two" in client.responses.retrieve(name).output_text)
    assert client.responses.retrieve(name).status == "in_progress"
    assert bus.exchanges[-1].state != "disconnected"
    cancelled = lenient.responses.cancel(name)
    assert cancelled.status == "cancelled"
    assert lenient.responses.cancel(name).status == "cancelled"
    eventually_sync(lambda: bus.exchanges[-1].state == "disconnected")


def test_a_stream_is_resumed_after_any_number(client: openai.OpenAI) -> None:
    whole = list(client.responses.create(model="anthropic/text", input="x", stream=True))
    name = whole[-1].response.id  # type: ignore[union-attr]  # the last event has the response
    for after in (0, 3, len(whole) - 2):
        rest = list(client.responses.retrieve(name, stream=True, starting_after=after))
        assert rest == whole[after + 1 :]
    assert list(client.responses.retrieve(name, stream=True)) == whole
    with client.responses.stream(response_id=name, starting_after=3) as stream:
        numbers = [event.sequence_number for event in stream]
        assert numbers[0] == 4
        assert stream.get_final_response().output_text == TEXT


def test_another_gateway_process_continues_a_stream_to_the_byte(bus: LocalBus, tmp_path: Path) -> None:
    body = {"model": "anthropic/text", "input": "x", "stream": True, "background": True}
    whole = httpx.post(f"{bus.gateway}/v1/responses", json=body)
    name = f"resp_{whole.headers['x-tokenbus-run']}"
    pieces = whole.text.split("\n\n")
    with second_gateway(bus, tmp_path) as url:
        for after in (2, 5):
            rest = httpx.get(f"{url}/v1/responses/{name}", params={"stream": "true", "starting_after": after})
            assert rest.text == "\n\n".join(pieces[after + 1 :])


class second_gateway:  # noqa: N801 (used like a function)
    """Another gateway on the same bus, in a process of its own; yields its URL."""

    def __init__(self, bus: LocalBus, directory: Path) -> None:
        config = directory / "tokenbus.toml"
        config.write_text(f'redis_url = "{bus.url}"\n[gateway]\n')
        command = [sys.executable, "-m", "tokenbus_services.cli", "worker", "gateway", "--port", "0"]
        env = {**os.environ, "TOKENBUS_CONFIG": str(config)}
        self._process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, cwd=directory)

    def __enter__(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line.startswith("ready gateway "), line
        return line.split()[2]

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate(timeout=READY_S)


def test_a_deleted_response_is_not_found(client: openai.OpenAI, bus: LocalBus) -> None:
    queued = client.responses.create(model="anthropic/slow", input="x", background=True)
    eventually_sync(lambda: "two" in client.responses.retrieve(queued.id).output_text)
    client.responses.delete(queued.id)
    eventually_sync(lambda: bus.exchanges[-1].state == "disconnected")
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.retrieve(queued.id)
    assert caught.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel(queued.id)


def test_a_response_that_never_was_is_not_found(client: openai.OpenAI) -> None:
    for look in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            look("resp_nobody")
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_nobody")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_nobody", stream=True)


def test_the_input_is_listed(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    response = client.responses.create(model="anthropic/text", input=messages)
    items = list(client.responses.input_items.list(response.id, order="asc", limit=2))
    assert [item.content[0].text for item in items] == ["one", "two", "three"]  # type: ignore[union-attr]  # messages
    newest = client.responses.input_items.list(response.id, limit=1)
    assert newest.has_more
    assert newest.data[0].content[0].text == "three"  # type: ignore[union-attr]  # a message


def test_a_previous_response_is_the_conversation_so_far(client: openai.OpenAI, bus: LocalBus) -> None:
    first = client.responses.create(model="anthropic/text", input="hello")
    second = client.responses.create(model="anthropic/text", input="and now?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    sent = bus.requests[-1]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "user"]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="anthropic/text", input="x", previous_response_id="resp_nobody")
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_the_stream_of_a_background_response_that_waits_for_intake_begins_with_its_run(
    client: openai.OpenAI, bus: LocalBus
) -> None:
    run = "waits-for-intake"
    note = {"surface": "openai_responses", "version": 1, "created": 1, "model": "anthropic/text"}
    noted = msgspec.json.encode({"note": note, "tenant": ""})
    with redis.Redis.from_url(bus.url) as server:  # as a gateway notes it after its wait timed out
        server.set(f"tokenbus:{{gateway}}:published:{run}", noted, ex=60)
    with client.responses.retrieve(f"resp_{run}", stream=True) as stream, bus.sync_client() as direct:
        direct.publish(bus.request("text", id=run, metadata={"gateway": note}))
        assert [event.type for event in stream][-1] == "response.completed"


def test_a_run_of_another_service_is_a_response_too(client: openai.OpenAI, bus: LocalBus) -> None:
    with bus.sync_client() as direct:
        run = direct.publish(bus.request("text"))
        direct.result(run)
    assert client.responses.retrieve(run.id).output_text == TEXT
    assert client.responses.retrieve(f"resp_{run.id}").model.endswith("/text")


def test_the_programs_of_the_guide_run(bus: LocalBus, tmp_path: Path) -> None:
    programs = re.findall(r"```python\n(# (?:ask|resume)\.py\n.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(programs) == 2
    for program in programs:
        code = program.replace("http://127.0.0.1:8088", bus.gateway).replace("mock-anthropic/claude-sonnet-4-6", MODEL)
        script = tmp_path / "program.py"
        script.write_text(code)
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == TEXT


def test_another_version_of_the_encoder_does_not_continue_its_numbers(client: openai.OpenAI, bus: LocalBus) -> None:
    note = {"surface": "openai_responses", "version": 0, "created": 1, "model": "m"}
    with bus.sync_client() as direct:
        run = direct.publish(bus.request("text", metadata={"gateway": note}))
        direct.result(run)
    with pytest.raises(openai.ConflictError):
        client.responses.retrieve(run.id, stream=True, starting_after=3)
    assert len(list(client.responses.retrieve(run.id, stream=True))) > 3


# --- over a WebSocket -----------------------------------------------------------------------------------------

by_openai = pytest.mark.filterwarnings("ignore:connect\\(\\) must be used as a context manager:DeprecationWarning")
"""OpenAI's client uses the package `websockets` in its old way."""


@by_openai
def test_several_responses_go_over_one_socket(client: openai.OpenAI) -> None:
    with client.responses.connect() as connection:
        previous: Any = None
        for text in ("hello", "and now?"):
            connection.response.create(model="anthropic/text", input=text, previous_response_id=previous)
            received = ""
            for event in connection:
                received += event.delta if event.type == "response.output_text.delta" else ""
                if event.type == "response.completed":
                    previous = event.response.id
                    break
            assert received == TEXT


@by_openai
def test_a_refusal_over_a_socket_is_an_error_frame_and_the_socket_stays(client: openai.OpenAI) -> None:
    with client.responses.connect() as connection:
        connection.response.create(model="anthropic/text", input="x", previous_response_id="resp_nobody")
        error = connection.recv()
        assert error.type == "error"
        assert (error.status, error.error.code) == (400, "previous_response_not_found")  # type: ignore[union-attr]
        connection.response.create(model="anthropic/text", input="x")
        assert connection.recv().type == "response.created"


@by_openai
def test_a_steer_ends_the_open_response_and_the_next_one_continues_it(client: openai.OpenAI, bus: LocalBus) -> None:
    bus.model_says("steered", Turn(says=Reply(text="one two three"), fault=Stall(after_text="two")), "left")
    seen: list[Any] = []

    def until(connection: Any, kind: str) -> Any:
        while True:
            seen.append(event := connection.recv())
            if event.type == kind:
                return event

    with client.responses.connect() as connection:
        connection.response.create(model="anthropic/steered", input="hello", instructions="Be brief.")
        first = until(connection, "response.created").response.id
        while "two" not in "".join(event.delta for event in seen if event.type == "response.output_text.delta"):
            until(connection, "response.output_text.delta")
        connection.response.steer(input="only the last year", previous_response_id=first)
        accepted = until(connection, "response.steer.accepted")
        ended = until(connection, "response.incomplete").response
        assert (accepted.steer.previous_response_id, ended.incomplete_details.reason) == (first, "steered")
        connection.response.steer(input="too late", previous_response_id=first)
        done = until(connection, "response.completed").response
        assert (done.output_text, done.previous_response_id, done.instructions) == ("left", first, "Be brief.")
        texts = [(each["role"], each["content"][0]["text"]) for each in bus.requests[-1]["messages"]]
        assert texts == [("user", "hello"), ("assistant", "one two"), ("user", "only the last year")]
        seen += [] if "response.steer.failed" in [event.type for event in seen] else [connection.recv()]
        (failed,) = (event for event in seen if event.type == "response.steer.failed")
        assert (failed.error.code, failed.steer.input) == ("response_already_completed", "too late")
        for parent, given, code in (
            ("resp_nobody", "x", "response_not_found"),
            (first, [{"type": "x"}], "invalid_input"),
        ):
            connection.send({"type": "response.steer", "previous_response_id": parent, "input": given})  # type: ignore[arg-type]
            assert until(connection, "response.steer.failed").error.code == code
    assert client.responses.retrieve(first).status == "incomplete"


@by_openai
def test_closing_the_socket_cancels(client: openai.OpenAI, bus: LocalBus) -> None:
    with client.responses.connect() as connection:
        connection.response.create(model="anthropic/slow", input="x")
        for event in connection:
            if event.type == "response.output_text.delta":
                break
    eventually_sync(lambda: bus.exchanges[-1].state == "disconnected")


def test_a_page_of_another_origin_may_not_connect(bus: LocalBus) -> None:
    address = bus.gateway.replace("http", "ws", 1) + "/v1/responses"
    with pytest.raises(InvalidStatus) as caught, connect(address, origin=Origin("https://evil.example")):
        pass
    assert caught.value.response.status_code == 403
