"""What official clients do by themselves: loops over tools, tools in namespaces, deferred tools, statuses of errors."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest
from anthropic import beta_tool
from google import genai
from google.genai import errors, types

from tokenbus.testing import LocalBus, Reply, Status, ToolCall, Turn

Json = dict[str, Any]
SCHEMA: Json = {"type": "object", "properties": {"city": {"type": "string"}}}
USER: Any = [{"role": "user", "content": "hello"}]
APIS = ("anthropic", "openai-chat", "openai-responses", "gemini")
LOOK = Reply(text="I look.", tool_calls=(ToolCall(name="weather", arguments={"city": "Rome"}),))
STATUSES = (400, 413, 422, 429)


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus('[gateway]\ndrop_unsupported = ["odd", "extra.odd"]\n[retry]\nmax_attempts = 1\n') as running:
        running.model_says("calls", LOOK, "So: {tool_result}")
        found = Reply(tool_calls=(ToolCall(name="crm__find", arguments={"city": "Rome"}),))
        running.model_says("finds", found, "So: {tool_result}")
        running.model_says("text", Reply(text="one two three"))
        for status in STATUSES:
            running.model_says(f"status-{status}", Turn(says=Reply(), fault=Status(status=status)))
        yield running


@pytest.fixture(scope="module")
def messages(bus: LocalBus) -> Generator[anthropic.Anthropic]:
    with anthropic.Anthropic(api_key="k", base_url=bus.gateway, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def client(bus: LocalBus) -> Generator[openai.OpenAI]:
    with openai.OpenAI(api_key="k", base_url=f"{bus.gateway}/v1", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def google(bus: LocalBus) -> Generator[genai.Client]:
    with genai.Client(api_key="k", http_options=types.HttpOptions(base_url=f"{bus.gateway}/gemini")) as made:
        yield made


def sent_to(bus: LocalBus) -> Json:
    """The body of the provider's last request."""
    return msgspec.json.decode(bus.exchanges[-1].http_request.body)


@beta_tool
def weather(city: str) -> str:
    """The weather."""
    return f"Rain in {city}."


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_tool_runner_which_begins_a_thread_by_itself_runs_its_tools(
    messages: anthropic.Anthropic, api: str, stream: bool
) -> None:
    run: Any = messages.beta.messages.tool_runner
    said: Any = [*run(model=f"{api}/calls", max_tokens=99, tools=[weather], messages=USER, stream=stream)]
    last = said[-1].get_final_message() if stream else said[-1]
    assert (len(said), last.content[0].text) == (2, "So: Rain in Rome.")


def test_a_thread_of_messages_is_refused_in_the_words_that_make_its_client_send_the_whole_conversation(
    messages: anthropic.Anthropic,
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        messages.beta.messages.create(
            model="anthropic/text", max_tokens=9, messages=USER, extra_body={"thread": {"type": "create"}}
        )
    body: Any = caught.value.body
    assert body["error"]["details"]["error_code"] == "thread_unsupported_request"


def get_weather(city: str) -> str:
    """The weather."""
    return f"Rain in {city}."


@pytest.mark.parametrize("api", APIS)
def test_googles_automatic_function_calling_runs_a_python_function(
    google: genai.Client, api: str, bus: LocalBus
) -> None:
    looks = Reply(tool_calls=(ToolCall(name="get_weather", arguments={"city": "Rome"}),))
    bus.model_says("automatic", looks, "So: {tool_result}")
    config = types.GenerateContentConfig(tools=[get_weather])
    answer = google.models.generate_content(model=f"{api}/automatic", contents="hello", config=config)
    assert answer.text
    assert "Rain in Rome." in answer.text
    assert len(answer.automatic_function_calling_history or []) == 3


@pytest.mark.parametrize("api", APIS)
def test_tools_in_a_namespace_are_called_in_it_and_their_output_comes_back(
    client: openai.OpenAI, api: str, bus: LocalBus
) -> None:
    """As agents send their tools that speak Responses."""
    crm = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": []}
    crm["tools"] = [{"type": "function", "name": "find", "parameters": SCHEMA}]
    create: Any = client.responses.create
    first = create(model=f"{api}/finds", input=USER, tools=[crm])
    (call,) = (item for item in first.output if item.type == "function_call")
    assert (call.namespace, call.name) == ("crm", "find")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Ann"}
    second = create(model=f"{api}/finds", input=[*USER, *first.output, output], tools=[crm])
    assert second.output_text == "So: Ann"


@pytest.mark.parametrize("api", APIS)
def test_deferred_tools_are_tools_for_a_provider_that_has_no_search_for_them(
    messages: anthropic.Anthropic, api: str, bus: LocalBus
) -> None:
    tools: Any = [{"name": "weather", "input_schema": SCHEMA, "defer_loading": True}]
    answer: Any = messages.messages.with_raw_response.create(
        model=f"{api}/calls", max_tokens=99, messages=USER, tools=tools
    )
    assert [block.type for block in answer.parse().content] == ["text", "tool_use"]
    assert answer.headers.get("x-tokenbus-left-out") == (None if api == "anthropic" else "tools.defer_loading")
    assert ("defer_loading" in str(sent_to(bus))) == (api == "anthropic")


def test_an_empty_web_search_is_a_demand_and_never_dropped_in_silence(client: openai.OpenAI, bus: LocalBus) -> None:
    create: Any = client.chat.completions.create
    assert create(model="openai-chat/text", messages=USER, web_search_options={}).choices
    assert sent_to(bus)["web_search_options"] == {}
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="anthropic/text", messages=USER, web_search_options={})
    assert caught.value.param == "web_search_options"


SAYS: Json = {"id": "m", "role": "user", "content": "x", "parts": [{"type": "text", "text": "x"}]}
CHAT: Json = {"model": "gemini/text", "messages": USER}
RESPONSE: Json = {"model": "gemini/text", "input": "x"}
LEFT_OUT: dict[str, tuple[str, Json]] = {
    "Chat": ("/v1/chat/completions", CHAT),
    "Chat, streamed": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "Responses": ("/v1/responses", RESPONSE),
    "Responses, streamed": ("/v1/responses", {**RESPONSE, "stream": True}),
    "Responses, in the background": ("/v1/responses", {**RESPONSE, "background": True}),
    "Messages": ("/anthropic/v1/messages", {**CHAT, "max_tokens": 9}),
    "Gemini": ("/gemini/v1beta/models/anthropic/text:generateContent", {"contents": [{"parts": [{"text": "x"}]}]}),
    "Images": ("/v1/images/generations", {"model": "gemini/text", "prompt": "x"}),
    "useChat": ("/api/chat", {"id": "c", "model": "gemini/text", "messages": [SAYS]}),
    "AG-UI": (
        "/agui?model=gemini/text",
        {"threadId": "t", "runId": "r", "tools": [], "forwardedProps": {}, "messages": [SAYS | {"parts": None}]},
    ),
    "native": ("/runs", {**CHAT, "extra": {"odd": 1}}),
}


def test_what_is_left_out_is_named_in_the_header_of_each_surface_and_in_started(bus: LocalBus) -> None:
    with httpx.Client(base_url=bus.gateway) as http:
        for surface, (path, body) in LEFT_OUT.items():
            field = "extra.odd" if surface == "native" else "odd"
            answer = http.post(path, json=body if surface == "native" else {**body, "odd": 1})
            assert answer.headers.get("x-tokenbus-left-out") == field, (surface, answer.text)
            events = http.get(f"/runs/{answer.headers['x-tokenbus-run']}/events?names=false").text
            started = msgspec.json.decode(events.partition("data: ")[2].partition("\n")[0])
            assert started["metadata"]["gateway"]["left_out"] == [field], surface


@pytest.mark.parametrize("stream", [False, True])
def test_a_providers_status_is_that_of_the_clients_error(
    client: openai.OpenAI, messages: anthropic.Anthropic, google: genai.Client, stream: bool
) -> None:
    got: dict[str, list[int]] = {"chat": [], "responses": [], "messages": [], "gemini": []}
    for status in STATUSES:
        model = f"anthropic/status-{status}"
        create: Any = client.chat.completions.create
        with pytest.raises(openai.APIStatusError) as chat:
            create(model=model, messages=USER, stream=stream)
        respond: Any = client.responses.create
        with pytest.raises(openai.APIStatusError) as response:
            respond(model=model, input="hello", stream=stream)
        write: Any = messages.messages.create
        with pytest.raises(anthropic.APIStatusError) as message:
            write(model=model, max_tokens=9, messages=USER, stream=stream)
        generate = google.models.generate_content_stream if stream else google.models.generate_content
        with pytest.raises(errors.APIError) as content:
            list(generate(model=model, contents="hello"))
        got["chat"].append(chat.value.status_code)
        got["responses"].append(response.value.status_code)
        got["messages"].append(message.value.status_code)
        got["gemini"].append(content.value.code)
    assert got == {surface: list(STATUSES) for surface in got}
