"""Requests of Chat Completions: what maps to the bus, and what is refused, by which name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.services.gateway.rules import gateway_request, refused, rules, translated
from tokenbus.core.request.parse import request_from
from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import ExtraPart, Generate, TextPart, ToolCallPart, ToolChoice, ToolResultPart
from tokenbus_services.gateway.surfaces.openai_chat import OpenAIChatSurface
from tokenbus_services.gateway.surfaces.surface import ONLY_JSON

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
        ("logit_bias", {"1": 2}),
        ("top_logprobs", 3),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content", "content": "x"}),
        ("web_search_options", {"search_context_size": "low"}),
        ("web_search_options", {}),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("moderation", {}),
        ("invented", 1),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(param: str, value: Any) -> None:
    problem = refused(SURFACE, gateway_request(body("gemini/x", **{param: value})))
    assert (problem.status, problem.code, problem.param) == (400, "unsupported_parameter", param)
    dropped = rules(drop_unsupported=frozenset({param}))
    found = translated(SURFACE, gateway_request(body("gemini/x", **{param: value})), dropped)
    assert (found.generate, found.left_out) == (generated("gemini/x"), [param])


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("seed", 7),
        ("user", "u1"),
        ("frequency_penalty", 0.5),
        ("presence_penalty", 0.5),
        ("service_tier", "priority"),
        ("store", True),
        ("prompt_cache_options", {"x": 1}),
        ("prompt_cache_retention", "24h"),
        ("verbosity", "low"),
        ("prompt_cache_key", "k"),
        ("safety_identifier", "s"),
    ],
)
def test_a_hint_is_sent_to_providers_that_have_it_and_left_out_for_others(param: str, value: Any) -> None:
    given: dict[str, Any] = {param: value}
    assert generated(**given) != generated()
    lacks = "gemini/x" if param == "user" else "anthropic/x"
    found = translated(SURFACE, gateway_request(body(lacks, **given)))
    assert (found.generate, found.left_out) == (generated(lacks), [param])


def test_one_call_at_a_time_is_no_hint() -> None:
    assert generated(parallel_tool_calls=False).parallel_tool_calls is False
    assert refused(SURFACE, gateway_request(body("gemini/x", parallel_tool_calls=False))).param == "parallel_tool_calls"


def test_a_provider_of_this_api_gets_what_the_gateway_does_not_know() -> None:
    custom = {"type": "invented", "invented": {"name": "c"}}
    image = {"type": "image_url", "image_url": {"url": "https://a.example/b", "detail": "high"}}
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": [image]}],
        "tools": [custom],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        "logprobs": True,
        "logit_bias": {"1": 2},
        "web_search_options": {},
        "invented": [1],
    }
    generate = generated(**asked)
    assert generate.extra == {name: asked[name] for name in asked if name != "messages"}
    (part,) = generate.messages[0].content
    assert isinstance(part, ExtraPart)
    assert (part.name, msgspec.json.decode(part.json)) == ("openai-chat.image_url", image)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("best_of", 20),
        ("models", ["other"]),
        ("functions", [{"name": "f"}]),
        ("preset", "dear"),
        ("fallbacks", ["other"]),
        ("api_base", "http://127.0.0.1"),
        ("max_output_tokens", 9_999),
        ("max_new_tokens", 9_999),
    ],
)
def test_what_selects_the_model_or_the_form_and_length_of_the_answer_is_never_passed(name: str, value: object) -> None:
    assert refused(SURFACE, gateway_request({**body(), name: value})).param == name


def test_an_alias_takes_an_option_only_if_all_of_its_providers_have_it() -> None:
    found = translated(SURFACE, gateway_request(body("fast", seed=7)))
    assert (found.generate.seed, found.left_out) == (None, ["seed"])


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
    expected = msgspec.structs.replace(generated(model, **defaults), parallel_tool_calls=None, extra=None)
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
    assert refused(SURFACE, gateway_request(body("gemini/x", tools=[{"type": "custom"}]))).param == "tools[0].type"
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
    assert generated(response_format={"type": "json_object"}).json_object
    assert generated("anthropic/x", response_format={"type": "json_object"}).system == ONLY_JSON


def test_a_stream_cannot_take_text_back() -> None:
    restart: dict[str, Any] = {"tokenbus": {"on_failure": "restart"}}
    assert refused(SURFACE, gateway_request(body(stream=True, **restart))).param == "tokenbus.on_failure"
    assert generated(**restart).on_failure == "restart"


CONTROL: dict[str, object] = {"cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize("model", ["anthropic/x", "gemini/x", "openai/gpt"])
def test_clients_of_routers_mark_what_is_cached(model: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    hour: dict[str, object] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    conversation: list[Any] = [
        {"role": "system", "content": "Be kind.", **CONTROL},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there", **CONTROL}]},
        {"role": "assistant", "content": None, "tool_calls": [{**call, **CONTROL}]},
        {"role": "tool", "tool_call_id": "c1", "content": "done", **hour},
        {"role": "assistant", "content": None, "tool_calls": [{**call, "id": "c2"}], **hour},
        {"role": "tool", "tool_call_id": "c2", "content": "done"},
    ]
    system, user, assistant, tool, again, _ = generated(model, messages=conversation).messages
    assert system.content == [TextPart(text="Be kind.", cache=True)]
    marked = TextPart(text="there", cache=True)
    assert isinstance(user.content[-1], ExtraPart) if model == "openai/gpt" else user.content[-1] == marked
    called = ToolCallPart(tool_id="c1", tool_name="f", arguments="{}", extra={"anthropic": CONTROL})
    assert assistant.content == [called]
    assert again.content == [msgspec.structs.replace(called, tool_id="c2", extra={"anthropic": hour})]
    assert tool.content == [ToolResultPart(tool_id="c1", content="done", cache="1h")]
