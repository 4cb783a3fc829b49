"""Chat Completions through the gateway, with OpenAI's own Python client, its responses strictly validated."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.waiting import eventually_sync
from tokenbus.testing import LocalBus
from tokenbus_services.mock_provider import CutOff, Reply, Stall, Status, ToolCall, Turn

USER: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = (ToolCall(name="weather", arguments={"city": "Rome"}),)
WEATHER = """
[gateway]
tools = ["weather"]
keep_alive_s = 0.2
[gateway.aliases]
house = ["anthropic/text", "gemini/text"]
[tools.weather]
kind = "python"
call = "tokenbus_services.weather:weather"
"""


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus(WEATHER) as running:
        running.model_says("text", Reply(thinking="let me see", text="one two three"))
        running.model_says("calls", Reply(thinking="hm", tool_calls=CALL))
        running.model_says(
            "by-bus",
            Reply(text="I look.", tool_calls=CALL),
            "Sunny.",
        )
        running.model_says("refuses", Turn(says=Reply(), fault=Status(status=400)))
        running.model_says("cut", Turn(says=Reply(text="one two three"), fault=CutOff(after_text="two")))
        running.model_says("slow", Turn(says=Reply(text="one two three"), fault=Stall(after_text="two")))
        yield running


@pytest.fixture(scope="module")
def client(bus: LocalBus) -> Generator[openai.OpenAI]:
    with openai.OpenAI(
        api_key="k", base_url=f"{bus.gateway}/v1", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


def chunks(client: openai.OpenAI, model: str, **more: Any) -> list[Any]:
    return list(client.chat.completions.create(model=model, messages=USER, stream=True, **more))


@pytest.mark.parametrize("model", ["anthropic/text", "house"])
def test_a_streamed_text_and_its_thinking_are_read(client: openai.OpenAI, model: str) -> None:
    got = chunks(client, model, stream_options={"include_usage": True})
    deltas = [chunk.choices[0].delta for chunk in got if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "one two three"
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "let me see"
    assert deltas[0].role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in got if chunk.choices][-1] == "stop"
    assert got[-1].usage.prompt_tokens == 25
    assert {chunk.model for chunk in got} == {model}
    assert len({(chunk.id, chunk.created) for chunk in got}) == 1


def test_a_whole_answer_names_its_run_in_a_header(client: openai.OpenAI, bus: LocalBus) -> None:
    answer = client.chat.completions.with_raw_response.create(model="anthropic/text", messages=USER)
    completion = answer.parse()
    assert completion.choices[0].message.content == "one two three"
    assert completion.id == f"chatcmpl-{answer.headers['x-tokenbus-run']}"
    assert answer.headers["x-request-id"]
    with bus.sync_client() as direct:
        assert direct.result(answer.headers["x-tokenbus-run"]).text == "one two three"


def test_thinking_is_left_out_if_the_client_says_so(client: openai.OpenAI) -> None:
    got = chunks(client, "anthropic/text", extra_body={"tokenbus": {"reasoning": False}})
    assert not any("reasoning_content" in (chunk.choices[0].delta.model_extra or {}) for chunk in got)


def test_a_call_of_a_clients_tool_is_sent_once_and_whole(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="anthropic/calls", messages=USER, tools=[TOOL]) as stream:
        for _ in stream:
            pass
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
        ("weather", '{"city":"Rome"}')
    ]


def test_calls_of_the_deployments_tools_run_on_the_bus_and_are_not_sent(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model="anthropic/by-bus", messages=USER, extra_body={"tokenbus": {"tools": ["weather"]}}
    )
    assert completion.choices[0].message.content == "I look.\n\nSunny."
    assert completion.choices[0].message.tool_calls is None
    got = chunks(client, "anthropic/by-bus", extra_headers={"x-tokenbus-tools": "weather"})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in got) == "I look.\n\nSunny."


@pytest.mark.parametrize("stream", [True, False])
def test_a_refusal_by_the_provider_keeps_its_status(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="anthropic/refuses", messages=USER, stream=stream)
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_a_cut_stream_is_an_error_and_never_a_silent_end(client: openai.OpenAI) -> None:
    received = ""
    with pytest.raises(openai.APIError) as caught:  # noqa: PT012 (what came before the error counts)
        for chunk in client.chat.completions.create(model="anthropic/cut", messages=USER, stream=True):
            received += chunk.choices[0].delta.content or ""
    assert received == "one two"[: len(received)]
    assert received
    assert caught.value.code
    with pytest.raises(openai.APIStatusError):
        client.chat.completions.create(model="anthropic/cut", messages=USER)


def test_a_client_that_leaves_ends_the_call_of_the_provider(client: openai.OpenAI, bus: LocalBus) -> None:
    stream = client.chat.completions.create(model="anthropic/slow", messages=USER, stream=True)
    next(iter(stream))
    stream.close()
    eventually_sync(lambda: bus.exchanges[-1].state == "disconnected")


def test_a_parameter_without_a_counterpart_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="anthropic/text", messages=USER, n=2)
    assert (caught.value.param, caught.value.code) == ("n", "unsupported_parameter")
    assert caught.value.request_id


def test_a_model_of_no_provider_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nobody", messages=USER)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_the_program_of_the_guide_runs_unchanged(bus: LocalBus) -> None:
    page = (Path(__file__).parents[3] / "docs" / "guides" / "gateway.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    served = code.replace("http://127.0.0.1:8088", bus.gateway).replace("mock-anthropic/claude-haiku-4-5", "house")
    completed = subprocess.run([sys.executable, "-c", served], capture_output=True, text=True, timeout=120, check=False)
    assert completed.stdout == "one two three", completed.stderr
