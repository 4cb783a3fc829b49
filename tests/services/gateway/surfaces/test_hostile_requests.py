"""Any JSON in place of a request: each surface translates it, or refuses it with a 4xx in its own error shape."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.services.gateway.rules import rules
from tokenbus.client import publishing as publish
from tokenbus.client.publishing import new_run_id
from tokenbus.errors import TokenbusError
from tokenbus_services.gateway.problem import Problem, Refusal, of_exception
from tokenbus_services.gateway.routes.registry import SURFACES
from tokenbus_services.gateway.surfaces.ag_ui import AgUiSurface
from tokenbus_services.gateway.surfaces.ai_sdk_ui import AiSdkUiSurface
from tokenbus_services.gateway.surfaces.anthropic_messages import AnthropicMessagesSurface
from tokenbus_services.gateway.surfaces.contract import Answer, GatewayRequest
from tokenbus_services.gateway.surfaces.durable_streams import protocol
from tokenbus_services.gateway.surfaces.gemini import GeminiSurface
from tokenbus_services.gateway.surfaces.native import NativeSurface
from tokenbus_services.gateway.surfaces.openai_chat import OpenAIChatSurface
from tokenbus_services.gateway.surfaces.openai_images import OpenAIImagesSurface
from tokenbus_services.gateway.surfaces.openai_responses import OpenAIResponsesSurface
from tokenbus_services.gateway.surfaces.surface import Surface

Json = dict[str, Any]
LIMIT = 2**20
SCHEMA: Json = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PICTURE = "data:image/png;base64,aGF0"

# One request of each API with as many of its fields as one request can have, for hypothesis to spoil.
CHAT: Json = {
    "model": "openai/m",
    "messages": [
        {"role": "system", "content": "Be kind."},
        {
            "role": "user",
            "name": "ann",
            "content": [
                {"type": "text", "text": "Hi"},
                {"type": "image_url", "image_url": {"url": PICTURE, "detail": "auto"}},
                {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,aGF0"}},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "w", "arguments": '{"city": "Bonn"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "Rain."},
    ],
    "tools": [
        {"type": "function", "function": {"name": "w", "description": "d", "parameters": SCHEMA, "strict": True}}
    ],
    "tool_choice": {"type": "function", "function": {"name": "w"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
    "stop": ["END"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "reasoning_effort": "low",
    "temperature": 0.5,
    "max_completion_tokens": 9,
    "metadata": {"a": "b"},
    "logit_bias": {"1": 2},
    "tokenbus": {"run": "r1", "policies": ["p"], "on_failure": "fail", "deadline_s": 9, "extra": {"top_a": 1}},
}
RESPONSES: Json = {
    "model": "responses/m",
    "instructions": "Be kind.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": PICTURE, "detail": "auto"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "hm"}],
            "encrypted_content": "x",
        },
        {"type": "function_call", "call_id": "c1", "name": "w", "arguments": '{"city": "Bonn"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "Rain."},
    ],
    "tools": [{"type": "function", "name": "w", "description": "d", "parameters": SCHEMA, "strict": True}],
    "tool_choice": {"type": "function", "name": "w"},
    "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 99,
    "background": True,
    "store": True,
    "stream": True,
    "metadata": {"a": "b"},
    "tokenbus": {"policies": ["p"]},
}
MESSAGES: Json = {
    "model": "anthropic/m",
    "max_tokens": 99,
    "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Hi"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGF0"}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "tool_use", "id": "t1", "name": "w", "input": {"city": "Bonn"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "Rain.", "is_error": False}],
        },
    ],
    "tools": [{"name": "w", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 2048},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"},
    "stop_sequences": ["END"],
    "temperature": 1,
    "metadata": {"user_id": "u"},
    "stream": True,
}
GEMINI: Json = {
    "contents": [
        {"role": "user", "parts": [{"text": "Hi"}, {"inlineData": {"mimeType": "image/png", "data": "aGF0"}}]},
        {"role": "model", "parts": [{"text": "hm", "thought": True, "thoughtSignature": "cw=="}]},
        {"role": "model", "parts": [{"functionCall": {"id": "c1", "name": "w", "args": {"city": "Bonn"}}}]},
        {"role": "user", "parts": [{"functionResponse": {"id": "c1", "name": "w", "response": {"output": "Rain."}}}]},
    ],
    "systemInstruction": {"parts": [{"text": "Be kind."}]},
    "tools": [{"functionDeclarations": [{"name": "w", "description": "d", "parameters": {"type": "OBJECT"}}]}],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["w"]}},
    "generationConfig": {
        "temperature": 0.5,
        "topK": 4,
        "maxOutputTokens": 9,
        "stopSequences": ["END"],
        "seed": 1,
        "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 128},
        "responseMimeType": "application/json",
        "responseSchema": {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}},
    },
}
UI: Json = {
    "id": "chat",
    "model": "anthropic/m",
    "trigger": "submit-message",
    "messageId": "m1",
    "messages": [
        {"id": "u1", "role": "user", "metadata": {}, "parts": [{"type": "text", "text": "Hi"}]},
        {
            "id": "a1",
            "role": "assistant",
            "parts": [
                {"type": "step-start"},
                {"type": "reasoning", "text": "hm", "providerMetadata": {"tokenbus": {"signature": "s"}}},
                {
                    "type": "tool-w",
                    "toolCallId": "c1",
                    "state": "output-available",
                    "input": {"a": 1},
                    "output": "Rain.",
                },
                {"type": "dynamic-tool", "toolName": "w", "toolCallId": "c2", "state": "output-error", "input": {}},
            ],
        },
        {"id": "u2", "role": "user", "parts": [{"type": "file", "mediaType": "image/png", "url": PICTURE}]},
    ],
    "tools": [{"name": "w", "description": "d", "inputSchema": SCHEMA}],
    "toolChoice": {"type": "tool", "toolName": "w"},
    "temperature": 1,
    "reasoning": "low",
    "metadata": {"a": 1},
    "stopSequences": ["END"],
}
AGUI: Json = {
    "threadId": "t1",
    "runId": "r1",
    "state": {"a": 1},
    "messages": [
        {"id": "s", "role": "system", "content": "Be kind."},
        {"id": "u", "role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "id": "a",
            "role": "assistant",
            "content": "So",
            "toolCalls": [{"id": "c1", "type": "function", "function": {"name": "w", "arguments": '{"city": "Bonn"}'}}],
        },
        {"id": "t", "role": "tool", "toolCallId": "c1", "content": "Rain."},
        {"id": "r", "role": "reasoning", "content": "hm", "encryptedValue": "s"},
    ],
    "tools": [{"name": "w", "description": "d", "parameters": SCHEMA}],
    "context": [{"description": "d", "value": "v"}],
    "forwardedProps": {"model": "anthropic/m", "temperature": 1},
}
IMAGES: Json = {
    "model": "responses/m",
    "prompt": "A hat.",
    "size": "1024x1024",
    "quality": "high",
    "output_format": "png",
    "background": "auto",
    "n": 1,
    "partial_images": 1,
    "stream": True,
    "response_format": "b64_json",
    "user": "u",
}
NATIVE: Json = {
    "model": "anthropic/m",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    "tools": [{"name": "w", "description": "d", "parameters": SCHEMA}],
    "max_tool_depth": 0,
    "fallback": [{"provider": "gemini", "model": "flash"}],
    "policies": ["p"],
    "metadata": {"a": 1},
    "thinking": {"effort": "low"},
    "output_schema": {"name": "s", "schema": SCHEMA},
    "images": {"size": "1024x1024"},
    "on_failure": "continue",
}
PLACES: dict[str, tuple[Surface, Json, dict[str, str]]] = {
    "openai_chat": (OpenAIChatSurface(), CHAT, {}),
    "openai_responses": (OpenAIResponsesSurface(), RESPONSES, {}),
    "openai_images": (OpenAIImagesSurface(), IMAGES, {}),
    "anthropic_messages": (AnthropicMessagesSurface(), MESSAGES, {}),
    "gemini": (GeminiSurface(), GEMINI, {"model": "gemini/flash", "method": "streamGenerateContent"}),
    "ai_sdk_ui": (AiSdkUiSurface(), UI, {}),
    "ag_ui": (AgUiSurface(), AGUI, {}),
    "native": (NativeSurface(), NATIVE, {}),
}
HEADERS = (
    "x-tokenbus-tools",
    "x-tokenbus-visible",
    "x-tokenbus-max-tool-depth",
    "x-tokenbus-deadline-s",
    "x-tokenbus-run",
    "x-tokenbus-on-failure",
    "x-server-timeout",
    "anthropic-beta",
    "accept",
)


def _object(answer: Answer) -> Json:
    return cast("Json", msgspec.json.decode(answer.body)["error"])


def _openai(answer: Answer) -> None:
    error = _object(answer)
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == "invalid_request_error"


def _anthropic(answer: Answer) -> None:
    assert msgspec.json.decode(answer.body)["type"] == "error"
    error = _object(answer)
    assert error["message"]
    assert error["type"].endswith("_error")


def _gemini(answer: Answer) -> None:
    error = _object(answer)
    assert error["message"]
    assert error["code"] == answer.status
    assert error["status"].isupper()


def _text(answer: Answer) -> None:
    assert answer.media_type.startswith("text/plain")
    assert answer.body.decode()


def _coded(answer: Answer) -> None:
    error = _object(answer)
    assert error["message"]
    assert error["code"]


SHAPES: dict[str, Callable[[Answer], None]] = {
    "openai_chat": _openai,
    "openai_responses": _openai,
    "openai_images": _openai,
    "anthropic_messages": _anthropic,
    "gemini": _gemini,
    "ai_sdk_ui": _text,
    "ag_ui": _coded,
    "native": _coded,
    "durable_streams": _coded,
}

names = st.one_of(
    st.sampled_from(["type", "role", "content", "text", "id", "name", "function", "model"]), st.text(max_size=4)
)
numbers = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([-1, 0, 2**53, 1e308]),
)
texts = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["", "user", "tool", "auto", "data:image/png;base64,", "data:,", "http://[", "\x00", "{"]),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=6,
)


def _paths(value: object, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if at else []
    if isinstance(value, dict):
        for name, each in cast("Json", value).items():
            found += _paths(each, (*at, name))
    elif isinstance(value, list):
        for i, each in enumerate(cast("list[object]", value)):
            found += _paths(each, (*at, i))
    return found


@st.composite
def spoiled(draw: st.DrawFn, body: Json) -> Json:
    """The request with one to three of its values replaced, removed, doubled or moved."""
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        paths = _paths(body)
        if not paths:
            break
        *way, last = draw(st.sampled_from(paths))
        inside: Any = body
        for step in way:
            inside = inside[step]
        match draw(st.sampled_from(["replace", "replace", "remove", "add", "move"])):
            case "replace":
                inside[last] = draw(values)
            case "remove":
                del inside[last]
            case "add" if isinstance(inside, dict):
                inside[draw(names)] = draw(values)
            case "add":
                inside.append(copy.deepcopy(inside[last]))
            case _:
                other = draw(st.sampled_from(paths))
                found: Any = body
                for step in other:
                    found = found[step]
                inside[last] = copy.deepcopy(found)
    return body


def bodies(body: Json) -> st.SearchStrategy[bytes]:
    """What may come in place of a body."""
    spoilt = spoiled(body).map(msgspec.json.encode)
    return st.one_of(spoilt, spoilt, spoilt, values.map(msgspec.json.encode), st.binary(max_size=20))


def outcome(surface: Surface, request: GatewayRequest) -> Problem | None:
    """What becomes of a request, as far as it needs no bus: None if it would be published."""
    try:
        translated = surface.translate(request, rules(allow_extra=frozenset({"top_a"})))
        run = translated.run or new_run_id()
        publish.encoded(msgspec.structs.replace(translated.generate, id=run), limit=LIMIT)
    except Refusal as e:
        return e.problem
    except TokenbusError as e:
        return of_exception(e)
    return None


def test_hostile_requests_cover_every_surface() -> None:
    assert {*PLACES, "durable_streams"} == set(SURFACES) == set(SHAPES)


@pytest.mark.parametrize("name", PLACES)
def test_the_unmodified_request_is_accepted(name: str) -> None:
    surface, body, path = PLACES[name]
    assert outcome(surface, GatewayRequest(body=msgspec.json.encode(body), headers={}, path=path)) is None


@pytest.mark.parametrize("name", PLACES)
def test_any_body_is_a_run_or_a_refusal_in_the_surfaces_own_shape(name: str) -> None:
    surface, body, path = PLACES[name]
    headers = st.dictionaries(st.sampled_from(HEADERS), st.one_of(texts, numbers.map(str)), max_size=2)
    queries = st.dictionaries(st.sampled_from(["ui", "alt", "model", "after"]), texts, max_size=1)

    @settings(max_examples=150)
    @given(bodies(body), headers, queries)
    def fine(data: bytes, headers: dict[str, str], query: dict[str, str]) -> None:
        problem = outcome(surface, GatewayRequest(body=data, headers=headers, path=path, query=query))
        if problem is not None:
            answer = surface.refusal(problem)
            assert 400 <= answer.status < 500, problem
            SHAPES[name](answer)

    fine()


@given(st.lists(st.tuples(st.sampled_from(["offset", "live", "cursor"]), texts | numbers.map(str)), max_size=3))
def test_any_query_of_a_stream_is_read_or_refused(query: list[tuple[str, str]]) -> None:
    try:
        protocol.asked(query)
    except Refusal as e:
        answer = protocol.refusal(e.problem)
        assert 400 <= answer.status < 500
        SHAPES["durable_streams"](answer)
