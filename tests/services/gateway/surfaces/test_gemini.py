"""The surface of the Gemini API: the request to the bus, and the events for its clients."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import msgspec
import pytest
from hypothesis import given

from tests.rows import over_rows
from tests.services.gateway.logs import (
    BUSY,
    DONE,
    ROWS,
    Log,
    answered,
    any_log,
    call,
    log_of,
    recorded_events,
    streamed,
    text,
    visible_text,
)
from tests.services.gateway.rules import gateway_request, noted, refused, translated
from tests.unit.providers.corpus import Recording
from tokenbus.client.response import Response
from tokenbus.events import normalized as n
from tokenbus.events.frames import CancelRequested, ToolReturned
from tokenbus.events.public import TERMINAL, Completed
from tokenbus.events.requests import (
    Base64Source,
    DocumentPart,
    ExtraPart,
    FileSource,
    ImageOptions,
    ImagePart,
    Message,
    OutputSchema,
    TextPart,
    Thinking,
    ThinkingPart,
    Tool,
    ToolCallPart,
    ToolChoice,
    ToolResultPart,
    UrlSource,
)
from tokenbus_services.gateway.problem import Problem
from tokenbus_services.gateway.surfaces.contract import GatewayRequest
from tokenbus_services.gateway.surfaces.gemini import GeminiArray, GeminiSurface, model_answer, models_answer
from tokenbus_services.gateway.surfaces.gemini.answer import ArrayStream, EventStream, GeminiEcho, whole_response
from tokenbus_services.gateway.surfaces.gemini.request import json_schema
from tokenbus_services.gateway.surfaces.surface import ONLY_JSON

SURFACE = GeminiSurface()
ECHO = GeminiEcho(api="gemini", thoughts=True)
SIGNATURE = b64encode(b"signed").decode()
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "Now.", "parametersJsonSchema": SCHEMA}
HI = {"role": "user", "parts": [{"text": "Hi"}]}


def request(*, model: str = "gemini/flash", method: str = "generateContent", **more: Any) -> GatewayRequest:
    query, headers = more.pop("query", {}), more.pop("headers", {})
    fields = {"contents": [HI], **more}
    return gateway_request(fields, path={"model": model, "method": method}, query=query, headers=headers)


def config(**fields: Any) -> dict[str, Any]:
    return {"generationConfig": fields}


def model_says(*parts: Any) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def user_says(*parts: Any) -> dict[str, Any]:
    return {"parts": list(parts)}


def chunks_in(stream: bytes) -> list[dict[str, Any]]:
    """The chunks of a stream. Fails unless every line is `data: ` and one object, or empty."""
    assert stream.endswith(b"\n\n") or not stream
    events = stream.split(b"\n\n")[:-1]
    assert all(event.startswith(b"data: {") and b"\n" not in event and b"\r" not in event for event in events)
    return [msgspec.json.decode(event[6:]) for event in events]


def response_in(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the chunks of a stream, and check their form. `error` holds the error that ended it."""
    joined: dict[str, Any] = {"parts": [], "finish": None, "usage": None, "error": None}
    for chunk in chunks:
        assert joined["finish"] is None, "nothing follows the end"
        assert joined["error"] is None, "nothing follows the end"
        if error := chunk.get("error"):
            joined["error"] = error
            continue
        assert (chunk["responseId"], chunk["modelVersion"]) == ("r1", "m")
        (candidate,) = chunk["candidates"]
        assert candidate["content"]["role"] == "model"
        joined["parts"] += candidate["content"]["parts"]
        joined["finish"], joined["usage"] = candidate.get("finishReason"), chunk.get("usageMetadata")
    return joined


def response_of(log: Log, echo: GeminiEcho = ECHO) -> dict[str, Any]:
    joined = response_in(chunks_in(streamed(EventStream(noted(echo), "r1"), log)))
    if isinstance(log[-1], TERMINAL):
        array = msgspec.json.decode(streamed(ArrayStream(noted(echo), "r1"), log))
        assert response_in(array) == joined, "both kinds of stream say the same"
    return joined


def text_of(parts: list[dict[str, Any]], *, thought: bool = False) -> str:
    return "".join(part.get("text", "") for part in parts if part.get("thought", False) == thought)


# --- requests -----------------------------------------------------------------------------------------------------


def test_a_conversation_with_everything_in_it_is_translated() -> None:
    contents = [
        user_says({"text": "Look"}, {"inlineData": {"mimeType": "image/png", "data": "aGk=", "displayName": "x"}}),
        user_says(
            {"file_data": {"mime_type": "application/pdf", "file_uri": "https://a.example/b.pdf"}},
            {"fileData": {"mimeType": "image/png", "fileUri": "https://generativelanguage.googleapis.com/v1/files/f"}},
        ),
        model_says(
            {"text": "hm", "thought": True},
            {"text": "mm", "thought": True},
            {"text": "", "thought": True, "thoughtSignature": SIGNATURE},
            {"text": "One "},
            {"text": "moment"},
        ),
        model_says({"functionCall": {"id": "c1", "name": "weather", "args": {"city": "Bonn"}}}),
        model_says({"functionCall": {"name": "weather"}, "thoughtSignature": SIGNATURE}),
        user_says(
            {"functionResponse": {"name": "weather", "response": {"output": "rain"}}},
            {"functionResponse": {"id": "c1", "name": "weather", "response": {"error": "no station"}}},
            {"functionResponse": {"name": "weather", "response": {"result": 1}}},
        ),
    ]
    signed = {"thought_signature": SIGNATURE}
    generate = translated(SURFACE, request(contents=contents)).generate
    assert generate.messages == [
        Message(
            role="user",
            content=[
                TextPart(text="Look"),
                ImagePart(source=Base64Source(media_type="image/png", data="aGk=")),
                DocumentPart(source=UrlSource(url="https://a.example/b.pdf")),
                ImagePart(
                    source=FileSource(
                        file_id="https://generativelanguage.googleapis.com/v1/files/f", media_type="image/png"
                    )
                ),
            ],
        ),
        Message(
            role="assistant",
            content=[
                ThinkingPart(text="hmmm", opaque=signed),
                TextPart(text="One moment"),
                ToolCallPart(tool_id="c1", tool_name="weather", arguments='{"city":"Bonn"}'),
                ToolCallPart(tool_id="call_1", tool_name="weather", arguments="{}", opaque=signed),
            ],
        ),
        Message(
            role="user",
            content=[
                ToolResultPart(tool_id="c1", tool_name="weather", content="rain"),
                ToolResultPart(tool_id="c1", tool_name="weather", content="no station", is_error=True),
                ToolResultPart(tool_id="call_1", tool_name="weather", content='{"result":1}'),
            ],
        ),
    ]


def test_the_parameters_are_translated_in_either_spelling() -> None:
    answer = translated(
        SURFACE,
        request(
            method="streamGenerateContent",
            system_instruction={"parts": [{"text": "Be brief"}]},
            tools=[{"function_declarations": [WEATHER]}],
            toolConfig={"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["weather"]}},
            safetySettings=[{"category": "c", "threshold": "t"}],
            generation_config={
                "temperature": 0.5,
                "topP": 0.9,
                "topK": 7,
                "max_output_tokens": 100,
                "stopSequences": ["END"],
                "seed": 3,
                "presencePenalty": 0.5,
                "frequencyPenalty": 0.25,
                "candidateCount": 1,
                "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 2000},
                "responseMimeType": "application/json",
                "responseJsonSchema": SCHEMA,
            },
            headers={"x-server-timeout": "30"},
        ),
    )
    generate = answer.generate
    assert (answer.stream, answer.model, answer.echo["thoughts"]) == (True, "gemini/flash", True)
    assert (generate.provider, generate.model, generate.deadline_s) == ("gemini", "flash", 30)
    assert generate.system == [TextPart(text="Be brief")]
    assert generate.tools == [Tool(name="weather", description="Now.", parameters=SCHEMA)]
    assert (generate.tool_choice, generate.max_tool_depth) == (ToolChoice(name="weather"), 0)
    assert (generate.temperature, generate.top_p, generate.top_k, generate.max_tokens) == (0.5, 0.9, 7, 100)
    assert (generate.seed, generate.presence_penalty, generate.frequency_penalty) == (3, 0.5, 0.25)
    assert (generate.stop, generate.thinking) == (["END"], Thinking(budget_tokens=2000))
    assert generate.output_schema == OutputSchema(schema=SCHEMA)
    assert generate.extra == {"safetySettings": [{"category": "c", "threshold": "t"}]}


@pytest.mark.parametrize(
    ("asked_for", "thinking"),
    [
        ({}, None),
        ({"includeThoughts": True}, Thinking()),
        ({"thinkingBudget": 0}, Thinking(enabled=False)),
        ({"thinkingBudget": -1}, Thinking()),
        ({"thinkingLevel": "LOW"}, Thinking(effort="low")),
    ],
)
def test_thinking(asked_for: dict[str, Any], thinking: Thinking | None) -> None:
    assert translated(SURFACE, request(**config(thinkingConfig=asked_for))).generate.thinking == thinking


def test_images_are_asked_for_by_modality_and_come_inline() -> None:
    fields = request(**config(responseModalities=["TEXT", "IMAGE"], imageConfig={"aspectRatio": "16:9"}))
    assert translated(SURFACE, fields).generate.images == ImageOptions(aspect_ratio="16:9", deliver="base64")


def test_json_without_a_schema() -> None:
    assert translated(SURFACE, request(**config(responseMimeType="application/json"))).generate.json_object


def test_a_schema_of_the_api_becomes_json_schema() -> None:
    given = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": "STRING", "nullable": True, "enum": ["a"]},
            "list": {"type": "ARRAY", "items": {"type": "INTEGER"}, "minItems": "1"},
            "some": {"any_of": [{"type": "NUMBER"}, {"type": "BOOLEAN"}]},
        },
        "required": ["type"],
        "propertyOrdering": ["type", "list"],
    }
    assert json_schema(given, "here") == {
        "type": "object",
        "properties": {
            "type": {"type": ["string", "null"], "enum": ["a", None]},
            "list": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
            "some": {"anyOf": [{"type": "number"}, {"type": "boolean"}]},
        },
        "required": ["type"],
    }


def calling(**fields: Any) -> dict[str, Any]:
    return {"functionCallingConfig": fields}


C, F = "generationConfig", "toolConfig.functionCallingConfig"
FILE = {"fileData": {"fileUri": "https://a.example/b"}}
AUDIO = {"inlineData": {"mimeType": "audio/wav", "data": "aGk="}}
LATER = {**WEATHER, "behavior": "NON_BLOCKING"}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("key", {"query": {"key": "secret"}}),
    ("model", {"model": "nobody/knows"}),
    ("contents", {"contents": []}),
    ("contents[0].role", {"contents": [{"role": "system", "parts": []}]}),
    ("contents[0].parts[0].executableCode", {"contents": [model_says({"executableCode": {"code": "1"}})]}),
    ("contents[0].parts[0].functionCall", {"contents": [user_says({"functionCall": {"name": "f"}})]}),
    ("contents[0].parts[0].functionResponse", {"contents": [model_says({"functionResponse": {"name": "f"}})]}),
    ("contents[0].parts[0].videoMetadata", {"contents": [user_says({**FILE, "videoMetadata": {}})]}),
    ("contents[0].parts[0].inlineData.mimeType", {"contents": [user_says(AUDIO)]}),
    ("contents[0].parts[0].inlineData.mimeType", {"contents": [user_says({"inlineData": {"data": "aGk="}})]}),
    ("tools[0].googleSearch", {"tools": [{"googleSearch": {}}]}),
    ("tools[0].codeExecution", {"tools": [{"code_execution": {}}]}),
    ("tools[0].urlContext", {"tools": [{"urlContext": {}}]}),
    ("tools[0].functionDeclarations[0].behavior", {"tools": [{"functionDeclarations": [LATER]}]}),
    (f"{F}.mode", {"toolConfig": calling(mode="ODD")}),
    (f"{F}.allowedFunctionNames", {"toolConfig": calling(mode="ANY", allowedFunctionNames=["a", "b"])}),
    ("toolConfig.retrievalConfig", {"toolConfig": {"retrievalConfig": {}}}),
    ("safetySettings", {"safetySettings": [{}]}),
    ("cachedContent", {"cachedContent": "c"}),
    ("serviceTier", {"serviceTier": "flex"}),
    ("store", {"store": True}),
    ("routingConfig", {"routingConfig": {}}),
    ("modelArmorConfig", {"modelArmorConfig": {}}),
    ("continuationToken", {"continuationToken": "t"}),
    (f"{C}.automaticContinuation", config(automaticContinuation=True)),
    (f"{C}.candidateCount", config(candidateCount=2)),
    (f"{C}.responseModalities[0]", config(responseModalities=["AUDIO"])),
    (f"{C}.speechConfig", config(speechConfig={})),
    (f"{C}.responseLogprobs", config(responseLogprobs=True)),
    (f"{C}.logprobs", config(logprobs=3)),
    (f"{C}.imageConfig", config(imageConfig={"aspectRatio": "1:1"})),
    (f"{C}.imageConfig.personGeneration", config(responseModalities=["IMAGE"], imageConfig={"personGeneration": "x"})),
    (f"{C}.thinkingConfig.thinkingLevel", config(thinkingConfig={"thinkingLevel": "ENDLESS"})),
    (f"{C}.thinkingConfig.thinkingBudget", config(thinkingConfig={"thinkingBudget": -2})),
    (f"{C}.thinkingConfig.thinkingBudget", config(thinkingConfig={"thinkingBudget": 9, "thinkingLevel": "LOW"})),
    (f"{C}.responseMimeType", config(responseMimeType="text/x.enum")),
    ("x-server-timeout", {"headers": {"x-server-timeout": "soon"}}),
]  # fmt: skip


@pytest.mark.parametrize(("param", "changes"), REFUSED, ids=[f"{param}-{n}" for n, (param, _) in enumerate(REFUSED)])
def test_what_cannot_be_honoured_is_refused_by_name(param: str, changes: dict[str, Any]) -> None:
    problem = refused(SURFACE, request(**{"model": "anthropic/m", **changes}))
    assert problem.param == param
    answer = SURFACE.refusal(problem)
    error = msgspec.json.decode(answer.body)["error"]
    assert answer.status == error["code"] == (404 if param == "model" else 400)
    assert error["status"] == ("NOT_FOUND" if param == "model" else "INVALID_ARGUMENT")
    assert error["message"].startswith(f"{param}: ")


HINTS: list[tuple[str, dict[str, Any]]] = [
    ("labels", {"labels": {"a": "b"}}),
    (f"{C}.mediaResolution", config(mediaResolution="MEDIA_RESOLUTION_LOW")),
    (f"{C}.seed", config(seed=1)),
    (f"{C}.presencePenalty", config(presencePenalty=1)),
    (f"{C}.topK", {"model": "openai/m", **config(topK=3)}),
    ("tools.functionDeclarations.responseJsonSchema",
     {"tools": [{"functionDeclarations": [{**WEATHER, "response_json_schema": {"type": "object"}}]}]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "changes"), HINTS, ids=[path for path, _ in HINTS])
def test_a_hint_that_the_provider_has_no_place_for_is_left_out_and_named(path: str, changes: dict[str, Any]) -> None:
    assert translated(SURFACE, request(**{"model": "anthropic/m", **changes})).left_out == [path]


def test_json_of_any_schema_is_asked_for_in_words_where_the_provider_has_no_mode_for_it() -> None:
    generate = translated(SURFACE, request(model="anthropic/m", **config(responseMimeType="application/json"))).generate
    assert generate.json_object is False
    assert generate.system == ONLY_JSON


@pytest.mark.parametrize("model", ["openai/m", "responses/m"])
def test_json_is_asked_for_in_words_too_where_the_provider_refuses_without_the_word(model: str) -> None:
    """OpenAI's APIs: "messages must contain the word 'json' in some form"."""
    form = config(responseMimeType="application/json")
    found = translated(SURFACE, request(model=model, **form)).generate
    assert (found.json_object, found.messages[0]) == (True, Message(role="system", content=ONLY_JSON))
    said = [{"role": "user", "parts": [{"text": "As JSON, please."}]}]
    assert len(translated(SURFACE, request(model=model, **form, contents=said)).generate.messages) == 1
    of_gemini = translated(SURFACE, request(**form)).generate
    assert ONLY_JSON not in str(of_gemini)


def test_a_provider_of_this_api_gets_what_the_gateway_does_not_know() -> None:
    more = {"labels": {"a": "b"}, "serviceTier": "flex", "toolConfig": {"retrievalConfig": {"a": 1}}}
    code = {"executableCode": {"code": "1"}}
    audio = {"inlineData": {"mimeType": "audio/wav", "data": "aGk="}}
    generate = translated(
        SURFACE,
        request(
            contents=[user_says({"text": "a"}, audio, {"text": "b"}), model_says(code)],
            tools=[{"googleSearch": {}}, {"functionDeclarations": [WEATHER]}],
            **more,
            **config(speechConfig={"a": 1}, seed=2),
        ),
    ).generate
    assert generate.extra == {**more, "generationConfig": {"speechConfig": {"a": 1}}, "tools": [{"googleSearch": {}}]}
    assert (generate.seed, len(generate.tools)) == (2, 1)
    (_, heard, said), (ran,) = (message.content for message in generate.messages)
    assert isinstance(heard, ExtraPart)
    assert isinstance(ran, ExtraPart)
    assert (msgspec.json.decode(heard.json), msgspec.json.decode(ran.json)) == (audio, code)
    assert said == TextPart(text="b")


@pytest.mark.parametrize("name", ["cachedContent", "cached_content"])
def test_a_part_of_the_conversation_that_only_the_provider_has_is_refused(name: str) -> None:
    assert refused(SURFACE, request(**{name: "cachedContents/of-another-tenant"})).param == "cachedContent"


def test_bytes_in_the_url_safe_alphabet_reach_the_provider_in_the_standard_one() -> None:
    image = {"inlineData": {"mimeType": "image/png", "data": "-_-_-w"}}
    generate = translated(SURFACE, request(model="anthropic/m", contents=[user_says(image)])).generate
    assert generate.messages[0].content == [ImagePart(source=Base64Source(media_type="image/png", data="+/+/+w=="))]


# --- answers ------------------------------------------------------------------------------------------------------


def _start(api: str = "gemini", provider: str = "gemini") -> n.Start:
    return n.Start("m", "r", api=api, provider=provider)


def _thought(block: int, *pieces: str) -> list[Any]:
    deltas = [n.ThinkingDelta(block, piece) for piece in pieces]
    return [
        n.BlockStart(block, "thinking"),
        *deltas,
        n.Opaque(block, "thought_signature", SIGNATURE),
        n.BlockStop(block),
    ]


def test_thoughts_text_and_a_call_are_sent_in_order() -> None:
    called = [*call(2, "c1", "f", '{"a":', "1}"), n.Opaque(2, "item_id", "c1")]
    log = log_of(
        [_start(), *_thought(0, "h", "m"), *text(1, "Let ", "me"), *called, n.Done("tool_use", "STOP", DONE.usage)],
        max_tool_depth=0,
    )
    joined = response_of(log)
    assert (text_of(joined["parts"], thought=True), text_of(joined["parts"])) == ("hm", "Let me")
    assert [part["thoughtSignature"] for part in joined["parts"] if "thoughtSignature" in part] == [SIGNATURE]
    calls = [part["functionCall"] for part in joined["parts"] if "functionCall" in part]
    assert calls == [{"id": "c1", "name": "f", "args": {"a": 1}}]
    assert joined["finish"] == "STOP"
    assert joined["usage"] == {
        "promptTokenCount": 9,
        "candidatesTokenCount": 5,
        "thoughtsTokenCount": 2,
        "totalTokenCount": 16,
        "cachedContentTokenCount": 3,
    }
    status, whole = answered(whole_response(noted(ECHO), "r1"), log)
    assert status == 200
    assert whole["candidates"][0]["content"]["parts"] == [
        {"text": "hm", "thought": True, "thoughtSignature": SIGNATURE},
        {"text": "Let me"},
        {"functionCall": calls[0]},
    ]
    assert whole["usageMetadata"] == joined["usage"]


def test_thoughts_are_sent_only_if_the_client_asks_for_them() -> None:
    joined = response_of(log_of([_start(), *_thought(0, "hm"), *text(1, "Hi"), DONE]), GeminiEcho(api="gemini"))
    assert joined["parts"] == [{"text": "Hi"}, {"text": ""}]


def test_what_another_provider_wants_back_comes_back_as_it_was() -> None:
    begun = _start("anthropic", "anthropic")
    kept = [n.BlockStart(0, "thinking"), n.ThinkingDelta(0, "hm"), n.Opaque(0, "signature", "s"), n.BlockStop(0)]
    joined = response_of(log_of([begun, *kept, *text(1, "Hi"), DONE]))
    (message,) = translated(SURFACE, request(contents=[model_says(*joined["parts"][:2])])).generate.messages
    origin = {"api": "anthropic", "provider": "anthropic"}
    assert message.content == [ThinkingPart(text="hm", opaque={"signature": "s", **origin})]


def test_a_run_of_several_turns_is_one_answer_without_the_calls_that_the_bus_ran() -> None:
    first = [*text(0, "Let me look. "), *call(1, "t1", "f", "{}"), n.Done("tool_use")]
    log = log_of(first, [ToolReturned(1, "rain", False)], [*text(0, "It rains."), DONE])
    joined = response_of(log, GeminiEcho(api="gemini", bus_tools=True))
    assert joined["parts"] == [{"text": "Let me look. "}, {"text": "It rains."}, {"text": ""}]


def test_calls_left_over_by_the_limit_of_tool_turns_have_their_reason() -> None:
    left = log_of([*call(0, "t1", "f", "{}"), n.Done("tool_use")], max_tool_depth=0)
    joined = response_of(left, GeminiEcho(api="gemini", bus_tools=True))
    assert (joined["parts"], joined["finish"]) == ([{"text": ""}], "TOO_MANY_TOOL_CALLS")


def test_an_image_comes_inline() -> None:
    image = [n.BlockStart(0, "image"), n.Image(0, "image/png", "aGk=", final=True), n.BlockStop(0)]
    joined = response_of(log_of([_start(), *image, DONE]))
    assert joined["parts"][0] == {"inlineData": {"mimeType": "image/png", "data": "aGk="}}


def test_a_client_gets_nothing_of_an_attempt_that_failed_after_thinking_and_a_call() -> None:
    failing = [*_thought(0, "wrong"), *call(1, "t1", "f", "{}"), n.Failed(BUSY)]
    joined = response_of(log_of(failing, [*_thought(0, "right"), *text(1, "Hi"), DONE]))
    assert text_of(joined["parts"], thought=True) == "right"
    assert not [part for part in joined["parts"] if "functionCall" in part]


@pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        ([n.Cut("the stream ended")], "UNAVAILABLE", "stream_cut"),
        ([n.Failed(BUSY)], "UNAVAILABLE", "overloaded_error"),
        ([CancelRequested("enough")], "CANCELLED", "cancelled"),
    ],
)
def test_a_run_that_does_not_complete_ends_in_an_error(end: list[Any], status: str, code: str) -> None:
    log = log_of([*text(0, "Hal")[:-1]], end)
    error = response_of(log)["error"]
    assert (error["status"], error["details"][0]["reason"]) == (status, code)
    answer, whole = answered(whole_response(noted(ECHO), "r1"), log)
    assert (answer, whole["error"]) == (error["code"], error)


def test_an_answer_that_the_gateway_cannot_continue_ends_in_an_error() -> None:
    problem = Problem(status=503, code="gateway_restarting", message="later", kind="overloaded", run="r1")
    (chunk,) = chunks_in(b"".join(EventStream(noted(ECHO), "r1").broken(problem)))
    assert chunk["error"]["status"] == "UNAVAILABLE"
    (element,) = msgspec.json.decode(b"".join(ArrayStream(noted(ECHO), "r1").broken(problem)))
    assert element == chunk


def test_blank_space_keeps_both_kinds_of_stream_alive() -> None:
    log = log_of([*text(0, "a"), *text(1, "b"), DONE])
    for surface, encoder in (
        (SURFACE, EventStream(noted(ECHO), "r1")),
        (GeminiArray(), ArrayStream(noted(ECHO), "r1")),
    ):
        pieces = [piece for event in log for piece in encoder.feed(event)]
        kept_alive = surface.keep_alive + surface.keep_alive.join(pieces)
        if surface.media_type.startswith("application/json"):
            assert len(msgspec.json.decode(kept_alive)) == 3
        else:
            assert [line for line in kept_alive.split(b"\n") if line] == [piece.strip() for piece in pieces]


@over_rows("row", ROWS, ids=lambda row: row.file)
def test_every_recorded_stream_is_encoded_completely(row: Recording) -> None:
    log = recorded_events(row)
    echo = GeminiEcho(api=row.api_name, thoughts=True)
    joined = response_of(log, echo)
    assert text_of(joined["parts"]) == visible_text(log)
    if isinstance(log[-1], TERMINAL):
        assert bool(joined["finish"]) == isinstance(log[-1], Completed)
        assert bool(joined["error"]) == (not isinstance(log[-1], Completed))
    if isinstance(log[-1], Completed):
        assert text_of(joined["parts"], thought=True) == Response.of(log).thinking
        _, whole = answered(whole_response(noted(echo), "r1"), log)
        (candidate,) = whole["candidates"]
        assert text_of(candidate["content"]["parts"]) == visible_text(log)
        assert (candidate["finishReason"], whole["usageMetadata"]) == (joined["finish"], joined["usage"])


@given(any_log())
def test_any_log_gives_a_valid_answer_with_the_visible_text(log: Log) -> None:
    joined = response_of(log)
    assert bool(joined["finish"] or joined["error"]) == isinstance(log[-1], TERMINAL)
    assert text_of(joined["parts"]) == visible_text(log)


@given(any_log(policies=["restart", "continue", "fail"]))
def test_any_whole_answer_has_the_visible_text_or_is_an_error(log: Log) -> None:
    if isinstance(log[-1], TERMINAL):
        status, whole = answered(whole_response(noted(ECHO), "r1"), log)
        if isinstance(log[-1], Completed):
            assert text_of(whole["candidates"][0]["content"]["parts"]) == visible_text(log)
        else:
            assert whole["error"]["code"] == status >= 400


def test_models_are_listed_in_the_form_of_the_api() -> None:
    (model,) = msgspec.json.decode(models_answer(["gemini/flash"]).body)["models"]
    assert model["name"] == "models/gemini/flash"
    assert msgspec.json.decode(model_answer("gemini/flash").body) == model
