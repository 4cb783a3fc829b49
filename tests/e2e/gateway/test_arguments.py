"""Arguments of a client's tools as its own SDK gets them: while the model writes them, and no call that is cut."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import openai
import pytest

from tests.waiting import eventually_sync
from tokenbus.testing import CutOff, ErrorEvent, LocalBus, Reply, Stall, ToolCall, Turn

ARGUMENTS: dict[str, object] = {"text": "once upon a time"}
JSON = '{"text":"once upon a time"}'
SAID = Reply(thinking="Hm.", tool_calls=(ToolCall(name="write", arguments=ARGUMENTS),))
SCHEMA: Any = {"type": "object", "properties": {"text": {"type": "string"}}}
FUNCTION: Any = {"name": "write", "parameters": SCHEMA}
USER: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus("[gateway]\n") as running:
        running.model_says("stalls", Turn(says=SAID, fault=Stall(after_text="upon")))
        running.model_says("cut", Turn(says=SAID, fault=CutOff(after_text="upon")))
        running.model_says("voided", Turn(says=SAID, first=(ErrorEvent(after_text="upon"),)))
        running.model_says("late", Turn(says=SAID, first=(ErrorEvent(after_text="Hm"),)))
        yield running


@contextmanager
def chat(bus: LocalBus, model: str, **headers: str) -> Generator[Iterator[str]]:
    with openai.OpenAI(api_key="k", base_url=f"{bus.gateway}/v1", max_retries=0, default_headers=headers) as client:
        tools: Any = [{"type": "function", "function": FUNCTION}]
        with client.chat.completions.stream(model=model, messages=USER, tools=tools) as stream:

            def pieces() -> Iterator[str]:
                for event in stream:
                    if event.type == "tool_calls.function.arguments.delta":
                        yield event.arguments_delta
                calls = stream.get_final_completion().choices[0].message.tool_calls or []
                assert [call.function.arguments for call in calls] == [JSON]

            yield pieces()


@contextmanager
def responses(bus: LocalBus, model: str, **headers: str) -> Generator[Iterator[str]]:
    with openai.OpenAI(api_key="k", base_url=f"{bus.gateway}/v1", max_retries=0, default_headers=headers) as client:
        tools: Any = [{"type": "function", **FUNCTION}]
        with client.responses.stream(model=model, input="hello", tools=tools) as stream:

            def pieces() -> Iterator[str]:
                for event in stream:
                    if event.type == "response.function_call_arguments.delta":
                        yield event.delta
                    if event.type == "response.output_item.done" and event.item.type == "function_call":
                        assert event.item.arguments == JSON, "clients run a call once its item is done"
                    if event.type == "response.failed":
                        assert "function_call" not in [item.type for item in event.response.output]
                        raise openai.OpenAIError("the response failed")
                assert stream.get_final_response().output[-1].type == "function_call"

            yield pieces()


@contextmanager
def messages(bus: LocalBus, model: str, **headers: str) -> Generator[Iterator[str]]:
    with anthropic.Anthropic(api_key="k", base_url=bus.gateway, max_retries=0, default_headers=headers) as client:
        tools: Any = [{"name": "write", "input_schema": SCHEMA}]
        with client.messages.stream(model=model, messages=USER, tools=tools, max_tokens=99) as stream:

            def pieces() -> Iterator[str]:
                for event in stream:
                    if event.type == "input_json":
                        yield event.partial_json
                    if event.type == "content_block_stop" and event.content_block.type == "tool_use":
                        assert event.content_block.input == ARGUMENTS
                assert stream.get_final_message().stop_reason == "tool_use"

            yield pieces()


CLIENTS = pytest.mark.parametrize("client", [chat, responses, messages])
PROVIDERS = pytest.mark.parametrize("provider", ["anthropic", "openai-chat", "openai-responses"])


@PROVIDERS
@CLIENTS
def test_arguments_are_read_while_the_model_writes_them(bus: LocalBus, client: Any, provider: str) -> None:
    before, got = len(bus.exchanges), ""
    with client(bus, f"{provider}/stalls") as pieces:
        while "once" not in got:
            got += next(pieces)
        (asked,) = bus.exchanges[before:]
        eventually_sync(lambda: asked.state == "stalled")
        bus.resume(asked)
        assert got + "".join(pieces) == JSON


@CLIENTS
def test_a_call_that_is_cut_is_an_error_and_no_call(bus: LocalBus, client: Any) -> None:
    got = ""
    with client(bus, "anthropic/cut") as pieces:
        try:
            for piece in pieces:
                got += piece
        except (openai.OpenAIError, anthropic.APIStatusError):
            pass
        else:
            pytest.fail("a cut is an error")
    assert got
    assert JSON.startswith(got)
    assert got != JSON


@CLIENTS
def test_an_attempt_that_fails_before_the_first_argument_is_retried(bus: LocalBus, client: Any) -> None:
    with client(bus, "anthropic/late") as pieces:
        assert "".join(pieces) == JSON


@CLIENTS
def test_a_request_may_have_its_calls_whole_and_retried(bus: LocalBus, client: Any) -> None:
    with client(bus, "anthropic/voided", **{"x-tokenbus-on-failure": "before_first_visible"}) as pieces:
        assert "".join(pieces) == JSON
