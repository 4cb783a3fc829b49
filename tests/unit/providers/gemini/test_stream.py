"""Gemini's answers: what providers.md says of them, chunk by chunk."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import msgspec
import pytest

from tests.unit.providers.reading import answer, item, items, joined, read, sse
from tokenbus.events import normalized as n
from tokenbus.events.usage import Usage

HEAD = {"modelVersion": "gemini", "responseId": "r1"}
STOPPED = n.Done("stop", "STOP")
CALLED = n.Done("tool_use", "STOP")


def chunk(*parts: dict[str, Any], finish: str | None = None, **candidate: Any) -> dict[str, Any]:
    candidate_fields = {"content": {"role": "model", "parts": list(parts)}, "index": 0, **candidate}
    return {**HEAD, "candidates": [candidate_fields | ({"finishReason": finish} if finish else {})]}


def text(piece: str, **fields: Any) -> dict[str, Any]:
    return {"text": piece, **fields}


def function(signature: str | None = None, **call: Any) -> dict[str, Any]:
    return {"functionCall": call} | ({"thoughtSignature": signature} if signature else {})


def events_of(*chunks: Any) -> list[n.Normalized]:
    """The normalised events, without the Start."""
    start, *rest = read("gemini", sse(*chunks))
    assert start == n.Start("gemini", "r1")
    return rest


STOP = chunk(text(""), finish="STOP")


def test_text_and_thinking_follow_each_other() -> None:
    thought = {"thought": True}
    assert events_of(
        chunk(text("H", **thought)), chunk(text("m", **thought), text("Hel")), chunk(text("lo")), STOP
    ) == [
        n.BlockStart(0, "thinking"),
        n.ThinkingDelta(0, "H"),
        n.ThinkingDelta(0, "m"),
        n.BlockStop(0),
        n.BlockStart(1, "text"),
        n.TextDelta(1, "Hel"),
        n.TextDelta(1, "lo"),
        n.BlockStop(1),
        STOPPED,
    ]


def test_a_finish_reason_is_not_the_end_and_the_last_one_counts() -> None:
    last = {**HEAD, "candidates": [{"finishReason": "SAFETY"}]}
    events = events_of(chunk(text("a"), finish="STOP"), chunk(text("b"), finish="STOP"), last)
    assert events == [
        n.BlockStart(0, "text"),
        n.TextDelta(0, "a"),
        n.TextDelta(0, "b"),
        n.BlockStop(0),
        n.Done("content_filter", "SAFETY"),
    ]


@pytest.mark.parametrize(
    ("raw", "finish"),
    [
        ("STOP", "stop"),
        ("MAX_TOKENS", "length"),
        *((raw, "content_filter") for raw in ("SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII")),
        ("IMAGE_SAFETY", "content_filter"),
        ("MALFORMED_FUNCTION_CALL", "error"),
        ("UNEXPECTED_TOOL_CALL", "error"),
        ("OTHER", "unknown"),
        ("FAKE_ENUM", "unknown"),
    ],
)
def test_why_it_ended(raw: str, finish: Any) -> None:
    assert events_of(chunk(finish=raw)) == [n.Done(finish, raw)]


def test_what_a_filter_says_of_its_reasons_is_shown() -> None:
    ratings = [{"category": "X", "probability": "HIGH"}]
    events = events_of(chunk(finish="SAFETY", safetyRatings=ratings, finishMessage="No."))
    assert events == [
        n.Extra("gemini.finishMessage", '"No."'),
        n.Extra("gemini.safetyRatings", '[{"category":"X","probability":"HIGH"}]'),
        n.Done("content_filter", "SAFETY"),
    ]
    calm = [{"category": "X", "probability": "NEGLIGIBLE"}]
    said = events_of(chunk(finish="STOP", safetyRatings=ratings), chunk(safetyRatings=calm))
    assert said == [n.Extra("gemini.safetyRatings", '[{"category":"X","probability":"NEGLIGIBLE"}]'), STOPPED]


def test_a_blocked_prompt_ends_in_content_filter() -> None:
    feedback = {**HEAD, "promptFeedback": {"blockReason": "SAFETY"}}
    assert events_of(feedback) == [
        n.Extra("gemini.promptFeedback", '{"blockReason":"SAFETY"}'),
        n.Done("content_filter", "SAFETY"),
    ]
    assert events_of({**feedback, **chunk(finish="PROHIBITED_CONTENT")})[-1] == n.Done(
        "content_filter", "PROHIBITED_CONTENT"
    )


def test_a_call_is_complete_and_its_arguments_are_compact_for_every_layout() -> None:
    laid_out = msgspec.Raw(b'{ "city" : "Bonn",  "n": 1.0, "u": "\\u00fc"}')
    assert events_of(chunk(text("Wait"), function(id="x", name="f", args=laid_out)), STOP) == [
        n.BlockStart(0, "text"),
        n.TextDelta(0, "Wait"),
        n.BlockStop(0),
        n.ToolCallStart(1, "x", "f"),
        n.Opaque(1, "item_id", "x"),
        n.ToolCallDelta(1, '{"city":"Bonn","n":1.0,"u":"\\u00fc"}'),
        n.ToolCallDone(1),
        CALLED,
    ]


def test_a_call_without_id_or_arguments_gets_both() -> None:
    result = answer(read("gemini", sse(chunk(function(name="f")), chunk(function(name="f", args=None)), STOP)))
    assert result.calls == [("call_0", "f", "{}"), ("call_1", "f", "{}")]
    assert result.done_calls == 2


@pytest.mark.parametrize("finish", ["MAX_TOKENS", "SAFETY", "MALFORMED_FUNCTION_CALL", "OTHER"])
def test_calls_are_no_tool_use_if_the_finish_reason_is_a_failure(finish: str) -> None:
    terminal = events_of(chunk(function(name="f"), finish=finish))[-1]
    assert isinstance(terminal, n.Done)
    assert terminal.finish != "tool_use"


def streamed(*pieces: dict[str, Any]) -> list[n.Normalized]:
    return events_of(*(chunk(piece) for piece in pieces), STOP)


def test_arguments_in_pieces_are_one_call() -> None:
    def arg(path: str, value: str, more: bool = True) -> dict[str, Any]:
        return {"jsonPath": path, "stringValue": value, "willContinue": more}

    assert streamed(
        function("sig", id="x", name="f", willContinue=True),
        function(partialArgs=[arg("$.city", "New ")], willContinue=True),
        function(partialArgs=[arg("$.city", "Delhi"), arg("$.unit", "c", more=False)], willContinue=True),
        function(),
        function(),
        function(name="g"),
    ) == [
        n.ToolCallStart(0, "x", "f"),
        n.Opaque(0, "item_id", "x"),
        n.Opaque(0, "thought_signature", "sig"),
        n.ToolCallDelta(0, '{"city":"New '),
        n.ToolCallDelta(0, 'Delhi","unit":"c'),
        n.ToolCallDelta(0, '"}'),
        n.ToolCallDone(0),
        n.ToolCallStart(1, "call_1", "g", derived=True),
        n.ToolCallDelta(1, "{}"),
        n.ToolCallDone(1),
        CALLED,
    ]


def test_pieces_may_name_their_call_each_time_and_end_with_the_last() -> None:
    pieces = [
        function(name="f", partialArgs=[{"jsonPath": "$.a", "numberValue": 1}], willContinue=True),
        function(name="f", partialArgs=[{"jsonPath": "$.b", "nullValue": None}]),
    ]
    result = answer(read("gemini", sse(*(chunk(piece) for piece in pieces), STOP)))
    assert result.calls == [("call_0", "f", '{"a":1,"b":null}')]
    assert result.done_calls == 1


def test_a_call_whose_arguments_never_end_is_not_completed() -> None:
    result = answer(read("gemini", sse(chunk(function(name="f", willContinue=True)), STOP)))
    assert (result.open, result.done_calls, result.terminal) == ({0}, 0, STOPPED)


def test_a_signature_belongs_to_its_part() -> None:
    assert events_of(
        chunk(text("Hm", thought=True, thoughtSignature="s0")),
        chunk(text("a"), text("b", thoughtSignature="s1")),
        chunk(function("s2", name="f", args={})),
        chunk(function(name="g", args={}), finish="STOP"),
    ) == [
        n.BlockStart(0, "thinking"),
        n.ThinkingDelta(0, "Hm"),
        n.Opaque(0, "thought_signature", "s0"),
        n.BlockStop(0),
        n.BlockStart(1, "text"),
        n.TextDelta(1, "a"),
        n.TextDelta(1, "b"),
        n.Opaque(1, "thought_signature", "s1"),
        n.BlockStop(1),
        n.ToolCallStart(2, "call_2", "f", derived=True),
        n.Opaque(2, "thought_signature", "s2"),
        n.ToolCallDelta(2, "{}"),
        n.ToolCallDone(2),
        n.ToolCallStart(3, "call_3", "g", derived=True),
        n.ToolCallDelta(3, "{}"),
        n.ToolCallDone(3),
        CALLED,
    ]


@pytest.mark.parametrize("alone", [{"text": "", "thoughtSignature": "s"}, {"thoughtSignature": "s"}])
def test_a_signature_on_no_text_is_that_of_the_open_text(alone: dict[str, Any]) -> None:
    assert events_of(chunk(text("a")), chunk(alone, finish="STOP")) == [
        n.BlockStart(0, "text"),
        n.TextDelta(0, "a"),
        n.Opaque(0, "thought_signature", "s"),
        n.BlockStop(0),
        STOPPED,
    ]


@pytest.mark.parametrize("alone", [{"text": "", "thoughtSignature": "s"}, {"thoughtSignature": "s"}])
def test_a_signature_without_an_open_text_is_sent_back_at_its_place(alone: dict[str, Any]) -> None:
    json = msgspec.json.encode(alone).decode()
    events = events_of(chunk(alone), chunk(text("a"), finish="STOP"))
    assert events[:4] == [*item(0, "gemini.thoughtSignature", json), n.BlockStart(1, "text")]
    after_a_call = events_of(chunk(function("s0", name="f"), alone), STOP)
    assert items(after_a_call) == [("gemini.thoughtSignature", "", "", json)]


def test_two_signatures_of_one_text_are_two_parts() -> None:
    events = events_of(
        chunk(text("a", thoughtSignature="s0"), text("b", thoughtSignature="s1"), {"thoughtSignature": "s2"}), STOP
    )
    assert events == [
        n.BlockStart(0, "text"),
        n.TextDelta(0, "a"),
        n.Opaque(0, "thought_signature", "s0"),
        n.BlockStop(0),
        n.BlockStart(1, "text"),
        n.TextDelta(1, "b"),
        n.Opaque(1, "thought_signature", "s1"),
        n.BlockStop(1),
        *item(2, "gemini.thoughtSignature", '{"thoughtSignature":"s2"}'),
        STOPPED,
    ]


def test_what_the_provider_runs_itself_is_an_item_at_its_place() -> None:
    code = {"executableCode": {"language": "PYTHON", "code": "1"}, "thoughtSignature": "s"}
    result = {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "1"}}
    assert events_of(chunk(text("a"), code), chunk(result), chunk(text("b")), STOP) == [
        n.BlockStart(0, "text"),
        n.TextDelta(0, "a"),
        n.BlockStop(0),
        *item(1, "gemini.executableCode", msgspec.json.encode(code).decode(), "code_execution"),
        *item(2, "gemini.codeExecutionResult", msgspec.json.encode(result).decode(), "code_execution"),
        n.BlockStart(3, "text"),
        n.TextDelta(3, "b"),
        n.BlockStop(3),
        STOPPED,
    ]


def test_half_a_surrogate_pair_becomes_a_replacement_character_in_any_field() -> None:
    half = rb"\ud83d"
    unnamed = b'{"x":"%s","%s":1}' % (half, half)
    body = b'{"candidates":[{"content":{"parts":[{"text":"%s"},%s]},"finishReason":"STOP"}]}' % (half, unnamed)
    assert read("gemini", body)[2:] == [
        n.TextDelta(0, "\ufffd"),
        n.BlockStop(0),
        *item(1, "gemini.x", '{"x":"\ufffd","\ufffd":1}'),
        STOPPED,
    ]


def test_images_are_blocks_those_of_thoughts_drafts_and_other_media_items() -> None:
    def blob(kind: str, **fields: Any) -> dict[str, Any]:
        return {"inlineData": {"mimeType": kind, "data": "AAAA"}, **fields}

    assert events_of(
        chunk(blob("image/png", thought=True)), chunk(blob("image/png", thoughtSignature="s"), blob("video/mp4")), STOP
    ) == [
        n.BlockStart(0, "image"),
        n.Image(0, "image/png", "AAAA", final=True, draft=True),
        n.BlockStop(0),
        n.BlockStart(1, "image"),
        n.Image(1, "image/png", "AAAA", final=True),
        n.Opaque(1, "thought_signature", "s"),
        n.BlockStop(1),
        *item(2, "gemini.inlineData", '{"inlineData":{"mimeType":"video/mp4","data":"AAAA"}}'),
        STOPPED,
    ]


def test_sources_are_shown_with_the_text_that_is_open() -> None:
    events = events_of(
        chunk(text("a"), citationMetadata={"citations": [1]}),
        chunk(groundingMetadata={"g": 1}, urlContextMetadata={"u": 1}),
        STOP,
    )
    assert [e for e in events if isinstance(e, n.Extra)] == [
        n.Extra("gemini.citationMetadata", '{"citations":[1]}', 0),
        n.Extra("gemini.groundingMetadata", '{"g":1}', 0),
        n.Extra("gemini.urlContextMetadata", '{"u":1}', 0),
    ]


def test_only_the_first_candidate_is_the_answer() -> None:
    other = {"index": 1, "content": {"parts": [{"text": "b"}]}, "finishReason": "SAFETY"}
    both = {**HEAD, "candidates": [*chunk(text("a"), finish="STOP")["candidates"], other]}
    events = events_of(both)
    assert n.Extra("gemini.candidate", msgspec.json.encode(other).decode()) in events
    assert (events[1], events[-1]) == (n.TextDelta(0, "a"), STOPPED)


def test_counts_are_the_last_of_each_and_thoughts_are_never_subtracted() -> None:
    first: dict[str, object] = {
        "promptTokenCount": 5,
        "candidatesTokenCount": 1,
        "thoughtsTokenCount": 9,
        "totalTokenCount": 15,
    }
    second = {"promptTokenCount": 5, "candidatesTokenCount": 4, "totalTokenCount": 18, "cachedContentTokenCount": 2}
    usage = Usage(input=5, output=1, reasoning=9, total=15, raw=first)
    last = Usage(input=5, output=4, reasoning=9, total=18, cache_read=2, raw={**first, **second})
    events = events_of(
        {**chunk(), "usageMetadata": first}, {**chunk(), "usageMetadata": first}, {**STOP, "usageMetadata": second}
    )
    assert events == [n.UsageSeen(usage), n.UsageSeen(last), n.Done("stop", "STOP", last)]


@pytest.mark.parametrize(
    ("status", "code", "kind", "retryable"),
    [
        ("UNAUTHENTICATED", 401, "auth", False),
        ("PERMISSION_DENIED", 403, "auth", False),
        ("NOT_FOUND", 404, "not_found", False),
        ("INVALID_ARGUMENT", 400, "invalid_request", False),
        ("FAILED_PRECONDITION", 400, "invalid_request", False),
        ("RESOURCE_EXHAUSTED", 429, "rate_limit", True),
        ("UNAVAILABLE", 503, "overloaded", True),
        ("DEADLINE_EXCEEDED", 504, "timeout", True),
        ("INTERNAL", 500, "server", True),
        ("CANCELLED", 499, "server", True),
    ],
)
@pytest.mark.parametrize("framing", [b"data: %s\n\n", b"data: %s\r\n\r\n", b"%s", b"\n[%s]\n"])
def test_an_error_in_a_sound_answer_ends_the_attempt_by_its_status(
    status: str, code: int, kind: str, retryable: bool, framing: bytes
) -> None:
    error = msgspec.json.format(
        msgspec.json.encode({"error": {"code": code, "message": "m", "status": status}}), indent=0
    )
    for before in (b"", sse(chunk(text("partial"), finish="STOP"))):
        terminal = read("gemini", before + framing % error)[-1]
        assert isinstance(terminal, n.Failed)
        assert (terminal.error.code, terminal.error.kind, terminal.error.retryable) == (status.lower(), kind, retryable)


def test_line_ends_and_an_array_in_place_of_a_stream_are_no_matter() -> None:
    chunks = [chunk(text("a")), chunk(text("b"), finish="STOP")]
    wanted = read("gemini", sse(*chunks))
    assert read("gemini", sse(*chunks).replace(b"\n", b"\r\n")) == wanted
    assert read("gemini", msgspec.json.format(msgspec.json.encode(chunks))) == wanted
    assert read("gemini", sse(*chunks).rstrip()) == wanted
    assert read("gemini", sse(*chunks, b"data: [DONE]\n\n")) == wanted


def test_a_body_without_a_finish_reason_is_cut() -> None:
    result = answer(read("gemini", sse(chunk(text("a")))))
    assert (result.text, result.open, result.terminal) == ("a", {0}, n.Cut("the stream ended before finishReason"))
    assert read("gemini", b"") == [n.Cut("the body held no answer")]
    assert read("gemini", sse({**HEAD, "candidates": [{"content": {"missing-parts": True}}]}))[-1] == result.terminal


def test_an_unknown_chunk_is_shown() -> None:
    assert events_of(chunk(), {"odd": 1}, STOP) == [n.Extra("gemini.chunk", '{"odd":1}'), STOPPED]
    assert read("gemini", sse({"odd": 1}, STOP)) == [n.Start("gemini", "r1"), STOPPED]


@pytest.mark.parametrize(
    ("broken", "where"),
    [
        (b"data: {no}\n\n", "chunk"),
        (b"data: [1]\n\n", "chunk"),
        (chunk(text(5)), "chunk at $.candidates[0].content.parts[0].text"),  # pyright: ignore[reportArgumentType]
        (chunk(function(args={})), "functionCall"),
        (chunk(function(partialArgs=[])), "functionCall"),
        (chunk(function(name="f", partialArgs=[{"jsonPath": "a", "stringValue": "x"}])), "partialArgs"),
        ({**HEAD, "usageMetadata": {"a": 10**30}}, "usage"),
        ({**HEAD, "candidates": [{"index": 10**20}]}, "chunk at $.candidates[0].index"),
    ],
)
def test_a_broken_chunk_ends_the_attempt_and_names_its_place(broken: Any, where: str) -> None:
    terminal = read("gemini", sse(chunk(text("a")), broken, STOP))[-1]
    assert isinstance(terminal, n.Failed)
    assert (terminal.error.code, terminal.error.kind, terminal.error.where) == ("malformed", "protocol", where)


def test_a_whole_response_gives_the_events_of_the_stream_with_one_delta_a_block() -> None:
    usage = {"promptTokenCount": 1, "candidatesTokenCount": 2, "totalTokenCount": 3}
    call = function("s", id="x", name="f", args={"x": 1})
    whole = {**chunk(text("Hmm", thought=True), text("Look"), call, finish="STOP"), "usageMetadata": usage}
    streamed = sse(
        chunk(text("H", thought=True)),
        chunk(text("mm", thought=True)),
        chunk(text("Lo")),
        chunk(text("ok")),
        chunk(call),
        {**chunk(text(""), finish="STOP"), "usageMetadata": usage},
    )
    body = msgspec.json.format(msgspec.json.encode(whole))
    assert read("gemini", body, stream=False) == joined(read("gemini", streamed))
    assert read("gemini", body, stream=True) == read("gemini", body, stream=False)


def test_pieces_of_audio_are_one_block_for_each_type() -> None:
    def piece(data: bytes, mime: str = "audio/L16;rate=24000") -> dict[str, Any]:
        return {"inlineData": {"mimeType": mime, "data": b64encode(data).decode()}}

    silence = piece(bytes(2))
    pieces = [chunk(silence), chunk(silence, silence), chunk(text("So.")), chunk(piece(b"x", "audio/wav"))]
    assert events_of(*pieces, STOP) == [
        n.BlockStart(0, "audio"),
        n.Audio(0, "audio/L16;rate=24000", b64encode(bytes(6)).decode()),
        n.BlockStop(0),
        n.BlockStart(1, "text"),
        n.TextDelta(1, "So."),
        n.BlockStop(1),
        n.BlockStart(2, "audio"),
        n.Audio(2, "audio/wav", b64encode(b"x").decode()),
        n.BlockStop(2),
        STOPPED,
    ]
