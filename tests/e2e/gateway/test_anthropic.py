"""The Messages API through the gateway, with Anthropic's own Python client, its responses strictly validated."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from tests.waiting import eventually_sync
from tokenbus.testing import LocalBus
from tokenbus_services.mock_provider import CutOff, Reply, Stall, Status, ToolCall, Turn

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "gateway-anthropic.md"
HELLO: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {"name": "weather", "description": "Now.", "input_schema": {"type": "object"}}
CALL = (ToolCall(name="weather", arguments={"city": "Rome"}),)
SIGNATURE = "c2lnbmVk"
SETTINGS = """
[gateway]
tools = ["weather"]
models = ["anthropic/text"]
[gateway.aliases]
house = ["gemini/text", "anthropic/text"]
[tools.weather]
kind = "python"
call = "tokenbus_services.weather:weather"
"""


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus(SETTINGS) as running:
        running.model_says("text", Reply(thinking="let me see", signature=SIGNATURE, text="one two\u2028three"))
        running.model_says("calls", Reply(thinking="hm", signature=SIGNATURE, tool_calls=CALL), "Sunny.")
        running.model_says("gemini-3-flash-preview", Reply(tool_calls=CALL), "Sunny.")
        running.model_says("refuses", Turn(says=Reply(), fault=Status(status=400)))
        running.model_says("cut", Turn(says=Reply(text="one two three"), fault=CutOff(after_text="two")))
        running.model_says("slow", Turn(says=Reply(text="one two three"), fault=Stall(after_text="two")))
        yield running


@pytest.fixture(params=["", "/anthropic", "/v1"], ids=["bare", "prefix", "with /v1"])
def base(request: pytest.FixtureRequest, bus: LocalBus) -> str:
    return f"{bus.gateway}{request.param}"


@pytest.fixture(scope="module")
def client(bus: LocalBus) -> Generator[anthropic.Anthropic]:
    with _client(f"{bus.gateway}/anthropic") as made:
        yield made


def _client(base: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(api_key="k", base_url=base, max_retries=0, _strict_response_validation=True)


def request_fields(model: str, **more: Any) -> dict[str, Any]:
    return {"model": f"anthropic/{model}", "max_tokens": 100, "messages": HELLO, **more}


def read(client: anthropic.Anthropic, **request: Any) -> anthropic.types.Message:
    with client.messages.stream(**request) as stream:
        return stream.get_final_message()


def test_text_and_thinking_are_read_under_each_base_url(base: str) -> None:
    with _client(base) as client:
        streamed, whole = read(client, **request_fields("text")), client.messages.create(**request_fields("text"))
    for message in (streamed, whole):
        thought, spoken = message.content
        assert thought.type == "thinking"
        assert (thought.thinking, thought.signature) == ("let me see", SIGNATURE)
        assert spoken.type == "text"
        assert spoken.text == "one two\u2028three"
        assert (message.stop_reason, message.model, message.usage.input_tokens) == ("end_turn", "anthropic/text", 25)


def test_raw_events_name_the_run(client: anthropic.Anthropic, bus: LocalBus) -> None:
    answer = client.messages.with_raw_response.create(**request_fields("text"), stream=True)
    run = answer.headers["x-tokenbus-run"]
    first, *_, last = list(answer.parse())
    assert first.type == "message_start"
    assert (first.message.id, last.type) == (f"msg_{run}", "message_stop")
    with bus.sync_client() as direct:
        assert direct.result(run).text == "one two\u2028three"


def test_a_tool_of_the_client_is_called_and_its_result_goes_back(client: anthropic.Anthropic, bus: LocalBus) -> None:
    request = request_fields("calls", tools=[TOOL], thinking={"type": "adaptive"}, stream=False)
    called = read(client, **{name: value for name, value in request.items() if name != "stream"})
    assert called.stop_reason == "tool_use"
    (call,) = [block for block in called.content if block.type == "tool_use"]
    assert (call.name, call.input) == ("weather", {"city": "Rome"})
    assert client.messages.create(**request).content[-1].type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sun"}
    request["messages"] = [
        *HELLO,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(**request)
    assert [block.text for block in answer.content if block.type == "text"] == ["Sunny."]
    _, assistant, results = bus.requests[-1]["messages"]
    assert assistant["content"][0] == {"type": "thinking", "thinking": "hm", "signature": SIGNATURE}
    assert results["content"][0]["tool_use_id"] == call.id


def test_thinking_of_another_provider_comes_back_to_it_as_it_was(client: anthropic.Anthropic, bus: LocalBus) -> None:
    request = {
        **request_fields("calls", tools=[TOOL], thinking={"type": "adaptive"}),
        "model": "openai-responses/calls",
    }
    called = read(client, **request)
    (call,) = [block for block in called.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sun"}
    request["messages"] = [
        *HELLO,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(**request).stop_reason == "end_turn"
    (reasoning,) = [item for item in bus.requests[-1]["input"] if item.get("type") == "reasoning"]
    assert reasoning["encrypted_content"] == SIGNATURE


def test_a_tool_of_the_deployment_runs_on_the_bus_within_one_message(client: anthropic.Anthropic) -> None:
    for message in (
        read(client, **request_fields("calls", extra_body={"tokenbus": {"tools": ["weather"]}})),
        client.messages.create(**request_fields("calls", extra_headers={"x-tokenbus-tools": "weather"})),
    ):
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.stop_reason == "end_turn"


@pytest.mark.parametrize("stream", [True, False])
def test_an_error_before_the_first_byte_has_its_status_and_form(client: anthropic.Anthropic, stream: bool) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**request_fields("refuses"), stream=stream)
    body: Any = caught.value.body
    assert body["error"]["type"] == "invalid_request_error"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert caught.value.request_id


def test_a_cut_is_an_error_for_every_reader(client: anthropic.Anthropic) -> None:
    received = ""
    with pytest.raises(anthropic.APIStatusError) as caught:  # noqa: PT012 (what came before the error counts)
        for event in client.messages.create(**request_fields("cut"), stream=True):
            if event.type == "content_block_delta" and event.delta.type == "text_delta":
                received += event.delta.text
    assert received.startswith("one")
    body: Any = caught.value.body
    assert body["error"]["type"] == "api_error"
    with pytest.raises(anthropic.APIStatusError):
        read(client, **request_fields("cut"))
    with pytest.raises(anthropic.APIStatusError):
        client.messages.create(**request_fields("cut"))


def test_a_client_that_leaves_ends_the_call_of_the_provider(client: anthropic.Anthropic, bus: LocalBus) -> None:
    stream = client.messages.create(**request_fields("slow"), stream=True)
    for event in stream:
        if event.type == "content_block_delta":
            break
    stream.close()
    eventually_sync(lambda: bus.exchanges[-1].state == "disconnected")


def test_a_parameter_without_a_counterpart_is_refused_by_name(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**request_fields("text"), extra_body={"thread": {"type": "new"}})
    body: Any = caught.value.body
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request"}
    assert body["request_id"] == caught.value.response.headers["request-id"]


def test_another_path_is_refused_in_the_form_of_the_api(base: str) -> None:
    with _client(base) as client, pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.batches.list()
    body: Any = caught.value.body
    assert body["error"]["type"] == "not_found_error"


def test_models_are_listed_in_the_form_of_the_api(client: anthropic.Anthropic, bus: LocalBus) -> None:
    assert [model.id for model in client.models.list()] == ["house", "anthropic/text"]
    assert client.models.retrieve("anthropic/text").display_name == "anthropic/text"
    with _client(bus.gateway) as bare:
        assert [model.id for model in bare.models.list()] == ["house", "anthropic/text"]


@pytest.mark.parametrize("auth", [{"x-api-key": "k"}, {"authorization": "Bearer k"}], ids=["x-api-key", "bearer"])
def test_an_old_client_and_claude_code_are_answered(bus: LocalBus, auth: dict[str, str]) -> None:
    headers = {
        **auth,
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "user-agent": "claude-cli/2.1.330 (external, cli)",
    }
    cached = {"type": "ephemeral"}
    body = request_fields(
        "text",
        stream=True,
        system=[
            {"type": "text", "text": "You are Claude Code."},
            {"type": "text", "text": "Rules", "cache_control": cached},
        ],
        messages=[{"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": cached}]}],
        tools=[{**TOOL, "eager_input_streaming": True}],
        metadata={"user_id": "user_1"},
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        temperature=1,
    )
    with httpx.Client(base_url=bus.gateway, headers=headers) as http:
        answer = http.post("/v1/messages?beta=true", json=body)
        counted = http.post("/v1/messages/count_tokens?beta=true", json={"model": "anthropic/text", "messages": HELLO})
    assert answer.status_code == 200
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    lines = list(answer.iter_lines())
    assert lines[0] == "event: message_start"
    assert lines[-3] == "event: message_stop"
    assert counted.json() == {"input_tokens": int(counted.json()["input_tokens"]), "estimated": True}
    sent = bus.requests[-1]
    assert sent["metadata"] == {"user_id": "user_1"}
    assert sent["system"][1]["cache_control"] == cached
    assert sent["output_config"] == {"effort": "high"}


def test_the_page_for_users_of_this_client_holds(bus: LocalBus) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    program = code.replace("http://127.0.0.1:8088", bus.gateway).replace("mock-", "")
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout.endswith("Sunny.\n"), run.stderr


def test_an_alias_is_answered_under_its_own_name(client: anthropic.Anthropic) -> None:
    assert read(client, **{**request_fields(""), "model": "house"}).model == "house"
