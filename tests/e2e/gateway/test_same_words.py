"""Real clients in front of a provider of their own API: it receives what the client sent, but for named differences."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import anthropic
import msgspec
import openai
import pytest
from google import genai
from google.genai import types

from tokenbus.testing import LocalBus
from tokenbus_services.mock_provider import Reply

Json = dict[str, Any]
LONG: Json = {"type": "ephemeral", "ttl": "1h"}
PNG = bytes(range(256))
SCHEMA: Json = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus("[gateway]\n") as running:
        running.model_says("text", Reply(text="one two three"))
        yield running


def received(bus: LocalBus) -> tuple[Json, dict[str, str]]:
    """The body and the headers of the provider's last request."""
    request = bus.exchanges[-1].http_request
    return msgspec.json.decode(request.body), request.headers


def without(body: Json, *names: str) -> Json:
    return {name: value for name, value in body.items() if name not in names}


def test_anthropics_client_loses_nothing(bus: LocalBus) -> None:
    sent: Json = {
        "max_tokens": 99,
        "system": [{"type": "text", "text": "Be kind.", "cache_control": LONG}],
        "messages": [
            {"role": "user", "content": [
                {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"},
                 "title": "t", "context": "c", "citations": {"enabled": True}},
                {"type": "text", "text": "Look it up.", "cache_control": LONG},
            ]},
            {"role": "assistant", "content": [
                {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}},
                {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
                {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}, "cache_control": LONG},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"}]},
        ],
        "thinking": {"type": "adaptive", "display": "omitted"},
        "tools": [
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
            {"type": "bash_20250124", "name": "bash"},
            {"name": "f", "input_schema": SCHEMA, "defer_loading": True},
        ],
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "service_tier": "auto",
    }  # fmt: skip
    with anthropic.Anthropic(api_key="k", base_url=f"{bus.gateway}/anthropic", max_retries=0) as client:
        message: Any = client.beta.messages.create(
            model="anthropic/text", betas=["context-management-2025-06-27", "odd-beta"], **sent
        )
    assert message.content[0].text == "one two three"
    body, headers = received(bus)
    assert without(body, "model", "stream") == sent
    assert headers["anthropic-beta"] == "context-management-2025-06-27,odd-beta"


def test_openais_client_loses_nothing_of_chat_completions(bus: LocalBus) -> None:
    sent: Json = {
        "messages": [
            {"role": "user", "content": [
                {"type": "text", "text": "Look."},
                {"type": "image_url", "image_url": {"url": "https://a.example/b.png", "detail": "high"}},
            ]},
        ],
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {"1": 2},
        "seed": 7,
        "user": "u",
        "service_tier": "flex",
        "web_search_options": {},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
    }  # fmt: skip
    with openai.OpenAI(api_key="k", base_url=f"{bus.gateway}/v1", max_retries=0) as client:
        create: Any = client.chat.completions.create
        answer = create(model="openai-chat/text", **sent)
    assert answer.choices[0].message.content == "one two three"
    body, _ = received(bus)
    # The bus asks for a stream, and for its counts.
    assert without(body, "model", "stream", "stream_options") == sent


def test_openais_client_loses_nothing_of_responses(bus: LocalBus) -> None:
    more: Json = {
        "truncation": "auto",
        "max_tool_calls": 3,
        "prompt_cache_key": "k",
        "tools": [{"type": "web_search"}],
        "tool_choice": {"type": "web_search"},
        "reasoning": {"effort": "low", "odd": 1},
    }
    searched = {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "q"},
    }
    asked: Json = {"role": "user", "content": [{"type": "input_image", "image_url": "https://a/b", "detail": "high"}]}
    with openai.OpenAI(api_key="k", base_url=f"{bus.gateway}/v1", max_retries=0) as client:
        create: Any = client.responses.create
        assert create(model="openai-responses/text", input=[searched, asked], **more).output_text == "one two three"
    body, _ = received(bus)
    more["reasoning"]["summary"] = "auto"  # the bus asks for the thinking
    assert {name: body[name] for name in more} == more
    assert body["input"] == [searched, asked]


def test_googles_client_loses_nothing(bus: LocalBus) -> None:
    with genai.Client(
        api_key="k", http_options=types.HttpOptions(base_url=f"{bus.gateway}/gemini", api_version="v1beta")
    ) as client:
        answer = client.models.generate_content(
            model="gemini/text",
            contents=[
                types.Part.from_bytes(data=PNG, mime_type="image/png"),
                types.Part.from_bytes(data=PNG, mime_type="audio/wav"),
            ],
            config=types.GenerateContentConfig(
                seed=7,
                top_k=3,
                response_logprobs=True,
                media_resolution=types.MediaResolution.MEDIA_RESOLUTION_LOW,
                safety_settings=[
                    types.SafetySetting(
                        category=types.HarmCategory.HARM_CATEGORY_HARASSMENT,
                        threshold=types.HarmBlockThreshold.BLOCK_NONE,
                    )
                ],
                tools=[types.Tool(google_search=types.GoogleSearch())],
            ),
        )
    assert answer.text == "one two three"
    body, _ = received(bus)
    assert body["generationConfig"] == {
        "seed": 7,
        "topK": 3,
        "responseLogprobs": True,
        "mediaResolution": "MEDIA_RESOLUTION_LOW",
    }
    assert body["safetySettings"] == [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}]
    assert body["tools"] == [{"googleSearch": {}}]
    image, sound = body["contents"][0]["parts"]
    assert (image["inlineData"].get("mimeType"), sound["inlineData"]["mime_type"]) == ("image/png", "audio/wav")


def test_a_google_image_reaches_a_provider_of_another_api(bus: LocalBus) -> None:
    with genai.Client(api_key="k", http_options=types.HttpOptions(base_url=f"{bus.gateway}/gemini")) as client:
        client.models.generate_content(
            model="anthropic/text", contents=[types.Part.from_bytes(data=PNG, mime_type="image/png")]
        )
    body, _ = received(bus)
    source = body["messages"][0]["content"][0]["source"]
    assert msgspec.convert(source["data"], bytes) == PNG


def test_a_hint_that_is_left_out_is_named_in_a_header_and_in_started(bus: LocalBus) -> None:
    with openai.OpenAI(api_key="k", base_url=f"{bus.gateway}/v1", max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="anthropic/text", messages=[{"role": "user", "content": "x"}], seed=7, service_tier="flex"
        )
    assert raw.headers["x-tokenbus-left-out"] == "service_tier, seed"
    run = raw.headers["x-tokenbus-run"]
    with bus.sync_client() as direct:
        started: Any = next(iter(direct.follow(run)))
    assert started.metadata["gateway"]["left_out"] == ["service_tier", "seed"]
