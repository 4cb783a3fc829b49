"""The Gemini API through the gateway, with Google's own Python client."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from google import genai
from google.genai import errors, types

from tests.waiting import eventually_sync
from tokenbus.testing import LocalBus
from tokenbus_services.mock_provider import CutOff, Picture, Reply, Stall, Status, ToolCall, Turn

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "gateway-gemini.md"
CALL = (ToolCall(name="weather", arguments={"city": "Rome"}),)
SIGNATURE = "c2lnbmVk"
SETTINGS = """
[gateway]
tools = ["weather"]
models = ["gemini/text"]
[tools.weather]
kind = "python"
call = "tokenbus_services.weather:weather"
"""
WEATHER = types.Tool(
    function_declarations=[
        types.FunctionDeclaration(
            name="weather",
            parameters=types.Schema(type=types.Type.OBJECT, properties={"city": types.Schema(type=types.Type.STRING)}),
        )
    ]
)
THOUGHTS = types.ThinkingConfig(include_thoughts=True)


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus(SETTINGS) as running:
        running.model_says("text", Reply(thinking="let me see", signature=SIGNATURE, text="one two\u2028three"))
        running.model_says("calls", Reply(thinking="hm", signature=SIGNATURE, tool_calls=CALL), "Sunny.")
        running.model_says("paints", Reply(pictures=(Picture(data=b"png"),)))
        running.model_says("claude-sonnet-4-6", "Yes, it is.")
        running.model_says("refuses", Turn(says=Reply(), fault=Status(status=400)))
        running.model_says("cut", Turn(says=Reply(text="one two three"), fault=CutOff(after_text="two")))
        running.model_says("slow", Turn(says=Reply(text="one two three"), fault=Stall(after_text="two")))
        yield running


@pytest.fixture(params=["v1", "v1beta"])
def client(bus: LocalBus, request: pytest.FixtureRequest) -> Generator[genai.Client]:
    with _client(f"{bus.gateway}/gemini", api_version=request.param) as made:
        yield made


@pytest.fixture(scope="module")
def bare(bus: LocalBus) -> Generator[genai.Client]:
    """Without the prefix."""
    with _client(bus.gateway) as made:
        yield made


def _client(base: str, **options: Any) -> genai.Client:
    return genai.Client(api_key="k", http_options=types.HttpOptions(base_url=base, timeout=60_000, **options))


def parts(answers: Iterable[types.GenerateContentResponse]) -> list[types.Part]:
    return [
        part
        for answer in answers
        for candidate in answer.candidates or ()
        for part in (candidate.content and candidate.content.parts) or ()
    ]


def text(found: list[types.Part], *, thought: bool = False) -> str:
    return "".join(part.text or "" for part in found if bool(part.thought) == thought)


def test_text_and_thinking_are_read_in_each_version(client: genai.Client) -> None:
    request: Any = {
        "model": "gemini/text",
        "contents": "hello",
        "config": types.GenerateContentConfig(thinking_config=THOUGHTS, system_instruction="Be brief"),
    }
    streamed = list(client.models.generate_content_stream(**request))
    whole = client.models.generate_content(**request)
    for answers in (streamed, [whole]):
        assert (text(parts(answers)), text(parts(answers), thought=True)) == ("one two\u2028three", "let me see")
        last = answers[-1]
        assert last.candidates
        assert last.candidates[0].finish_reason == types.FinishReason.STOP
        assert last.usage_metadata
        assert last.usage_metadata.prompt_token_count == 25
        assert last.model_version == "gemini/text"


def test_thoughts_are_not_sent_to_a_client_that_did_not_ask(bare: genai.Client) -> None:
    answer = bare.models.generate_content(model="anthropic/text", contents="hello")
    assert answer.text == "one two\u2028three"
    assert not any(part.thought for part in parts([answer]))


@pytest.mark.parametrize("model", ["gemini/calls", "anthropic/calls"])
def test_a_tool_of_the_client_is_called_and_its_result_goes_back(bare: genai.Client, bus: LocalBus, model: str) -> None:
    config = types.GenerateContentConfig(tools=[WEATHER], thinking_config=THOUGHTS)
    hello = types.Content(role="user", parts=[types.Part(text="hello")])
    called = parts(bare.models.generate_content_stream(model=model, contents=[hello], config=config))
    (call,) = [part.function_call for part in called if part.function_call]
    assert (call.name, call.args) == ("weather", {"city": "Rome"})
    answered = types.FunctionResponse(id=call.id, name="weather", response={"output": "sun"})
    history = [
        hello,
        types.Content(role="model", parts=[part for part in called if part.text or part.function_call or part.thought]),
        types.Content(role="user", parts=[types.Part(function_response=answered)]),
    ]
    assert bare.models.generate_content(model=model, contents=history, config=config).text == "Sunny."
    sent = bus.requests[-1]
    if model.startswith("gemini"):
        assert SIGNATURE in [part.get("thoughtSignature") for part in sent["contents"][1]["parts"]]
        assert sent["contents"][2]["parts"][0]["functionResponse"]["response"] == {"output": "sun"}
        assert sent["tools"][0]["functionDeclarations"][0]["parametersJsonSchema"]["type"] == "object"
    else:
        assert sent["messages"][1]["content"][0]["signature"] == SIGNATURE


def test_a_tool_of_the_deployment_runs_on_the_bus_within_one_answer(bus: LocalBus) -> None:
    with _client(bus.gateway, headers={"x-tokenbus-tools": "weather"}) as client:
        answer = client.models.generate_content(model="gemini/calls", contents="hello")
    assert [part.text for part in parts([answer])] == ["Sunny."]


def test_an_image_comes_inline(bare: genai.Client) -> None:
    config = types.GenerateContentConfig(response_modalities=["TEXT", "IMAGE"])
    answer = bare.models.generate_content(model="gemini/paints", contents="a cat", config=config)
    (image,) = [part.inline_data for part in parts([answer]) if part.inline_data]
    assert (image.data, image.mime_type) == (b"png", "image/png")


def test_an_error_before_the_first_byte_has_its_status_and_form(bare: genai.Client) -> None:
    with pytest.raises(errors.ClientError) as caught:
        bare.models.generate_content(model="gemini/refuses", contents="hello")
    assert (caught.value.code, caught.value.status) == (400, "INVALID_ARGUMENT")
    with pytest.raises(errors.ClientError):
        list(bare.models.generate_content_stream(model="gemini/refuses", contents="hello"))


def test_a_cut_is_an_error_for_every_reader(bare: genai.Client) -> None:
    received = ""
    with pytest.raises(errors.ServerError) as caught:  # noqa: PT012 (what came before the error counts)
        for answer in bare.models.generate_content_stream(model="gemini/cut", contents="hello"):
            received += answer.text or ""
    assert received.startswith("one")
    assert caught.value.status == "UNAVAILABLE"
    with pytest.raises(errors.ServerError):
        bare.models.generate_content(model="gemini/cut", contents="hello")


def test_a_client_that_leaves_ends_the_call_of_the_provider(bus: LocalBus) -> None:
    body = {"contents": [{"parts": [{"text": "hello"}]}]}
    url = f"{bus.gateway}/v1beta/models/gemini/slow:streamGenerateContent?alt=sse"
    with httpx.stream("POST", url, json=body, timeout=60) as stream:
        assert stream.status_code == 200
        assert any(line.startswith("data: ") for line in stream.iter_lines())
    eventually_sync(lambda: bus.exchanges[-1].state == "disconnected")


def test_a_parameter_without_a_counterpart_is_refused_by_name(bare: genai.Client) -> None:
    with pytest.raises(errors.ClientError) as caught:
        bare.models.generate_content(
            model="gemini/text", contents="hello", config=types.GenerateContentConfig(candidate_count=2)
        )
    assert "generationConfig.candidateCount" in str(caught.value)


def test_a_stream_without_sse_is_one_json_array(bus: LocalBus) -> None:
    body = {"contents": [{"parts": [{"text": "hello"}]}]}
    answer = httpx.post(f"{bus.gateway}/v1beta/models/gemini/text:streamGenerateContent", json=body, timeout=60)
    assert answer.headers["content-type"].startswith("application/json")
    chunks = answer.json()
    assert chunks[-1]["candidates"][0]["finishReason"] == "STOP"
    # @ai-sdk/google leaves out `models/` if the name has a slash
    plain = httpx.post(f"{bus.gateway}/v1beta/gemini/text:generateContent", json=body, timeout=60)
    assert plain.json()["candidates"][0]["content"]["parts"][0]["text"] == "one two\u2028three"


@pytest.mark.parametrize(
    ("method", "path", "status", "named"),
    [
        ("POST", "/v1beta/models/gemini/text:generateContent?key=k", 400, "key"),
        ("POST", "/v1beta/models/gemini/text:computeTokens", 404, "computeTokens"),
        ("POST", "/gemini/v1/models/gemini/text:embedContent", 404, "embedContent"),
        ("POST", "/gemini/upload/v1beta/files", 404, "files"),
        ("GET", "/v1beta/cachedContents", 404, "cachedContents"),
    ],
)
def test_what_is_not_served_is_refused_in_the_form_of_the_api(
    bus: LocalBus, method: str, path: str, status: int, named: str
) -> None:
    answer = httpx.request(method, f"{bus.gateway}{path}", json={"contents": []}, timeout=60)
    assert answer.status_code == answer.json()["error"]["code"] == status
    assert named in answer.json()["error"]["message"]


def test_the_page_for_users_of_this_client_holds(bus: LocalBus) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    program = code.replace("http://127.0.0.1:8088", bus.gateway).replace("mock-", "")
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout.rstrip().endswith("Yes, it is."), run.stderr


def test_models_are_listed_in_the_form_of_the_api(client: genai.Client, bare: genai.Client) -> None:
    for each in (client, bare):
        assert [model.name for model in each.models.list()] == ["models/gemini/text"]
        assert each.models.get(model="gemini/text").name == "models/gemini/text"
