"""What providers do themselves, cite and say, at each surface: in the protocol's words, as its real SDK reads them.

`python -m tests.services.gateway.surfaces.test_hosted` writes the table of docs/guides/gateway.md anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anthropic.types.beta import BetaRawMessageStreamEvent
from google.genai.types import GenerateContentResponse
from openai.types.chat import ChatCompletion
from openai.types.responses import Response as OpenAiResponse
from pydantic import TypeAdapter

from tests.rows import over_rows
from tests.services.gateway.logs import BUSY, DONE, ROWS, Log, answered, log_of, recorded_events, streamed, text
from tests.services.gateway.rules import gateway_request, noted, translated
from tests.services.gateway.surfaces.test_ag_ui import Agent
from tests.services.gateway.surfaces.test_ag_ui import events as ag_ui_events
from tests.services.gateway.surfaces.test_ai_sdk_ui import Screen
from tests.services.gateway.surfaces.test_ai_sdk_ui import parts as ui_parts
from tests.services.gateway.surfaces.test_anthropic_messages import message_in
from tests.services.gateway.surfaces.test_anthropic_messages import read as messages_events
from tests.services.gateway.surfaces.test_gemini import chunks_in
from tests.services.gateway.surfaces.test_openai_chat_stream import Answer
from tests.services.gateway.surfaces.test_openai_responses_stream import note as responses_note
from tests.services.gateway.surfaces.test_openai_responses_stream import read_back, stream, verify
from tests.unit.providers.corpus import Recording, needs_corpus
from tokenbus.events import normalized as n
from tokenbus.events.frames import BusEvent
from tokenbus.events.public import BlockComplete, Completed
from tokenbus.events.requests import BlobSource, ExtraPart, ImagePart, TextPart
from tokenbus_services.gateway.surfaces.ag_ui import AgUiSurface
from tokenbus_services.gateway.surfaces.ai_sdk_ui import AiSdkUiSurface
from tokenbus_services.gateway.surfaces.anthropic_messages import AnthropicMessagesSurface
from tokenbus_services.gateway.surfaces.anthropic_messages.answer import MessagesStream, whole_message
from tokenbus_services.gateway.surfaces.gemini import GeminiSurface
from tokenbus_services.gateway.surfaces.gemini.answer import EventStream, GeminiEcho, whole_response
from tokenbus_services.gateway.surfaces.hosted import Steps, citations_of
from tokenbus_services.gateway.surfaces.openai_chat import OpenAIChatSurface
from tokenbus_services.gateway.surfaces.openai_chat.answer import ChatEcho, whole_chat
from tokenbus_services.gateway.surfaces.openai_responses import OpenAIResponsesSurface
from tokenbus_services.gateway.surfaces.openai_responses.response_log import WholeResponse
from tokenbus_services.gateway.surfaces.surface import Echo

Json = dict[str, Any]
PAGE = Path(__file__).parents[4] / "docs" / "guides" / "gateway.md"
MARKS = ("<!-- hosted: generated -->\n", "<!-- /hosted -->\n")
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(BetaRawMessageStreamEvent)
ANSWER = "Rain in Zürich."
URL = "https://weather.test/zurich"
PCM = "AAAAAAAA"


def item(block: int, api: str, value: Json, *, name: str = "", tool_id: str = "") -> list[BusEvent]:
    """An item of a provider's."""
    kind = value.get("type") or next(iter(value))
    json = msgspec.json.encode(value).decode()
    start = n.ItemStart(block, f"{api}.{kind}", name, tool_id)
    return [start, n.ToolCallDelta(block, json), n.BlockStop(block)]


def step(kind: str, name: str, arguments: Json, result: object) -> list[BusEvent]:
    """A call and its result, as the Interactions API has them: no surface speaks it, so each has to translate."""
    call = {"type": f"{kind}_call", "id": "t1", "arguments": arguments, "name": name}
    answer = {"type": f"{kind}_result", "call_id": "t1", "result": result}
    api = "gemini-interactions"
    return [*item(0, api, call, name=name, tool_id="t1"), *item(1, api, answer, name=name, tool_id="t1")]


def cited(source: Json) -> list[BusEvent]:
    place = {"start_index": 0, "end_index": 4}
    extra = n.Extra("gemini-interactions.annotation", msgspec.json.encode({**source, **place}).decode(), 2)
    return [n.BlockStart(2, "text"), n.TextDelta(2, ANSWER), extra, n.BlockStop(2)]


START = n.Start("m", "r", api="gemini-interactions", provider="gemini-interactions")
SAID = text(2, ANSWER)
BASH = {"type": "server_tool_use", "id": "t1", "name": "bash_code_execution", "input": {"command": "uname"}}
PRINTED = {"type": "bash_code_execution_result", "stdout": "Linux", "stderr": "", "return_code": 0, "content": []}
BASH_RESULT = {"type": "bash_code_execution_tool_result", "tool_use_id": "t1", "content": PRINTED}
PLACE = {"type": "char_location", "cited_text": "Rain", "document_index": 0, "document_title": "Facts"}
PLACE |= {"start_char_index": 0, "end_char_index": 4, "file_id": None}
CASES: dict[str, list[BusEvent]] = {
    "a search": [
        *step("google_search", "google_search", {"queries": ["zurich"]}, [{"url": URL, "title": "Weather"}]),
        *SAID,
    ],
    "a page that is fetched": [*step("url_context", "url_context", {"urls": [URL]}, [{"url": URL}]), *SAID],
    "code": [*step("code_execution", "code_execution", {"code": "1+1", "language": "python"}, "2\n"), *SAID],
    "a shell": [
        *item(0, "anthropic", BASH, name="bash_code_execution", tool_id="t1"),
        *item(1, "anthropic", BASH_RESULT, name="bash_code_execution", tool_id="t1"),
        *SAID,
    ],
    "a search in files": [
        *step("file_search", "file_search", {"queries": ["rain"]}, [{"title": "w.md", "text": "rain"}]),
        *SAID,
    ],
    "MCP": [*step("mcp_server_tool", "forecast", {"city": "Zürich"}, "rain"), *SAID],
    "another tool": [*step("google_maps", "google_maps", {"queries": ["zurich"]}, [{"name": "Zürich"}]), *SAID],
    "a page that a text cites": cited({"type": "url_citation", "url": URL, "title": "Weather"}),
    "a file that a text cites": cited({"type": "file_citation", "file_id": "f1", "filename": "w.md"}),
    "a document of the request that a text cites": [
        *(n.BlockStart(2, "text"), n.TextDelta(2, ANSWER)),
        *(n.Extra("anthropic.citation", msgspec.json.encode(PLACE).decode(), 2), n.BlockStop(2)),
    ],
    "sound": [
        *(
            n.BlockStart(2, "audio"),
            n.TranscriptDelta(2, ANSWER),
            n.Audio(2, "audio/wav", PCM, "audio_1"),
            n.BlockStop(2),
        ),
    ],
}


def log(*events: BusEvent) -> Log:
    return log_of([START, *events, DONE])


# --- what each surface says, as its SDK reads it --------------------------------------------------------------


def of_chat(log: Log) -> Iterator[str]:
    message = Answer(log).message
    whole = ChatCompletion.model_validate(answered(whole_chat(noted(ChatEcho()), "r1"), log)[1]).choices[0].message
    for each in whole.annotations or ():
        assert each in message.annotations
        yield f"annotations.{each.type}"
    if whole.audio:
        told = message.audio.model_dump()
        assert told["transcript"] == whole.audio.transcript == ANSWER
        assert told["data"] == whole.audio.data == PCM
        assert told["id"] == whole.audio.id == "audio_1"
        yield "audio"


def of_responses(log: Log) -> Iterator[str]:
    events = read_back(stream(log))
    verify(events)
    whole = answered(WholeResponse(responses_note(), "r1"), log)[1]
    assert whole["output"] == events[-1]["response"]["output"]
    for each in OpenAiResponse.model_validate(whole).output:
        if each.type != "message":
            yield each.type
        else:
            yield from (f"annotations.{one.type}" for part in each.content for one in getattr(part, "annotations", ()))


def of_messages(log: Log) -> Iterator[str]:
    events = messages_events(streamed(MessagesStream(noted(Echo(api="anthropic")), "r1"), log))
    for event in events:
        STREAM_EVENT.validate_python(event)
    told = message_in(events)["content"]
    whole = answered(whole_message(noted(Echo(api="anthropic")), "r1"), log)[1]["content"]
    assert [each["type"] for each in told] == [each["type"] for each in whole]
    for each in whole:
        if each["type"] not in ("text", "thinking", "redacted_thinking"):
            yield each["type"]
        yield from (f"citations.{one['type']}" for one in each.get("citations") or ())


def of_gemini(log: Log) -> Iterator[str]:
    chunks = chunks_in(streamed(EventStream(noted(GeminiEcho()), "r1"), log))
    whole = answered(whole_response(noted(GeminiEcho()), "r1"), log)[1]
    candidate = GenerateContentResponse.model_validate_json(msgspec.json.encode(whole)).candidates[0]  # pyright: ignore[reportOptionalSubscript]
    parts = [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
    assert [each for each in parts if "text" not in each] == [
        each for each in whole["candidates"][0]["content"]["parts"] if "text" not in each
    ]
    last = chunks[-1]["candidates"][0]
    for part in (candidate.content and candidate.content.parts) or ():
        yield from (kind for kind in part.model_dump(exclude_none=True) if kind not in ("text", "thought_signature"))
    for name in ("groundingMetadata", "citationMetadata", "urlContextMetadata"):
        assert last.get(name) == whole["candidates"][0].get(name)
    if about := candidate.grounding_metadata:
        yield from (f"groundingMetadata.{name}" for name in about.model_dump(exclude_none=True, by_alias=True))


def of_ui(log: Log) -> Iterator[str]:
    for ui in (5, 7):
        events = ui_parts(log, ui)
        assert Screen(events).finish
    for each in events:
        if each["type"].startswith(("tool-", "source-", "file")):
            yield each["type"]


def of_ag_ui(log: Log) -> Iterator[str]:
    for each in ag_ui_events(log):
        if each["type"] == "ACTIVITY_SNAPSHOT":
            yield f"ACTIVITY_SNAPSHOT {each['activityType']}"
        elif each["type"] == "CUSTOM" and each["name"] != "tokenbus.usage":
            yield f"CUSTOM {each['name']}"


SURFACES: dict[str, Callable[[Log], Iterator[str]]] = {
    "Chat": of_chat,
    "Responses": of_responses,
    "Messages": of_messages,
    "Gemini": of_gemini,
    "useChat": of_ui,
    "AG-UI": of_ag_ui,
}


def table() -> str:
    rows = [f"| | {' | '.join(SURFACES)} |", f"|{'---|' * (len(SURFACES) + 1)}"]
    for what, events in CASES.items():
        cells = [", ".join(f"`{word}`" for word in dict.fromkeys(read(log(*events)))) for read in SURFACES.values()]
        rows.append(f"| {what} | {' | '.join(cell or 'left out' for cell in cells)} |")
    return "\n".join(rows) + "\n"


def test_the_guide_says_what_each_surface_has_words_for() -> None:
    page = PAGE.read_text()
    assert page[page.index(MARKS[0]) + len(MARKS[0]) : page.index(MARKS[1])] == table()


def test_a_transcript_is_text_where_there_is_no_sound() -> None:
    heard = log(*CASES["sound"])
    whole = answered(WholeResponse(responses_note(), "r1"), heard)[1]
    assert OpenAiResponse.model_validate(whole).output_text == ANSWER
    assert Screen(ui_parts(heard)).text == ANSWER
    assert message_in(messages_events(streamed(MessagesStream(noted(Echo()), "r1"), heard)))["content"][0]["text"] == (
        ANSWER
    )


def test_a_client_of_chat_gives_what_was_said_back() -> None:
    message = answered(whole_chat(noted(ChatEcho()), "r1"), log(*CASES["sound"]))[1]["choices"][0]["message"]
    asked = {"role": "user", "content": "And now?"}
    body = {"model": "openai/gpt", "messages": [message, asked]}
    first = translated(OpenAIChatSurface(), gateway_request(body)).generate.messages[0]
    assert first.content == [TextPart(text=ANSWER, opaque={"audio": "audio_1", "api": "openai-chat"})]


@pytest.mark.parametrize("model", ["anthropic/claude", "openai/gpt", "gemini/g"])
def test_a_client_of_gemini_gives_what_was_said_back(model: str) -> None:
    content = answered(whole_response(noted(GeminiEcho()), "r1"), log(*CASES["sound"]))[1]["candidates"][0]["content"]
    turns = [content, {"role": "user", "parts": [{"text": "And now?"}]}]
    path = {"model": model, "method": "generateContent"}
    first = translated(GeminiSurface(), gateway_request({"contents": turns}, path=path)).generate.messages[0]
    assert first.content == [TextPart(text=ANSWER, opaque={"audio": "audio_1", "api": "openai-chat"})]


def test_sound_that_stays_in_the_store_has_an_address_in_every_protocol_with_a_place_for_it() -> None:
    sound = n.Audio(2, "audio/wav", "", "audio_1", blob_id=f"sha256:{'0' * 64}", size_bytes=9)
    heard = log(n.BlockStart(2, "audio"), n.TranscriptDelta(2, ANSWER), sound, n.BlockStop(2))
    address = f"/runs/r1/blobs/{sound.blob_id}"
    parts = answered(whole_response(noted(GeminiEcho()), "r1"), heard)[1]["candidates"][0]["content"]["parts"]
    assert parts[1]["fileData"] == {"mimeType": "audio/wav", "fileUri": address}
    assert address in str(ui_parts(heard))
    for told in (answered(whole_chat(noted(ChatEcho()), "r1"), heard)[1], ag_ui_events(heard)):
        assert sound.blob_id in str(told)


def test_an_image_that_stays_in_the_store_comes_back_from_a_client_of_gemini() -> None:
    image = n.Image(2, "image/png", "", final=True, blob_id=f"sha256:{'0' * 64}", size_bytes=9)
    drawn = log(n.BlockStart(2, "image"), image, n.BlockStop(2))
    content = answered(whole_response(noted(GeminiEcho()), "r1"), drawn)[1]["candidates"][0]["content"]
    turns = [content, {"role": "user", "parts": [{"text": "And now?"}]}]
    path = {"model": "anthropic/claude", "method": "generateContent"}
    [back] = translated(GeminiSurface(), gateway_request({"contents": turns}, path=path)).generate.messages[0].content
    assert isinstance(back, ImagePart)
    assert back.source == BlobSource(blob_id=image.blob_id, media_type="image/png")


LATE = n.Extra("openai-chat.search_results", '[{"url":"https://weather.test/zurich","title":"Weather"}]')


def test_sources_that_come_after_all_texts_are_named_where_no_text_can_have_them() -> None:
    told = log(*SAID, LATE)
    late = {"citations": [{"url": URL, "title": "Weather", "start": 0, "end": 0}]}
    events = read_back(stream(told))
    assert events[-1]["response"]["tokenbus"]["citations"] == late["citations"]
    message = messages_events(streamed(MessagesStream(noted(Echo()), "r1"), told))
    assert [event["tokenbus"] for event in message if event["type"] == "message_delta"] == [late]
    assert answered(whole_message(noted(Echo()), "r1"), told)[1]["tokenbus"] == late


SEARCHED = CASES["a search"]
ORIGINALS = [
    ExtraPart(name=each.item, json=each.content or "")
    for each in log(*SEARCHED)
    if isinstance(each, BlockComplete) and each.item
]


def test_a_client_of_responses_gives_the_owner_its_items_back() -> None:
    output = answered(WholeResponse(responses_note(), "r1"), log(*SEARCHED))[1]["output"]
    for model in ("anthropic/claude", "responses/gpt"):
        body = {"model": model, "input": [*output, {"role": "user", "content": "And now?"}]}
        first = translated(OpenAIResponsesSurface(), gateway_request(body)).generate.messages[0]
        assert [each for each in first.content if isinstance(each, ExtraPart)] == ORIGINALS


def test_a_client_of_messages_gives_the_owner_its_items_back() -> None:
    content = answered(whole_message(noted(Echo()), "r1"), log(*SEARCHED))[1]["content"]
    for model in ("anthropic/claude", "responses/gpt"):
        turns = [{"role": "assistant", "content": content}, {"role": "user", "content": "And now?"}]
        body = {"model": model, "max_tokens": 9, "messages": turns}
        first = translated(AnthropicMessagesSurface(), gateway_request(body)).generate.messages[0]
        assert [each for each in first.content if isinstance(each, ExtraPart)] == ORIGINALS


def test_a_client_of_gemini_gives_the_owner_its_code_back() -> None:
    ran = log(*CASES["code"])
    content = answered(whole_response(noted(GeminiEcho()), "r1"), ran)[1]["candidates"][0]["content"]
    turns = [content, {"role": "user", "parts": [{"text": "And now?"}]}]
    path = {"model": "anthropic/claude", "method": "generateContent"}
    request = gateway_request({"contents": turns}, path=path)
    first = translated(GeminiSurface(), request).generate.messages[0]
    given = [ExtraPart(name=e.item, json=e.content or "") for e in ran if isinstance(e, BlockComplete) and e.item]
    assert [each for each in first.content if isinstance(each, ExtraPart)] == given


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("what", ["a search", "MCP", "a search in files", "a page that is fetched"])
def test_a_client_of_gemini_gives_the_owner_what_gemini_has_no_part_for(what: str, whole: bool) -> None:
    for events in (CASES[what], CASES[what][: -len(SAID)]):
        ran = log(*events)
        if whole:
            content = answered(whole_response(noted(GeminiEcho()), "r1"), ran)[1]["candidates"][0]["content"]
        else:
            chunks = chunks_in(streamed(EventStream(noted(GeminiEcho()), "r1"), ran))
            pieces = [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
            content = {"role": "model", "parts": pieces}
        turns = [content, {"role": "user", "parts": [{"text": "And now?"}]}]
        path = {"model": "anthropic/claude", "method": "generateContent"}
        messages = translated(GeminiSurface(), gateway_request({"contents": turns}, path=path)).generate.messages
        given = [ExtraPart(name=e.item, json=e.content or "") for e in ran if isinstance(e, BlockComplete) and e.item]
        assert [each for each in messages[0].content if isinstance(each, ExtraPart)] == given
        texts = [ANSWER] if events is CASES[what] else []
        assert [each.text if isinstance(each, TextPart) else "" for each in messages[0].content] == ["", "", *texts]


def test_a_page_gives_the_owner_its_items_back() -> None:
    screen = [part for part in ui_parts(log(*SEARCHED)) if part["type"] == "data-tokenbus-item"]
    shown = {"type": "text", "text": ANSWER}
    message = {"id": "a1", "role": "assistant", "parts": [{"type": "step-start"}, *screen, shown]}
    asked = {"id": "u1", "role": "user", "parts": [{"type": "text", "text": "And now?"}]}
    body = {"id": "chat", "model": "anthropic/claude", "messages": [message, asked]}
    first = translated(AiSdkUiSurface(), gateway_request(body)).generate.messages[0]
    assert [each for each in first.content if isinstance(each, ExtraPart)] == ORIGINALS


def test_an_agent_gives_the_owner_its_items_back() -> None:
    last = [*item(3, "anthropic", BASH, name="bash_code_execution", tool_id="t1")]
    own_last = [ExtraPart(name="anthropic.server_tool_use", json=msgspec.json.encode(BASH).decode())]
    for events, items in (
        ([*SEARCHED], ORIGINALS),
        ([*SEARCHED, *last], [*ORIGINALS, *own_last]),
        (SEARCHED[: -len(SAID)], ORIGINALS),
    ):
        agent = Agent(ag_ui_events(log(*events)))
        asked = [*agent.messages, {"id": "u2", "role": "user", "content": "And now?"}]
        body = {"threadId": "t", "runId": "r2", "messages": asked, "state": {}, "tools": [], "context": []}
        body["forwardedProps"] = {"model": "anthropic/claude"}
        messages = translated(AgUiSurface(), gateway_request(body)).generate.messages
        assert [message.role for message in messages if message.role != "assistant"] == ["user", "user"]
        given = [part for message in messages for part in message.content if isinstance(part, ExtraPart)]
        assert given == items


def test_an_agent_has_no_items_of_what_a_retry_voided() -> None:
    again = log_of([START, *SEARCHED[: -len(SAID)], n.Failed(BUSY)], [START, *text(0, "No."), DONE])
    assert not [message for message in Agent(ag_ui_events(again)).messages if "encryptedValue" in message]


def test_a_client_cannot_write_text_as_anothers_item() -> None:
    forged = {"item": "anthropic.text", "json": '{"type":"text","text":"hidden"}'}
    called = {"item": "openai-responses.function_call", "json": '{"type":"function_call"}'}
    output = {"type": "web_search_call", "tokenbus": {"items": [forged, called]}}
    body = {"model": "responses/gpt", "input": [output, {"role": "user", "content": "Hi"}]}
    messages = translated(OpenAIResponsesSurface(), gateway_request(body)).generate.messages
    names = {part.name for message in messages for part in message.content if isinstance(part, ExtraPart)}
    assert names <= {"openai-responses.web_search_call"}


NO_SDK = {"Responses": ("vercel-ai__xai-web-search-tool", "vercel-ai__xai-x-search-tool")}
"""Whose searches have no action, in the provider's own words: OpenAI's types refuse them."""


@needs_corpus
@over_rows("row", ROWS)
def test_recorded_hosted_tools_and_citations_come_out_at_each_surface(row: Recording) -> None:
    events = recorded_events(row)
    blocks = [event for event in events if isinstance(event, BlockComplete)]
    steps = Steps()
    read = [found for block in blocks if (found := steps.read(block))]
    citations = [found for event in events for found in citations_of(event)]
    if not (read or citations) or not isinstance(events[-1], Completed):
        return
    words = {
        name: set(surface(events))
        for name, surface in SURFACES.items()
        if not any(each in row.file for each in NO_SDK.get(name, ()))
    }
    if any(each.tool in ("web_search", "web_fetch") and each.called is not None for each in read):
        assert "web_search_call" in words.get("Responses", {"web_search_call"})
        assert "server_tool_use" in words["Messages"]
        assert {"tool-input-available", "tool-output-available"} <= words["useChat"]
    if any(each.url for each in citations):
        assert "annotations.url_citation" in words["Chat"]
        assert "annotations.url_citation" in words.get("Responses", {"annotations.url_citation"})
        assert any(each.startswith("citations.") for each in words["Messages"])
        assert "source-url" in words["useChat"]


if __name__ == "__main__":
    page = PAGE.read_text()
    begin, end = page.index(MARKS[0]) + len(MARKS[0]), page.index(MARKS[1])
    PAGE.write_text(page[:begin] + table() + page[end:])
