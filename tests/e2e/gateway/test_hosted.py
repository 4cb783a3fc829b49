"""What a provider does itself, through the gateway: clients of other APIs read it with their own libraries, and what
they send back comes to the provider that made it."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest

from tests.e2e.runs.test_what_providers_do import ANSWERS
from tokenbus.testing import LocalBus
from tokenbus_services.mock_provider import Turn, Wire

Json = dict[str, Any]


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
        assert kinds == ["reasoning", *["web_search_call"] * 2, "code_interpreter_call", "message", "message"]
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
    assert audio["data"] or audio["tokenbus"]["blob_id"]


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
