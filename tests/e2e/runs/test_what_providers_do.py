"""What providers do themselves, through a conversation of all of them under a redacting policy, in fleets of separate
and of chained services: nothing is lost that its owner takes back, and no event has a secret in it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e2e import judge
from tests.e2e.fleet import CHAINED, SEPARATE, Kind, ended, fleet
from tests.e2e.soundness import SOUND
from tests.unit.providers.test_sdk_types import sdk_accepts
from tokenbus import Client, Message
from tokenbus.bus.keys import Keys, PublicTopic
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import MockProvider, Reply, Script, ToolCall, Turn, Wire
from tokenbus_services.mock_provider.request import ModelRequest

FLEETS = pytest.mark.parametrize("workers", [SEPARATE, CHAINED], ids=["separate", "chained"])
SECRET = "sk-ant-api03-" + "a1B2" * 20
HIDDEN = "[redacted]"
TOOLS = """
[tools.sql]
kind = "python"
call = "tests.services.tools.sample_tools:echo"
description = "Runs SQL."
format = { type = "grammar", syntax = "lark", definition = "start: /.+/s" }
[policies.hide]
use = "tokenbus.policy:RedactSecrets"
"""
SOUND_DATA = b64encode(b"RIFF" + bytes(range(256))).decode()
Json = dict[str, Any]

# --- one answer of each API: a search, code and a text with a source, each once with a secret in it -------------


def sse(events: Iterable[Json], *, named: bool = False, done: bool = False) -> bytes:
    lines = [
        (b"event: " + event["type"].encode() + b"\n" if named else b"")
        + b"data: "
        + msgspec.json.encode(event)
        + b"\n\n"
        for event in events
    ]
    return b"".join(lines) + (b"data: [DONE]\n\n" if done else b"")


def of_anthropic() -> bytes:
    source = {"type": "web_search_result_location", "url": "https://a.test", "title": "A", "encrypted_index": "index-a"}
    printed = {"type": "code_execution_result", "stdout": "2\n", "stderr": "", "return_code": 0, "content": []}
    found = {"type": "web_search_result", "url": "https://a.test", "title": f"A {SECRET}", "page_age": None}
    plain = {**found, "title": "A", "encrypted_content": "kept-by-a"}
    page = {"type": "page_location", "document_index": 0, "start_page_number": 1, "end_page_number": 2}
    starts: list[tuple[Json, Sequence[Json]]] = [
        ({"type": "thinking", "thinking": "Hm", "signature": "signed-by-a"}, ()),
        *_searched("srvtoolu_1", f"A {SECRET}", [{**found, "encrypted_content": "spoilt"}]),
        *_searched("srvtoolu_2", "weather", [plain]),
        ({"type": "server_tool_use", "id": "srvtoolu_3", "name": "code_execution", "input": {"code": "1+1"}}, ()),
        ({"type": "code_execution_tool_result", "tool_use_id": "srvtoolu_3", "content": printed}, ()),
        ({"type": "text", "text": "Cited."}, [{**source, "cited_text": "A"}]),
        ({"type": "text", "text": "As written."}, [{**page, "cited_text": "Fact", "document_title": "Key facts"}]),
        ({"type": "text", "text": "So."}, [{**source, "cited_text": SECRET}]),
        ({"type": "text", "text": "Or so."}, [{**page, "cited_text": f"Key {SECRET}", "document_title": "Key facts"}]),
    ]
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-real", "content": []}
    events: list[Json] = [{"type": "message_start", "message": {**head, "usage": {"input_tokens": 1}}}]
    for index, (block, cited) in enumerate(starts):
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        for citation in cited:
            delta = {"type": "citations_delta", "citation": citation}
            events.append({"type": "content_block_delta", "index": index, "delta": delta})
        events.append({"type": "content_block_stop", "index": index})
    events.append({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 9}})
    return sse([*events, {"type": "message_stop"}], named=True)


def _searched(call: str, query: str, results: list[Json]) -> list[tuple[Json, Sequence[Json]]]:
    return [
        ({"type": "server_tool_use", "id": call, "name": "web_search", "input": {"query": query}}, ()),
        ({"type": "web_search_tool_result", "tool_use_id": call, "content": results}, ()),
    ]


def of_responses() -> bytes:
    def search(name: str, query: str) -> Json:
        action = {"type": "search", "query": query, "queries": [query]}
        return {"id": name, "type": "web_search_call", "status": "completed", "action": action}

    cited = {"type": "url_citation", "url": "https://b.test", "title": "B", "start_index": 0, "end_index": 5}
    part = {"type": "output_text", "text": "Cited.", "annotations": [cited, {**cited, "title": SECRET}]}
    outputs = [{"type": "logs", "logs": "2"}]
    items: list[Json] = [
        {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": "kept-by-b"},
        search("ws_1", f"B {SECRET}"),
        search("ws_2", "weather in b"),
        {
            "id": "ci_1",
            "type": "code_interpreter_call",
            "status": "completed",
            "container_id": "cntr_b",
            "code": "1+1",
            "outputs": outputs,
        },
        {"id": "msg_b1", "type": "message", "role": "assistant", "status": "completed", "content": [part]},
    ]
    response = {"id": "resp_1", "object": "response", "model": "gpt-real", "output": []}
    events: list[Json] = [{"type": "response.created", "response": {**response, "status": "in_progress"}}]
    for index, item in enumerate(items):
        events.append({"type": "response.output_item.added", "output_index": index, "item": {**item, "content": []}})
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    end = {**response, "status": "completed", "output": items, "usage": {"input_tokens": 1, "output_tokens": 1}}
    return sse([*events, {"type": "response.completed", "response": end}], named=True)


def of_gemini() -> bytes:
    web = [{"web": {"uri": "https://c.test", "title": f"C {SECRET}"}}]
    support = {"segment": {"startIndex": 0, "endIndex": 5, "text": "Cited"}, "groundingChunkIndices": [0]}
    grounding = {"webSearchQueries": [f"C {SECRET}"], "groundingChunks": web, "groundingSupports": [support]}
    parts: list[Json] = [
        {"executableCode": {"language": "PYTHON", "code": "1+1", "id": "c1"}, "thoughtSignature": "c2lnbmVkLWJ5LWM="},
        {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "2\n", "id": "c1"}},
        {"executableCode": {"language": "PYTHON", "code": f"key = '{SECRET}'", "id": "c2"}},
        {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "", "id": "c2"}},
        {"text": "Cited."},
        {"inlineData": {"mimeType": "audio/wav", "data": SOUND_DATA}},
    ]
    head = {"modelVersion": "gemini-real", "responseId": "g1"}
    chunks: list[Json] = [
        {**head, "candidates": [{"content": {"role": "model", "parts": [part]}, "index": 0}]} for part in parts
    ]
    chunks[4]["candidates"][0]["groundingMetadata"] = grounding
    last = {"content": {"role": "model", "parts": [{"text": ""}]}, "finishReason": "STOP", "index": 0}
    return sse([*chunks, {**head, "candidates": [last], "usageMetadata": {"promptTokenCount": 1}}])


def of_interactions() -> bytes:
    def step(index: int, start: Json, *deltas: Json) -> list[Json]:
        return [
            {"index": index, "step": start, "event_type": "step.start"},
            *({"index": index, "delta": delta, "event_type": "step.delta"} for delta in deltas),
            {"index": index, "event_type": "step.stop"},
        ]

    about: Json = {"id": "v1_a", "object": "interaction", "model": "gemini-real"}
    cited = {"type": "url_citation", "url": "https://d.test", "title": f"D {SECRET}", "start_index": 0, "end_index": 5}

    def search(number: int, query: str) -> list[Json]:
        name = f"d{number}"
        call = {"type": "google_search_call", "id": name, "arguments": {"queries": [query]}, "signature": "ZA=="}
        result = {"type": "google_search_result", "call_id": name, "result": [{"search_suggestions": query}]}
        return [*step(2 * number, call), *step(2 * number + 1, {**result, "signature": "ZA=="})]

    text = {"type": "text_annotation_delta", "annotations": [cited]}
    events = [
        {"interaction": {**about, "status": "in_progress"}, "event_type": "interaction.created"},
        *search(0, f"D {SECRET}"),
        *search(1, "weather in d"),
        *step(4, {"type": "model_output"}, {"type": "text", "text": "Cited."}, text),
        {"interaction": {**about, "status": "completed", "usage": {}}, "event_type": "interaction.completed"},
    ]
    return sse(events, done=True)


def of_chat(said: str) -> bytes:
    cited = {"type": "url_citation", "url_citation": {"url": "https://e.test", "title": SECRET, "start_index": 0}}
    deltas: list[Json] = [
        {"role": "assistant", "content": "Cited."},
        {"annotations": [cited]},
        {"audio": {"id": "audio_1", "transcript": said}},
        {"audio": {"data": SOUND_DATA, "expires_at": 1_900_000_000}},
    ]
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "gpt-real"}
    chunks: list[Json] = [{**head, "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    return sse([*chunks, {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}], done=True)


ANSWERS = {
    "anthropic": of_anthropic(),
    "openai-responses": of_responses(),
    "gemini": of_gemini(),
    "gemini-interactions": of_interactions(),
    "openai-chat": of_chat(f"The key is {SECRET}."),
}
SPOKEN = "Nothing of that is a secret."
"""What the first sound says: every later request has it as a text."""
PUBLIC: tuple[PublicTopic, ...] = ("visible", "chunks", "blocks", "runs")
OWN: dict[str, Sequence[str]] = {
    "anthropic": (
        "signed-by-a",
        "srvtoolu_1",
        "srvtoolu_2",
        "kept-by-a",
        "srvtoolu_3",
        '"stdout":"2\\n"',
        "index-a",
        "page_location",
    ),
    "openai-responses": ("kept-by-b", "ws_1", "ws_2", "weather in b", "cntr_b", "https://b.test"),
    "gemini": ("c2lnbmVkLWJ5LWM=", '"code":"1+1"', "codeExecutionResult"),
    "gemini-interactions": ('"id":"d0"', '"id":"d1"', "weather in d", "https://d.test"),
    "openai-chat": (),
}
"""What each provider takes back. Chat Completions have no place for any of it."""
SEALED = {
    "anthropic": ("signed-by-a", "kept-by-a"),
    "openai-responses": ("kept-by-b",),
    "gemini": ("c2lnbmVkLWJ5LWM=",),
}
"""What no other provider may get."""
MODELS = dict(zip(ANSWERS, ("claude-sonnet-4-5", "gpt-5", "gemini-3-pro", "gemini-3-pro", "gpt-audio"), strict=True))


def answer(request: ModelRequest) -> Turn:
    if request.prefill:
        return Turn(says=Reply(text="and so on."))
    if request.api == "openai-chat" and SPOKEN not in str(request.body):
        return Turn(says=Wire(stream=of_chat(SPOKEN)))
    return Turn(says=Wire(stream=ANSWERS[request.api]))


QUESTION: list[Json] = [
    {"type": "text", "text": "What does it say?"},
    {
        "type": "document",
        "title": "Key facts",
        "citations": True,
        "source": {"type": "base64", "media_type": "application/pdf", "data": b64encode(b"%PDF-1.4").decode()},
    },
]
"""A document whose citations are asked for."""


@FLEETS
async def test_a_conversation_of_all_providers_loses_nothing_and_tells_no_secret(
    server: Server, server_url: str, keys: Keys, tmp_path: Path, workers: tuple[Kind, ...]
) -> None:
    circle = list(ANSWERS)
    there_and_back = [*circle, "prefill", *reversed(circle)]
    messages: list[Message] = []
    runs: list[str] = []
    async with (
        MockProvider(choose=answer, keep=100) as provider,
        fleet(tmp_path, server_url, keys, provider.url, [*workers, "policy"], TOOLS),
        Client(server_url, prefix=keys.prefix) as bus,
    ):
        for number, api in enumerate(there_and_back):
            asked: Json = {"role": "user", "content": QUESTION if not number else f"Question {number}"}
            messages.append(msgspec.convert(asked, Message))
            mode: Json = (
                {"mode": "prefill", "provider": "anthropic", "participant": "Ada"}
                if api == "prefill"
                else {"provider": api}
            )
            model = MODELS["anthropic" if api == "prefill" else api]
            run = await bus.publish({**mode, "model": model, "messages": messages, "policies": ["hide"]})
            result = await run.result()
            assert result.status == "completed"
            runs.append(run.id)
            messages += await bus.messages(run)
        bodies = [exchange.request for exchange in provider.requests]
        logs = await ended(server.client, keys, runs)
        topics = [keys.topic(n, topic) for topic in PUBLIC for n in range(keys.partitions)]
        told = [await server.client.xrange(topic) for topic in topics]
    assert len(bodies) == len(runs), "no request was refused, and none was made twice"
    assert any(HIDDEN in str(log) for log in logs.values())
    assert SECRET not in str(told) + str(logs) + str(messages)
    for log in logs.values():
        judge.check(log)
    for name, run in zip(there_and_back, runs, strict=True):
        begun = [event["type"] for event in logs[run] if event["type"] in ("answering", "block_start", "usage")]
        assert begun[0] == "answering"
        [who] = [event for event in logs[run] if event["type"] == "answering"]
        assert name == "prefill" or "real" in str(who["model"])
    for api, request in zip(there_and_back, bodies, strict=True):
        assert request
        text = msgspec.json.encode(request.body).decode()
        assert SECRET not in text
        if api != "prefill":
            SOUND[request.api](request.body)
            sdk_accepts(request.api, msgspec.json.decode(text))
        others = [mark for other in SEALED if other != api for mark in SEALED[other]]
        assert not [mark for mark in others if mark in text], "what another provider signed"
    for api, request in zip(there_and_back[5:], bodies[5:], strict=True):
        assert request
        text = msgspec.json.encode(request.body).decode()
        assert SPOKEN in text
        if api == "prefill":
            continue
        assert [mark for mark in OWN[api] if mark not in text] == [], f"{api} gets back what is its own"


CALL = Reply(text="I look.", tool_calls=(ToolCall(name="sql", arguments="SELECT 'é' -- {not json", free_text=True),))


@FLEETS
@pytest.mark.parametrize("policies", [[], ["hide"]], ids=["", "judged"])
async def test_custom_tools_run_in_separate_and_in_chained_services(
    server: Server, server_url: str, keys: Keys, tmp_path: Path, workers: tuple[Kind, ...], policies: list[str]
) -> None:
    script = Script(name="by-bus", turns=(Turn(says=CALL), Turn(says=Reply(text="Done."))))
    async with (
        MockProvider([script]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, [*workers, "tools", "policy"], TOOLS),
        Client(server_url, prefix=keys.prefix) as bus,
    ):
        runs: dict[tuple[str, bool], str] = {}
        for api in ("openai-responses", "openai-chat"):
            for stream in (True, False):
                request: Json = {"provider": api, "model": "by-bus", "stream": stream, "tools": [{"name": "sql"}]}
                request["messages"] = [{"role": "user", "content": "hi"}]
                runs[api, stream] = (await bus.publish({**request, "policies": policies})).id
        logs: Any = await ended(server.client, keys, [*runs.values()])
    told: dict[tuple[str, bool], list[Any]] = {}
    for key, run in runs.items():
        judge.check(logs[run])
        done = [event for event in logs[run] if event["type"] == "block_complete"]
        told[key] = [(e["kind"], e.get("arguments"), e.get("content"), e.get("free_text")) for e in done]
        assert logs[run][-1]["type"] == "completed"
        of_turns = [[event for event in logs[run] if event["turn"] == turn] for turn in (0, 1)]
        begun = [next(e for e in events if e["type"] in ("answering", "block_start")) for events in of_turns]
        assert [event["type"] for event in begun] == ["answering"] * 2, "streamed and whole alike"
        assert [sum(e["type"] == "answering" for e in events) for events in of_turns] == [1, 1]
        assert [(event["model"], event["turn"]) for event in begun] == [("by-bus", 0), ("by-bus", 1)]
        assert all(event["response_id"] for event in begun)
    sql = CALL.tool_calls[0].arguments
    result = msgspec.json.encode({"input": sql}).decode()
    expected = [
        ("text", None, "I look.", None),
        ("tool_call", sql, None, True),
        ("tool_result", None, result, None),
        ("text", None, "Done.", None),
    ]
    assert all(each == expected for each in told.values()), told
