"""The providers' own SDKs read what the mock provider composes: that keeps its wire forms honest."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.services.mock_provider.requests import CHAT, MESSAGES, RESPONSES, one_turn, post, serving
from tokenbus.events.usage import Usage
from tokenbus_services.mock_provider import Delivery, ErrorEvent, Picture, Random, Reply, Script, Status, ToolCall
from tokenbus_services.mock_provider.demo import DEMO_MODEL, DEMO_PROMPT, demo_scripts
from tokenbus_services.weather import weather

REPLY = Reply(
    thinking="Which city?\nZürich, I think.",
    text="Let me look: 🌧️ or ☀️.",
    tool_calls=(
        ToolCall(name="weather", arguments={"city": "Zürich"}),
        ToolCall(name="weather", arguments={"city": "東京"}, id="toolu_own"),
    ),
    usage=Usage(input=7, output=21, reasoning=5, cache_read=3),
)
CAT = Picture(data=b"cat" * 100, previews=(b"c" * 10, b"ca" * 10))
ANYHOW = Delivery(cuts=Random(seed=11, largest=40))


@pytest.fixture(params=[1, 3, 100, None], ids=lambda size: f"chunk_size={size}")
def reply(request: pytest.FixtureRequest) -> Reply:
    return Reply(
        thinking=REPLY.thinking,
        text=REPLY.text,
        tool_calls=REPLY.tool_calls,
        usage=REPLY.usage,
        chunk_size=request.param,
    )


async def test_the_anthropic_sdk_reads_stream_and_body(reply: Reply) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic SDK is not installed")
    request: dict[str, Any] = {
        "model": "one-turn",
        "max_tokens": 99,
        "messages": [{"role": "user", "content": "umbrella?"}],
    }
    async with (
        serving(one_turn(reply, delivery=ANYHOW)) as (server, _),
        anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        async with client.messages.stream(**request) as stream:
            streamed = await stream.get_final_message()
        whole = await client.messages.create(**request)
    for message in (streamed, whole):
        thinking, text, *calls = message.content
        assert (thinking.type, thinking.thinking, thinking.signature) == ("thinking", REPLY.thinking, REPLY.signature)
        assert (text.type, text.text) == ("text", REPLY.text)
        assert [(call.type, call.name, call.input) for call in calls] == [
            ("tool_use", "weather", {"city": "Zürich"}),
            ("tool_use", "weather", {"city": "東京"}),
        ]
        assert calls[1].id == "toolu_own"
        assert message.stop_reason == "tool_use"
        usage = message.usage
        assert (usage.input_tokens, usage.output_tokens, usage.cache_read_input_tokens) == (7, 21, 3)


@pytest.mark.parametrize("cloud", ["bedrock", "vertex"])
async def test_the_anthropic_sdks_clients_of_clouds_read_stream_and_body(cloud: str, reply: Reply) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic SDK is not installed")
    request: dict[str, Any] = {
        "model": "one-turn",
        "max_tokens": 99,
        "messages": [{"role": "user", "content": "umbrella?"}],
    }
    async with serving(one_turn(reply, delivery=ANYHOW)) as (server, _), _cloud(anthropic, cloud, server.url) as client:
        events = [event async for event in await client.messages.create(**request, stream=True)]
        whole = await client.messages.create(**request)
    kinds = [event.type for event in events if event.type != "ping"]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert "".join(delta.text for delta in deltas if delta.type == "text_delta") == REPLY.text
    assert "".join(delta.thinking for delta in deltas if delta.type == "thinking_delta") == REPLY.thinking
    arguments = "".join(delta.partial_json for delta in deltas if delta.type == "input_json_delta")
    assert arguments == '{"city":"Zürich"}{"city":"東京"}'
    thinking, text, *calls = whole.content
    assert (thinking.thinking, text.text) == (REPLY.thinking, REPLY.text)
    assert [call.input for call in calls] == [{"city": "Zürich"}, {"city": "東京"}]


@pytest.mark.parametrize("cloud", ["bedrock", "vertex"])
async def test_the_anthropic_sdks_clients_of_clouds_know_the_errors_for_what_they_are(cloud: str) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic SDK is not installed")
    script = one_turn(REPLY, first=(Status(status=429),), fault=ErrorEvent(status=429, after_events=4))
    messages = [{"role": "user", "content": "umbrella?"}]
    async with serving(script) as (server, _), _cloud(anthropic, cloud, server.url) as client:
        with pytest.raises(anthropic.RateLimitError):
            await client.messages.create(model="one-turn", max_tokens=9, messages=messages, stream=True)
        stream = await client.messages.create(model="one-turn", max_tokens=9, messages=messages, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="rate_limit_error" if cloud == "vertex" else "throttling"):
            _ = [event async for event in stream]


def _cloud(anthropic: Any, name: str, url: str) -> Any:
    """Its client of a cloud; each makes its own connections."""
    if name == "bedrock":
        return anthropic.AsyncAnthropicBedrock(base_url=url, aws_region="us-east-1", api_key="none", max_retries=0)
    options = {"region": "global", "project_id": "p", "access_token": "none"}
    return anthropic.AsyncAnthropicVertex(base_url=f"{url}/v1", max_retries=0, **options)


async def test_the_openai_sdk_reads_stream_and_body(reply: Reply) -> None:
    openai = pytest.importorskip("openai", reason="the openai SDK is not installed")
    request: dict[str, Any] = {"model": "one-turn", "messages": [{"role": "user", "content": "umbrella?"}]}
    async with (
        serving(one_turn(reply, delivery=ANYHOW)) as (server, _),
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        async with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
            pieces = [event.chunk async for event in stream if event.type == "chunk"]
            streamed = await stream.get_final_completion()
        whole = await client.chat.completions.create(**request)
    deltas = [chunk.choices[0].delta for chunk in pieces if chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == REPLY.thinking
    assert whole.choices[0].message.reasoning_content == REPLY.thinking
    for completion in (streamed, whole):
        choice = completion.choices[0]
        assert choice.message.content == REPLY.text
        assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
            ("weather", '{"city":"Zürich"}'),
            ("weather", '{"city":"東京"}'),
        ]
        assert choice.message.tool_calls[1].id == "toolu_own"
        assert choice.finish_reason == "tool_calls"
        usage = completion.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 21, 28)
        assert usage.completion_tokens_details.reasoning_tokens == 5
        assert usage.prompt_tokens_details.cached_tokens == 3


async def test_the_openai_sdk_reads_stream_and_body_of_completions() -> None:
    openai = pytest.importorskip("openai", reason="the openai SDK is not installed")
    prompt = "Be kind.\n\nAda: umbrella?\nClaude:"
    request: dict[str, Any] = {"model": "one-turn", "prompt": prompt, "stop": ["\nAda:"]}
    reply = Reply(text=" {token} Yes.\nAda: thanks", usage=REPLY.usage)
    async with (
        serving(one_turn(reply, delivery=ANYHOW)) as (server, _),
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = await client.completions.create(**request, stream=True, stream_options={"include_usage": True})
        pieces = [chunk async for chunk in stream]
        whole = await client.completions.create(**request)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole.choices[0].text
    assert whole.choices[0].text == " umbrella? Yes."
    for end, counted in ((pieces[-2].choices[0], pieces[-1]), (whole.choices[0], whole)):
        assert (end.finish_reason, end.stop_reason) == ("stop", "\nAda:")
        assert (counted.usage.prompt_tokens, counted.usage.completion_tokens) == (7, 21)


async def test_the_openai_sdk_reads_stream_and_body_of_responses(reply: Reply) -> None:
    openai = pytest.importorskip("openai", reason="the openai SDK is not installed")
    request: dict[str, Any] = {"model": "one-turn", "input": "umbrella?", "include": ["reasoning.encrypted_content"]}
    async with (
        serving(one_turn(reply, delivery=ANYHOW)) as (server, _),
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        async with client.responses.stream(**request) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
        whole = await client.responses.create(**request)
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == REPLY.text
    assert "".join(e.delta for e in events if e.type == "response.reasoning_summary_text.delta") == REPLY.thinking
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for response in (streamed, whole):
        reasoning, message, *calls = response.output
        assert (reasoning.summary[0].text, reasoning.encrypted_content) == (REPLY.thinking, REPLY.signature)
        assert (message.content[0].text, response.output_text) == (REPLY.text, REPLY.text)
        assert [(call.type, call.name, call.arguments) for call in calls] == [
            ("function_call", "weather", '{"city":"Zürich"}'),
            ("function_call", "weather", '{"city":"東京"}'),
        ]
        assert calls[1].call_id == "toolu_own"
        assert response.status == "completed"
        usage = response.usage
        assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (7, 21, 28)
        assert usage.output_tokens_details.reasoning_tokens == 5
        assert usage.input_tokens_details.cached_tokens == 3


async def test_the_google_sdk_reads_stream_and_body(reply: Reply) -> None:
    genai = pytest.importorskip("google.genai", reason="the google-genai SDK is not installed")
    request: dict[str, Any] = {"model": "one-turn", "contents": "umbrella?"}
    async with serving(one_turn(reply, delivery=ANYHOW)) as (server, http), _google(genai, server.url, http) as client:
        chunks = [chunk async for chunk in await client.models.generate_content_stream(**request)]
        whole = await client.models.generate_content(**request)
    for parts in (
        [part for chunk in chunks for part in chunk.candidates[0].content.parts],
        whole.candidates[0].content.parts,
    ):
        assert "".join(part.text or "" for part in parts if part.thought) == REPLY.thinking
        assert "".join(part.text or "" for part in parts if not part.thought) == REPLY.text
        calls = [part for part in parts if part.function_call]
        assert [(call.function_call.name, call.function_call.args) for call in calls] == [
            ("weather", {"city": "Zürich"}),
            ("weather", {"city": "東京"}),
        ]
        assert calls[1].function_call.id == "toolu_own"
        assert [call.thought_signature for call in calls] == [b64decode(REPLY.signature), None]
    for response in (chunks[-1], whole):
        assert response.candidates[0].finish_reason == "STOP"
        usage = response.usage_metadata
        assert (usage.prompt_token_count, usage.candidates_token_count, usage.thoughts_token_count) == (7, 16, 5)
        assert (usage.total_token_count, usage.cached_content_token_count) == (28, 3)


async def test_the_google_sdk_reads_stream_and_body_of_interactions(reply: Reply) -> None:
    genai = pytest.importorskip("google.genai", reason="the google-genai SDK is not installed")
    request: dict[str, Any] = {"model": "one-turn", "input": "umbrella?"}
    async with (
        serving(one_turn(reply, delivery=ANYHOW)) as (server, _),
        _interactions(genai, server.url) as client,
    ):
        events = [event async for event in await client.create(**request, stream=True)]
        whole = await client.create(**request)
    begun, _, *steps, ended = events
    assert (begun.event_type, begun.interaction.status) == ("interaction.created", "in_progress")
    deltas = [event.delta for event in steps if event.event_type == "step.delta"]
    assert not any(delta.type == "UNKNOWN" for delta in deltas)
    assert "".join(delta.content.text for delta in deltas if delta.type == "thought_summary") == REPLY.thinking
    assert [delta.signature for delta in deltas if delta.type == "thought_signature"] == [REPLY.signature]
    assert "".join(delta.text for delta in deltas if delta.type == "text") == REPLY.text
    starts = [event.step for event in steps if event.event_type == "step.start"]
    assert [step.type for step in starts] == ["thought", "model_output", "function_call", "function_call"]
    arguments = "".join(delta.arguments for delta in deltas if delta.type == "arguments_delta")
    assert arguments == '{"city":"Zürich"}{"city":"東京"}'
    thought, said, *calls = whole.steps
    assert (thought.summary[0].text, said.content[0].text) == (REPLY.thinking, REPLY.text)
    assert whole.output_text == REPLY.text
    assert [call.arguments for call in calls] == [{"city": "Zürich"}, {"city": "東京"}]
    for made in (starts[2:], calls):
        assert [call.name for call in made] == ["weather", "weather"]
        assert made[1].id == "toolu_own"
    for interaction in (ended.interaction, whole):
        assert interaction.status == "requires_action"
        usage = interaction.usage
        counts = (usage.total_input_tokens, usage.total_output_tokens, usage.total_thought_tokens, usage.total_tokens)
        assert (*counts, usage.total_cached_tokens) == (7, 16, 5, 28, 3)


async def test_the_google_sdk_holds_the_demo_conversation_in_interactions() -> None:
    genai = pytest.importorskip("google.genai", reason="the google-genai SDK is not installed")
    steps: list[Any] = [{"type": "user_input", "content": [{"type": "text", "text": DEMO_PROMPT}]}]
    async with serving(*_unhurried()) as (server, _), _interactions(genai, server.url) as client:
        first = await client.create(model=DEMO_MODEL, input=steps, store=False)
        steps += [step.model_dump(exclude_none=True) for step in first.steps]
        call = first.steps[-1]
        assert (call.name, call.arguments) == ("weather", {"city": "Zürich"})
        result = [{"type": "text", "text": str(weather("Zürich"))}]
        steps.append({"type": "function_result", "name": call.name, "call_id": call.id, "result": result})
        last = await client.create(model=DEMO_MODEL, input=steps, store=False)
    assert f"{weather('Zürich')['celsius']} °C" in last.output_text


async def test_the_google_sdk_reads_pictures_and_errors_of_interactions() -> None:
    genai = pytest.importorskip("google.genai", reason="the google-genai SDK is not installed")
    drawn = Reply(text="Here:", pictures=(CAT,))
    faulty = one_turn(REPLY, first=(Status(status=429),), fault=ErrorEvent(after_events=4))
    request: dict[str, Any] = {"input": "A cat.", "stream": True}
    async with (
        serving(one_turn(drawn, delivery=ANYHOW)) as (server, _),
        serving(faulty) as (broken, _),
        _interactions(genai, server.url) as client,
        _interactions(genai, broken.url) as other,
    ):
        events = [event async for event in await client.create(model="one-turn", **request)]
        whole = await client.create(model="one-turn", input="A cat.")
        with pytest.raises(Exception, match="429"):
            await other.create(model="one-turn", **request)
        *_, last = [event async for event in await other.create(model="one-turn", **request)]
    [image] = [event.delta for event in events if event.event_type == "step.delta" and event.delta.type == "image"]
    for picture in (image, whole.output_image):
        assert (picture.mime_type, b64decode(picture.data)) == ("image/png", CAT.data)
    assert (last.event_type, last.error.code) == ("error", "api_error")


async def test_the_openai_sdk_reads_pictures_of_both_apis() -> None:
    openai = pytest.importorskip("openai", reason="the openai SDK is not installed")
    request: dict[str, Any] = {"model": "one-turn", "prompt": "A cat."}
    tool = {"type": "image_generation", "partial_images": 1, "size": "1024x1024", "quality": "low"}
    async with (
        serving(one_turn(Reply(pictures=(CAT,)), delivery=ANYHOW)) as (server, _),
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        streamed = [event async for event in await client.images.generate(**request, stream=True, partial_images=1)]
        whole = await client.images.generate(**request)
        stream = await client.responses.create(model="one-turn", input="A cat.", tools=[tool], stream=True)
        events = [event async for event in stream]
    assert [(event.type, b64decode(event.b64_json)) for event in streamed] == [
        ("image_generation.partial_image", CAT.previews[0]),
        ("image_generation.completed", CAT.data),
    ]
    assert b64decode(whole.data[0].b64_json) == CAT.data
    [preview] = [event for event in events if event.type == "response.image_generation_call.partial_image"]
    assert b64decode(preview.partial_image_b64) == CAT.previews[0]
    [made] = events[-1].response.output
    assert (made.type, b64decode(made.result)) == ("image_generation_call", CAT.data)


async def test_the_openai_sdk_sends_images_to_edit_and_reads_what_became_of_them() -> None:
    openai = pytest.importorskip("openai", reason="the openai SDK is not installed")
    images = [("a.png", b"--a\r\n\x00", "image/png"), ("b.webp", b"", "image/webp")]
    async with (
        serving(one_turn(Reply(pictures=(CAT,)), delivery=ANYHOW)) as (server, client),
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        request: dict[str, Any] = {"model": "one-turn", "prompt": "Blue."}
        stream = await sdk.images.edit(**request, image=images, mask=images[0], stream=True, partial_images=1)
        streamed = [event async for event in stream]
        generate = server.requests[-1].request
        whole = await sdk.images.edit(**request, image=images[0])
        with pytest.raises(openai.BadRequestError, match="Missing required parameter: 'image'"):
            await sdk.post("/images/edits", body=request, cast_to=object)
        with pytest.raises(openai.BadRequestError, match="Unknown parameter: 'images'"):
            await sdk.images.generate(**request, extra_body={"images": [{"image_url": "x"}]})
        bad = {"content-type": "multipart/form-data; boundary=x"}
        assert (await client.post("/v1/images/edits", content=b"{}", headers=bad)).status_code == 400
    assert [(event.type, b64decode(event.b64_json)) for event in streamed] == [
        ("image_edit.partial_image", CAT.previews[0]),
        ("image_edit.completed", CAT.data),
    ]
    assert b64decode(whole.data[0].b64_json) == CAT.data
    assert generate is not None
    files = [*generate.body["image[]"], generate.body["mask"]]
    assert [(file["filename"], file["data"], file["media_type"]) for file in files] == [*images, images[0]]


async def test_the_google_sdk_reads_a_picture() -> None:
    genai = pytest.importorskip("google.genai", reason="the google-genai SDK is not installed")
    request: dict[str, Any] = {"model": "one-turn", "contents": "A cat."}
    script = one_turn(Reply(text="Here:", pictures=(CAT,)), delivery=ANYHOW)
    async with serving(script) as (server, http), _google(genai, server.url, http) as client:
        stream = await client.models.generate_content_stream(**request)
        streamed = [part async for chunk in stream for part in chunk.candidates[0].content.parts]
        whole = await client.models.generate_content(**request)
    for parts in (streamed, whole.candidates[0].content.parts):
        [picture] = [part for part in parts if part.inline_data]
        assert (picture.inline_data.mime_type, picture.inline_data.data) == ("image/png", CAT.data)


@pytest.mark.parametrize("path", [MESSAGES, CHAT, RESPONSES])
async def test_a_picture_that_an_api_was_not_asked_for_or_does_not_make_is_refused(path: str) -> None:
    async with serving(one_turn(Reply(pictures=(CAT,)))) as (_, client):
        assert (await client.post(**post(path))).status_code == 501


async def test_without_being_asked_chat_completions_stream_no_usage() -> None:
    openai = pytest.importorskip("openai", reason="the openai SDK is not installed")
    async with (
        serving(one_turn(REPLY)) as (server, _),
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        stream = await client.chat.completions.create(
            model="one-turn", stream=True, messages=[{"role": "user", "content": "umbrella?"}]
        )
        chunks = [chunk async for chunk in stream]
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_the_sdks_know_the_errors_for_what_they_are() -> None:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic SDK is not installed")
    openai = pytest.importorskip("openai", reason="the openai SDK is not installed")
    script = one_turn(
        REPLY, first=(Status(status=429, headers={"retry-after": "1"}),), fault=ErrorEvent(after_events=4)
    )
    messages = [{"role": "user", "content": "umbrella?"}]
    async with (
        serving(script) as (server, _),
        anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as claude,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as chat,
    ):
        with pytest.raises(anthropic.RateLimitError):
            await claude.messages.create(model="one-turn", max_tokens=9, messages=messages, stream=True)
        stream = await claude.messages.create(model="one-turn", max_tokens=9, messages=messages, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
            _ = [event async for event in stream]
        with pytest.raises(openai.RateLimitError):
            await chat.chat.completions.create(model="one-turn", messages=messages, stream=True)
        stream = await chat.chat.completions.create(model="one-turn", messages=messages, stream=True)
        with pytest.raises(openai.APIError, match="mid-stream"):
            _ = [chunk async for chunk in stream]


async def test_the_sdks_know_the_errors_of_responses_and_gemini_for_what_they_are() -> None:
    openai = pytest.importorskip("openai", reason="the openai SDK is not installed")
    genai = pytest.importorskip("google.genai", reason="the google-genai SDK is not installed")
    script = one_turn(
        REPLY, first=(Status(status=429, headers={"retry-after": "1"}),), fault=ErrorEvent(after_events=4)
    )
    async with (
        serving(script) as (server, http),
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        _google(genai, server.url, http) as gemini,
    ):
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(model="one-turn", input="umbrella?", stream=True)
        stream = await client.responses.create(model="one-turn", input="umbrella?", stream=True)
        *_, last = [event async for event in stream]
        assert (last.type, last.code) == ("error", "server_error")
        for error, words in ((genai.errors.ClientError, "RESOURCE_EXHAUSTED"), (genai.errors.APIError, "mid-stream")):
            stream = await gemini.models.generate_content_stream(model="one-turn", contents="umbrella?")
            with pytest.raises(error, match=words):
                _ = [chunk async for chunk in stream]


def _google(genai: Any, url: str, http: httpx.AsyncClient) -> Any:
    return genai.Client(api_key="none", http_options={"base_url": url, "httpx_async_client": http}).aio


@asynccontextmanager
async def _interactions(genai: Any, url: str) -> AsyncIterator[Any]:
    """Its client of interactions, which makes its own connections."""
    options = {"base_url": url, "retry_options": genai.types.HttpRetryOptions(attempts=1)}
    async with genai.Client(api_key="none", http_options=options).aio as client:
        yield client.interactions


def _unhurried() -> list[Script]:
    return [script.paced(None) for script in demo_scripts()]


async def test_the_anthropic_sdk_holds_the_demo_conversation() -> None:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic SDK is not installed")
    messages: list[dict[str, Any]] = [{"role": "user", "content": DEMO_PROMPT}]
    async with (
        serving(*_unhurried()) as (server, _),
        anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client,
    ):

        async def turn() -> Any:
            async with client.messages.stream(model=DEMO_MODEL, max_tokens=999, messages=messages) as stream:
                return await stream.get_final_message()

        first = await turn()
        thinking, text, call = first.content
        assert thinking.signature
        assert "Zürich" in text.text
        assert (call.name, call.input) == ("weather", {"city": "Zürich"})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": str(weather(**call.input))}
        messages += [
            {"role": "assistant", "content": [block.model_dump() for block in first.content]},
            {"role": "user", "content": [result]},
        ]
        last = await turn()
    assert last.stop_reason == "end_turn"
    assert f"{weather('Zürich')['celsius']} °C" in last.content[0].text


async def test_the_openai_sdk_holds_the_demo_conversation() -> None:
    openai = pytest.importorskip("openai", reason="the openai SDK is not installed")
    messages: list[dict[str, Any]] = [{"role": "user", "content": DEMO_PROMPT}]
    async with (
        serving(*_unhurried()) as (server, _),
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):

        async def turn() -> Any:
            async with client.chat.completions.stream(model=DEMO_MODEL, messages=messages) as stream:
                return (await stream.get_final_completion()).choices[0]

        first = await turn()
        call = first.message.tool_calls[0]
        assert (first.finish_reason, call.function.arguments) == ("tool_calls", '{"city":"Zürich"}')
        messages += [
            {"role": "assistant", "content": first.message.content, "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_call_id": call.id, "content": str(weather("Zürich"))},
        ]
        last = await turn()
    assert last.finish_reason == "stop"
    assert f"{weather('Zürich')['celsius']} °C" in last.message.content


async def test_the_openai_sdk_holds_the_demo_conversation_in_responses() -> None:
    openai = pytest.importorskip("openai", reason="the openai SDK is not installed")
    items: list[Any] = [{"role": "user", "content": DEMO_PROMPT}]
    async with (
        serving(*_unhurried()) as (server, _),
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):

        async def turn() -> Any:
            async with client.responses.stream(model=DEMO_MODEL, input=items, store=False) as stream:
                return await stream.get_final_response()

        first = await turn()
        call = first.output[-1]
        assert (call.type, call.arguments) == ("function_call", '{"city":"Zürich"}')
        result = {"type": "function_call_output", "call_id": call.call_id, "output": str(weather("Zürich"))}
        items += [*first.output, result]
        last = await turn()
    assert f"{weather('Zürich')['celsius']} °C" in last.output_text


async def test_the_google_sdk_holds_the_demo_conversation() -> None:
    genai = pytest.importorskip("google.genai", reason="the google-genai SDK is not installed")
    async with serving(*_unhurried()) as (server, http), _google(genai, server.url, http) as client:
        chat = client.chats.create(model=DEMO_MODEL)
        first = [chunk async for chunk in await chat.send_message_stream(DEMO_PROMPT)]
        [call] = [call for chunk in first for call in chunk.function_calls or ()]
        assert (call.name, call.args) == ("weather", {"city": "Zürich"})
        answer = genai.types.FunctionResponse(id=call.id, name=call.name, response=weather("Zürich"))
        last = [chunk async for chunk in await chat.send_message_stream(genai.types.Part(function_response=answer))]
    assert f"{weather('Zürich')['celsius']} °C" in "".join(chunk.text or "" for chunk in last)
