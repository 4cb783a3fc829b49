"""What a provider does itself, through the gateway: clients of other APIs read it with their own libraries, and what
they send back comes to the provider that made it."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Generator
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest

from tests.e2e.runs.test_what_providers_do import ANSWERS, SOUND_DATA, sse
from tokenbus.testing import LocalBus
from tokenbus_services.mock_provider import Turn, Wire

Json = dict[str, Any]
PNG = b64encode(b"\x89PNG\r\n\x1a\n" + bytes(64)).decode()


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus("[gateway]\n") as running:
        for api, stream in ANSWERS.items():
            running.model_says(f"of-{api}", Turn(says=Wire(stream=stream)), "Done.")
        yield running


def sent(bus: LocalBus) -> str:
    """The body that the provider got last."""
    return msgspec.json.encode(bus.requests[-1]).decode()


def test_a_client_of_responses_reads_searches_and_code_of_anthropic_and_gives_them_back(bus: LocalBus) -> None:
    with openai.OpenAI(api_key="k", base_url=f"{bus.gateway}/v1", max_retries=0) as client:
        user: Any = {"role": "user", "content": "hi"}
        events: list[Any] = list(client.responses.create(model="anthropic/of-anthropic", input=[user], stream=True))
        output = events[-1].response.output
        kinds = [item.type for item in output]
        assert kinds == ["reasoning", *["web_search_call"] * 2, "code_interpreter_call", *["message"] * 4]
        assert output[2].action.query == "weather"
        assert [source.url for source in output[2].action.sources] == ["https://a.test"]
        assert [log.logs for log in output[3].outputs] == ["2\n"]
        [cited] = output[4].content[0].annotations
        assert (cited.type, cited.url, cited.start_index, cited.end_index) == ("url_citation", "https://a.test", 0, 6)
        added = [event.annotation for event in events if event.type == "response.output_text.annotation.added"]
        assert [each["url"] for each in map(dict[str, Any], added)] == ["https://a.test"] * 2
        again: Any = [user, *(item.model_dump() for item in output), {"role": "user", "content": "And now?"}]
        answer = client.responses.create(model="anthropic/of-anthropic", input=again)
    assert answer.output_text == "Done."
    for own in ("signed-by-a", "srvtoolu_1", "kept-by-a", '"stdout":"2\\n"'):
        assert own in sent(bus)


def test_a_client_of_messages_reads_searches_and_code_of_openai_and_gives_them_back(bus: LocalBus) -> None:
    with anthropic.Anthropic(api_key="k", base_url=bus.gateway, max_retries=0) as client:
        user: Any = {"role": "user", "content": "hi"}
        model = "openai-responses/of-openai-responses"
        with client.messages.stream(model=model, max_tokens=100, messages=[user]) as stream:
            message = stream.get_final_message()
        found: list[Any] = list(message.content)
        assert [block.type for block in found] == [
            *("thinking", *["server_tool_use", "web_search_tool_result"] * 2),
            *("server_tool_use", "code_execution_tool_result", "text"),
        ]
        assert (found[3].name, found[3].input) == ("web_search", {"query": "weather in b"})
        assert found[6].content.stdout == "2"
        assert [each.url for each in found[7].citations] == ["https://b.test"] * 2
        again: Any = [
            user,
            {"role": "assistant", "content": [block.model_dump() for block in found]},
            {"role": "user", "content": "And now?"},
        ]
        answer = client.messages.create(model=model, max_tokens=100, messages=again)
    assert [block.type for block in answer.content] == ["text"]
    for own in ("kept-by-b", "ws_1", "weather in b", "cntr_b"):
        assert own in sent(bus)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_of_chat_reads_what_gemini_cites_and_the_sound_of_another(bus: LocalBus, stream: bool) -> None:
    user: Any = {"role": "user", "content": "hi"}
    with openai.OpenAI(api_key="k", base_url=f"{bus.gateway}/v1", max_retries=0) as client:
        message: Any
        if stream:
            with client.chat.completions.stream(model="gemini/of-gemini", messages=[user]) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(model="gemini/of-gemini", messages=[user]).choices[0].message
    [cited] = message.annotations
    assert (cited.url_citation.url, cited.url_citation.start_index, cited.url_citation.end_index) == (
        *("https://c.test", 0, 5),
    )
    audio: Any = message.audio if isinstance(message.audio, dict) else message.audio.model_dump()
    assert (audio["data"], audio["tokenbus"]["media_type"]) == (SOUND_DATA, "audio/wav")


QUESTION: Json = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}


def parts_of(bus: LocalBus, model: str, method: str) -> list[Json]:
    url = f"{bus.gateway}/gemini/v1beta/models/{model}:{method}"
    body = httpx.post(url, json=QUESTION, headers={"x-goog-api-key": "k"}, timeout=60).json()
    chunks = body if isinstance(body, list) else [body]
    return [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]


@pytest.mark.parametrize("method", ["generateContent", "streamGenerateContent"])
def test_a_client_of_gemini_hears_what_lies_in_the_store(bus: LocalBus, method: str) -> None:
    [sound] = [part["inlineData"] for part in parts_of(bus, "gemini:of-gemini", method) if "inlineData" in part]
    assert sound == {"mimeType": "audio/wav", "data": SOUND_DATA}


@pytest.mark.parametrize("method", ["generateContent", "streamGenerateContent"])
def test_sound_for_which_the_gateway_has_no_room_is_at_its_address(method: str) -> None:
    with LocalBus("[gateway]\nmedia_bytes = 100\n") as small:
        small.model_says("of-gemini", Turn(says=Wire(stream=ANSWERS["gemini"])))
        [sound] = [p["fileData"] for p in parts_of(small, "gemini:of-gemini", method) if "fileData" in p]
        assert httpx.get(f"{small.gateway}{sound['fileUri']}", timeout=60).content == b64decode(SOUND_DATA)


def drawn() -> bytes:
    item = {"id": "ig_1", "type": "image_generation_call", "status": "completed", "result": PNG}
    response = {"id": "resp_1", "object": "response", "model": "gpt-real", "output": []}
    started = {**item, "status": "in_progress", "result": None}
    preview: Json = {"item_id": "ig_1", "output_index": 0, "partial_image_index": 0, "partial_image_b64": PNG}
    end = {**response, "status": "completed", "output": [item], "usage": {"input_tokens": 1, "output_tokens": 1}}
    events: list[Json] = [
        {"type": "response.created", "response": {**response, "status": "in_progress"}},
        {"type": "response.output_item.added", "output_index": 0, "item": started},
        {"type": "response.image_generation_call.partial_image", **preview},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": end},
    ]
    return sse(events, named=True)


def test_a_client_of_responses_sees_the_images_that_lie_in_the_store(bus: LocalBus) -> None:
    bus.model_says("draws", Turn(says=Wire(stream=drawn())))
    with openai.OpenAI(api_key="k", base_url=f"{bus.gateway}/v1", max_retries=0) as client:
        asked: Any = {"model": "openai-responses/draws", "input": "A cat", "tools": [{"type": "image_generation"}]}
        events: list[Any] = list(client.responses.create(**asked, stream=True))
        shown = [e.partial_image_b64 for e in events if e.type == "response.image_generation_call.partial_image"]
        response = events[-1].response
        again: Any = client.responses.retrieve(response.id)
        resumed: list[Any] = list(client.responses.retrieve(response.id, stream=True))
    for each in (response, again, resumed[-1].response):
        assert [item.result for item in each.output if item.type == "image_generation_call"] == [PNG]
    assert shown == [PNG]


def test_a_client_of_gemini_reads_what_anthropic_searched_for_and_ran(bus: LocalBus) -> None:
    body = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
    url = f"{bus.gateway}/gemini/v1beta/models/anthropic:of-anthropic:generateContent"
    [candidate] = httpx.post(url, json=body, headers={"x-goog-api-key": "k"}, timeout=60).json()["candidates"]
    assert [part["executableCode"]["code"] for part in candidate["content"]["parts"] if "executableCode" in part] == [
        "1+1"
    ]
    about = candidate["groundingMetadata"]
    assert about["webSearchQueries"][1] == "weather"
    assert {chunk["web"]["uri"] for chunk in about["groundingChunks"]} == {"https://a.test"}
    turns = [*body["contents"], candidate["content"], {"role": "user", "parts": [{"text": "And now?"}]}]
    [last] = httpx.post(url, json={"contents": turns}, headers={"x-goog-api-key": "k"}, timeout=60).json()["candidates"]
    assert last["content"]["parts"][0]["text"] == "Done."
    assert "srvtoolu_3" in sent(bus)
