"""Optional request fields: each API is sent them under its own name, or refuses them by theirs. None is ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import msgspec
import pytest

from tests.unit.providers.test_sdk_types import sdk_accepts
from tokenbus.core.request.validate import check_request
from tokenbus.errors import RequestInvalid
from tokenbus.events.quirks import BUILT_IN, ApiName, Quirks
from tokenbus.events.requests import Effort, Generate, Message, Mode, OutputSchema, Thinking, Tool, ToolChoice
from tokenbus.providers import Format, ProviderBase, registry
from tokenbus.providers.request.options import RequestOption

SCHEMA: dict[str, object] = {"type": "object", "properties": {}}
FIELDS: dict[RequestOption, dict[str, Any]] = {
    "json_object": {"json_object": True},
    "parallel_tool_calls": {"parallel_tool_calls": False, "tools": [Tool(name="now")]},
    "seed": {"seed": 7},
    "top_k": {"top_k": 40},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "presence_penalty": {"presence_penalty": -0.5},
    "user_id": {"user_id": "u-1"},
    "strict_tools": {"tools": [Tool(name="now"), Tool(name="weather", parameters=SCHEMA, strict=True)]},
}
PLACES: dict[RequestOption, str] = {"strict_tools": "tools[1].strict"}
SENT: dict[ApiName, dict[RequestOption, tuple[str, object]]] = {
    "anthropic": {
        "parallel_tool_calls": ("tool_choice", {"type": "auto", "disable_parallel_tool_use": True}),
        "top_k": ("top_k", 40),
        "user_id": ("metadata", {"user_id": "u-1"}),
        "strict_tools": ("tools.1.strict", True),
    },
    "openai-chat": {
        "json_object": ("response_format", {"type": "json_object"}),
        "parallel_tool_calls": ("parallel_tool_calls", False),
        "seed": ("seed", 7),
        "frequency_penalty": ("frequency_penalty", 0.5),
        "presence_penalty": ("presence_penalty", -0.5),
        "user_id": ("user", "u-1"),
        "strict_tools": ("tools.1.function.strict", True),
    },
    "openai-responses": {
        "json_object": ("text", {"format": {"type": "json_object"}}),
        "parallel_tool_calls": ("parallel_tool_calls", False),
        "user_id": ("safety_identifier", "u-1"),
        "strict_tools": ("tools.1.strict", True),
    },
    "openai-images": {"user_id": ("user", "u-1")},
    "gemini": {
        "json_object": ("generationConfig.responseMimeType", "application/json"),
        "seed": ("generationConfig.seed", 7),
        "top_k": ("generationConfig.topK", 40),
        "frequency_penalty": ("generationConfig.frequencyPenalty", 0.5),
        "presence_penalty": ("generationConfig.presencePenalty", -0.5),
    },
    "gemini-interactions": {
        "json_object": ("response_format", {"type": "text", "mime_type": "application/json"}),
        "seed": ("generation_config.seed", 7),
    },
}


def request(api: ApiName, model: str = "m", **fields: Any) -> Generate:
    return Generate(provider=f"my-{api}", model=model, messages=[Message(role="user", content="Hi")], **fields)


def built(api: ApiName, model: str = "m", quirks: Quirks | None = None, **fields: Any) -> tuple[Any, tuple[str, ...]]:
    """The body that the provider is sent, and the notes."""
    made = registry.get(api).build(request(api, model, **fields), [], quirks or Quirks())
    return msgspec.json.decode(made.call.body), made.notes


def at(body: Any, path: str) -> Any:
    for step in path.split("."):
        body = body[int(step)] if isinstance(body, list) else body.get(step)
    return body


@pytest.mark.parametrize("option", FIELDS)
@pytest.mark.parametrize("api", BUILT_IN)
def test_an_option_is_sent_under_the_apis_own_name_or_refused_by_name(api: ApiName, option: RequestOption) -> None:
    check_request(request(api, **FIELDS[option]))
    if place := SENT[api].get(option):
        body, notes = built(api, **FIELDS[option])
        assert (at(body, place[0]), notes) == (place[1], ())
        # The SDK's newest version of this API has no parameters of sampling; the version that is sent has.
        if (api, option) != ("anthropic", "top_k"):
            sdk_accepts(api, body)
    elif api == "openai-images" and "tools" in FIELDS[option]:
        with pytest.raises(RequestInvalid):
            built(api, **FIELDS[option])
    else:
        with pytest.raises(RequestInvalid, match=f"provider 'my-{api}' has no such option") as refused:
            built(api, **FIELDS[option])
        assert refused.value.where == PLACES.get(option, option)


@pytest.mark.parametrize("api", ["anthropic", "openai-chat", "openai-responses", "gemini", "gemini-interactions"])
def test_what_every_api_does_anyway_is_taken_by_each(api: ApiName) -> None:
    tools = [Tool(name="now", strict=False)]
    built(api, tools=tools, parallel_tool_calls=True, frequency_penalty=0, presence_penalty=0, json_object=False)


def test_an_api_of_a_package_refuses_options_until_it_says_that_it_has_them() -> None:
    class Own(ProviderBase):
        name = "own"
        formats: Mapping[Mode, Format] = {"chat": registry.get("openai-chat").formats["chat"]}

    class Seeded(Own):
        options = frozenset({"seed"})

    with pytest.raises(RequestInvalid, match="seed"):
        Own().build(request("own", seed=7), [], Quirks())
    assert msgspec.json.decode(Seeded().build(request("own", seed=7), [], Quirks()).call.body)["seed"] == 7


def test_the_field_of_the_user_is_the_vendors() -> None:
    body, _ = built("openai-chat", quirks=Quirks(user_field="safety_identifier"), user_id="u-1")
    assert body["safety_identifier"] == "u-1"
    assert "user" not in body


@pytest.mark.parametrize("choice", ["auto", "any", ToolChoice(name="now"), "none"], ids=str)
def test_parallel_calls_are_disabled_for_anthropic_with_any_tool_choice(choice: Any) -> None:
    body, _ = built("anthropic", tools=[Tool(name="now")], tool_choice=choice, parallel_tool_calls=False)
    assert body["tool_choice"].get("disable_parallel_tool_use") is (None if choice == "none" else True)
    sdk_accepts("anthropic", body)


@pytest.mark.parametrize("api", ["anthropic", "openai-chat", "openai-responses"])
def test_a_request_without_tools_has_no_parallel_calls_field(api: ApiName) -> None:
    body, _ = built(api, parallel_tool_calls=False)
    assert not body.keys() & {"parallel_tool_calls", "tool_choice"}


@pytest.mark.parametrize("api", ["anthropic", "openai-chat", "openai-responses", "gemini", "gemini-interactions"])
def test_effort_none_is_thinking_turned_off(api: ApiName) -> None:
    assert built(api, thinking=Thinking(effort="none")) == built(api, thinking=Thinking(enabled=False))


EFFORTS: dict[tuple[ApiName, str], tuple[str, dict[Effort, object]]] = {
    ("anthropic", "claude-opus-5"): ("output_config.effort", {"minimal": "low", "xhigh": "xhigh", "max": "max"}),
    ("anthropic", "claude-opus-4-1"): ("thinking.budget_tokens", {"minimal": 1024, "xhigh": 24_576, "max": 24_576}),
    ("openai-chat", "gpt-6"): ("reasoning_effort", {"minimal": "minimal", "xhigh": "xhigh", "max": "max"}),
    ("openai-responses", "gpt-6"): ("reasoning.effort", {"minimal": "minimal", "xhigh": "xhigh", "max": "max"}),
    ("gemini", "gemini-3-pro"): (
        "generationConfig.thinkingConfig.thinkingLevel",
        {"minimal": "MINIMAL", "xhigh": "XHIGH", "max": "XHIGH"},
    ),
    ("gemini", "gemini-2.5-pro"): (
        "generationConfig.thinkingConfig.thinkingBudget",
        {"minimal": 1024, "xhigh": 24_576, "max": 24_576},
    ),
    ("gemini-interactions", "gemini-3-pro"): (
        "generation_config.thinking_level",
        {"minimal": "minimal", "xhigh": "xhigh", "max": "xhigh"},
    ),
}


@pytest.mark.parametrize(("api", "model"), EFFORTS)
def test_an_effort_becomes_the_nearest_that_the_model_has_and_a_note_says_so(api: ApiName, model: str) -> None:
    place, expected = EFFORTS[api, model]
    for effort, sent in expected.items():
        body, notes = built(api, model, thinking=Thinking(effort=effort))
        assert at(body, place) == sent
        lowered = isinstance(sent, str) and sent.lower() != effort
        lowered |= isinstance(sent, int) and effort != "minimal"
        assert [note.split(",")[0].split(" became ")[0] for note in notes] == [f"thinking.effort: {effort!r}"] * lowered
        sdk_accepts(api, body)


@pytest.mark.parametrize("effort", get_args(Effort))
@pytest.mark.parametrize("api", ["anthropic", "openai-chat", "openai-responses", "gemini", "gemini-interactions"])
def test_every_effort_is_taken_by_every_api(api: ApiName, effort: Effort) -> None:
    sdk_accepts(api, built(api, thinking=Thinking(effort=effort))[0])


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"json_object": True, "output_schema": OutputSchema(schema={})}, "json_object"),
        ({"json_object": True, "mode": "prefill", "participant": "Claude"}, "json_object"),
        ({"parallel_tool_calls": False, "mode": "prefill", "participant": "Claude"}, "parallel_tool_calls"),
        (
            {"tools": [Tool(name="now", strict=True)], "mode": "prefill", "participant": "Claude"},
            "tools[0].strict",
        ),
    ],
    ids=str,
)
def test_options_that_exclude_each_other_are_refused_by_name(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(RequestInvalid) as refused:
        check_request(request("anthropic", **fields))
    assert refused.value.where == where


@pytest.mark.parametrize("api", ["anthropic", "gemini"])
def test_prefill_has_the_options_of_sampling_too(api: ApiName) -> None:
    named = {"mode": "prefill", "participant": "Claude", "top_k": 40}
    body, _ = built(api, **named)
    assert at(body, "top_k" if api == "anthropic" else "generationConfig.topK") == 40
