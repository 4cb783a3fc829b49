"""Requests of Chat Completions: what maps to the bus, and what is refused, by which name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.services.gateway.rules import gateway_request, refused, rules, translated
from tokenbus.core.request.parse import request_from
from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import Generate, TextPart, ToolCallPart, ToolChoice, ToolResultPart
from tokenbus_services.gateway.surfaces.openai_chat import OpenAIChatSurface

SURFACE = OpenAIChatSurface()
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


def body(model: str = "openai/gpt", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": MESSAGES, **more}


def generated(model: str = "openai/gpt", **more: Any) -> Generate:
    generate = translated(SURFACE, gateway_request(body(model, **more))).generate
    try:
        request_from(msgspec.to_builtins(generate))
    except RequestInvalid as e:
        raise AssertionError(f"no deployment would accept it: {e}") from None
    return generate


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("n", 2),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content", "content": "x"}),
        ("web_search_options", {"search_context_size": "low"}),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("moderation", {}),
        ("store", True),
        ("prompt_cache_options", {"x": 1}),
        ("prompt_cache_retention", "24h"),
        ("invented", 1),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(param: str, value: Any) -> None:
    problem = refused(SURFACE, gateway_request(body(**{param: value})))
    assert (problem.status, problem.code, problem.param) == (400, "unsupported_parameter", param)
    dropped = rules(drop_unsupported=frozenset({param}))
    assert translated(SURFACE, gateway_request(body(**{param: value})), dropped).generate == generated()


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("seed", 7),
        ("user", "u1"),
        ("frequency_penalty", 0.5),
        ("presence_penalty", 0.5),
        ("parallel_tool_calls", False),
        ("service_tier", "priority"),
        ("logit_bias", {"1": 2}),
        ("verbosity", "low"),
        ("prompt_cache_key", "k"),
        ("safety_identifier", "s"),
    ],
)
def test_a_feature_of_some_providers_is_sent_to_those_and_refused_for_others(param: str, value: Any) -> None:
    given: dict[str, Any] = {param: value}
    assert generated(**given) != generated()
    lacks = {"user": "gemini/x", "parallel_tool_calls": "gemini/x"}.get(param, "anthropic/x")
    assert refused(SURFACE, gateway_request(body(lacks, **{param: value}))).param == param


@pytest.mark.parametrize("model", ["openai/gpt", "anthropic/x", "gemini/x", "responses/x"])
def test_values_that_clients_send_by_default_change_nothing(model: str) -> None:
    defaults: dict[str, Any] = {
        "n": 1,
        "logprobs": False,
        "store": False,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "temperature": None,
        "tools": None,
        "response_format": {"type": "text"},
    }
    expected = msgspec.structs.replace(generated(model, **defaults), parallel_tool_calls=None)
    assert expected == generated(model)


def test_a_whole_conversation_keeps_its_calls_and_results() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "w", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "refusal": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    generate = generated(messages=messages)
    assert [message.role for message in generate.messages] == ["system", "user", "assistant", "tool"]
    assert generate.messages[1].participant == "ann"
    assert generate.messages[2].content == [
        TextPart(text="I look."),
        ToolCallPart(tool_id="c1", tool_name="w", arguments="{}"),
    ]
    assert generate.messages[3].content == [ToolResultPart(tool_id="c1", content="sunny")]


def test_tools_and_choice_are_the_clients_own_and_run_there() -> None:
    tool = {"type": "function", "function": {"name": "w", "description": "d", "parameters": {"type": "object"}}}
    generate = generated(tools=[tool], tool_choice={"type": "function", "function": {"name": "w"}})
    assert (generate.max_tool_depth, generate.tool_choice) == (0, ToolChoice(name="w"))
    assert generated(tools=[tool], tool_choice="required").tool_choice == "any"
    assert refused(SURFACE, gateway_request(body(tools=[{"type": "custom"}]))).param == "tools[0].type"
    assert refused(SURFACE, gateway_request(body(tools=[tool], tool_choice="allowed"))).param == "tool_choice"
    allowed = rules(tools=frozenset({"clock"}))
    both = body(tools=[tool], tokenbus={"tools": ["clock"]})
    assert refused(SURFACE, gateway_request(both), allowed).param == "tokenbus.tools"
    assert refused(SURFACE, gateway_request(body(tokenbus={"tools": ["bomb"]})), allowed).param == "tokenbus.tools[0]"


def test_limits_formats_and_effort_have_the_names_of_the_bus() -> None:
    generate = generated(
        max_completion_tokens=9, stop="end", reasoning_effort="xhigh", metadata={"a": "b", "tenant": "x"}
    )
    assert (generate.max_tokens, generate.stop, generate.metadata) == (
        9,
        ["end"],
        {"client": {"a": "b", "tenant": "x"}},
    )
    assert generate.thinking
    assert generate.thinking.effort == "xhigh"
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}}
    formatted = generated(response_format=schema).output_schema
    assert formatted
    assert (formatted.name, formatted.strict) == ("n", True)
    assert refused(SURFACE, gateway_request(body(max_tokens=1, max_completion_tokens=2))).param == "max_tokens"
    assert refused(SURFACE, gateway_request(body("anthropic/x", response_format={"type": "json_object"}))).param == (
        "response_format.type"
    )


def test_a_stream_cannot_take_text_back() -> None:
    restart: dict[str, Any] = {"tokenbus": {"on_failure": "restart"}}
    assert refused(SURFACE, gateway_request(body(stream=True, **restart))).param == "tokenbus.on_failure"
    assert generated(**restart).on_failure == "restart"
