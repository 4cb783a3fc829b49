"""Chat Completions' answers, of OpenAI and of vendors: what providers.md says of them, event by event."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import msgspec
import pytest

from tests.unit.providers.reading import answer, joined, read, sse
from tokenbus.events.normalized import (
    Audio,
    BlockStart,
    BlockStop,
    Cut,
    Done,
    Extra,
    Failed,
    Image,
    Normalized,
    Opaque,
    RefusalDelta,
    Start,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallDone,
    ToolCallStart,
    TranscriptDelta,
    UsageSeen,
)
from tokenbus.events.quirks import Quirks
from tokenbus.events.usage import Usage

DONE = b"data: [DONE]\n\n"
HEAD = {"id": "c1", "object": "chat.completion.chunk", "model": "gpt"}


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {**HEAD, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def call(index: int | None, tool_id: str | None = None, name: str | None = None, arguments: Any = None) -> Any:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": tool_id, "type": "function", "function": function}


def calls(*pieces: Any) -> list[dict[str, Any]]:
    """A chunk for each piece, and a chunk with `finish_reason` tool_calls."""
    return [*(chunk(tool_calls=[piece]) for piece in pieces), chunk("tool_calls")]


def events_of(*events: Any, quirks: Quirks | None = None) -> list[Normalized]:
    """The normalised events, without the Start."""
    start, *rest = read("openai-chat", sse(*events), quirks=quirks)
    assert start == Start("gpt", "c1")
    return rest


def calls_of(*pieces: Any) -> list[tuple[str, str, str]]:
    result = answer(read("openai-chat", sse(*calls(*pieces), DONE)))
    assert result.terminal == Done("tool_use", "tool_calls")
    assert result.done_calls == len(result.calls)
    return result.calls


def test_text_ends_with_finish_reason_and_the_response_with_done() -> None:
    assert events_of(chunk(role="assistant", content=""), chunk(content="a"), chunk("stop", content="b"), DONE) == [
        BlockStart(0, "text"),
        TextDelta(0, "a"),
        TextDelta(0, "b"),
        BlockStop(0),
        Done("stop", "stop"),
    ]


def test_the_model_is_reported_even_if_the_first_chunk_has_none() -> None:
    first = {"id": "", "model": "", "choices": [], "prompt_filter_results": []}
    assert read("openai-chat", sse(first, chunk("stop"), DONE)) == [Start("gpt", "c1"), Done("stop", "stop")]


def test_counts_come_after_finish_reason_and_count() -> None:
    raw = {
        "prompt_tokens": 5,
        "completion_tokens": 6,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    usage = Usage(input=5, output=6, total=11, cache_read=2, cache_write=1, reasoning=3, raw=raw)
    counts = {**HEAD, "choices": [], "usage": raw}
    assert events_of(chunk("stop"), counts, counts, DONE) == [UsageSeen(usage), Done("stop", "stop", usage)]


@pytest.mark.parametrize(
    ("raw", "usage"),
    [
        ({"prompt_tokens": 5, "prompt_cache_hit_tokens": 4}, Usage(input=5, cache_read=4)),
        ({"prompt_tokens": 5, "cached_tokens": 4, "reasoning_tokens": 0}, Usage(input=5, cache_read=4, reasoning=0)),
        ({"prompt_tokens": 5, "completion_tokens_details": None}, Usage(input=5)),
        ({"prompt_tokens": "many", "total_tokens": 2.0}, Usage(total=2)),
        ({"prompt_tokens": 1e30, "completion_tokens": -1, "total_tokens": 0.5}, Usage()),
    ],
)
def test_counts_are_read_under_each_vendors_names(raw: dict[str, Any], usage: Usage) -> None:
    kept = {name: value for name, value in raw.items() if value is not None}
    events = events_of(chunk("stop"), {**HEAD, "choices": None, "usage": raw}, DONE)
    assert events[-1] == Done("stop", "stop", msgspec.structs.replace(usage, raw=kept))


def test_groqs_counts_are_read_from_its_own_field() -> None:
    events = events_of({**chunk("stop"), "x_groq": {"id": "r", "usage": {"prompt_tokens": 1}}}, DONE)
    assert events[-1] == Done("stop", "stop", Usage(input=1, raw={"prompt_tokens": 1}))


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("stop", "stop"),
        ("length", "length"),
        ("content_filter", "content_filter"),
        ("error", "error"),
        ("something_new", "unknown"),
        ("tool_calls", "unknown"),  # with no call there is nothing to use
    ],
)
def test_finish_reasons_map_to_one_set_and_keep_their_raw_value(reason: str, finish: str) -> None:
    assert events_of(chunk(reason), DONE)[-1] == Done(finish, reason)  # pyright: ignore[reportArgumentType]


def test_a_repeated_finish_reason_is_one_end_with_its_stop_string() -> None:
    last = chunk("stop", content="")
    last["choices"][0]["stop_reason"] = "END"
    events = events_of(chunk("stop", content="a"), last, DONE)
    assert events[2:] == [BlockStop(0), Done("stop", "stop", stop_string="END")]


def test_content_after_finish_reason_is_a_block_of_its_own() -> None:
    assert events_of(chunk("stop", content="a"), chunk(content="b"), DONE)[3:] == [
        BlockStart(1, "text"),
        TextDelta(1, "b"),
        BlockStop(1),
        Done("stop", "stop"),
    ]


# --- the end ------------------------------------------------------------------------------------------------------


def test_without_done_the_end_of_the_body_ends_it_if_a_finish_reason_came() -> None:
    assert events_of(chunk("stop", content="a"))[-1] == Done("stop", "stop")
    result = answer(read("openai-chat", sse(chunk(content="a"))))
    assert result.terminal == Cut("the stream ended before finish_reason and [DONE]")
    assert result.open == {0}


def test_done_without_a_finish_reason_is_an_end_of_which_no_call_runs() -> None:
    result = answer(read("openai-chat", sse(chunk(tool_calls=[call(0, "c", "f", "{}")]), DONE)))
    assert result.calls == [("c", "f", "{}")]
    assert result.terminal == Done("unknown", "")


def test_done_alone_and_an_empty_body_are_cut() -> None:
    assert read("openai-chat", DONE) == [Cut("[DONE] came before any content")]
    assert read("openai-chat", b": hello\n\n") == [Cut("the body held no answer")]


@pytest.mark.parametrize("reason", ["length", "content_filter", "error"])
def test_a_call_that_was_cut_by_length_or_filter_is_never_done(reason: str) -> None:
    result = answer(read("openai-chat", sse(chunk(tool_calls=[call(0, "c", "f", '{"a":1}')]), chunk(reason), DONE)))
    assert result.done_calls == 0
    assert result.open == {0}
    assert result.terminal == Done(reason, reason)  # pyright: ignore[reportArgumentType]


def test_a_stop_reason_with_a_call_is_tool_use() -> None:
    events = events_of(chunk(tool_calls=[call(0, "c", "f", "{}")]), chunk("stop"), DONE)
    assert events[-2:] == [ToolCallDone(0), Done("tool_use", "stop")]


# --- tool calls ---------------------------------------------------------------------------------------------------


def test_parallel_calls_come_interleaved_or_several_in_a_chunk() -> None:
    wanted = [("a", "f", '{"x":1}'), ("b", "g", "{}")]
    assert calls_of(call(0, "a", "f"), call(1, "b", "g"), call(0, None, None, '{"x"'), call(1, None, None, "{}"),
                    call(0, None, None, ":1}")) == wanted  # fmt: skip
    both = chunk("tool_calls", tool_calls=[call(0, "a", "f", '{"x":1}'), call(1, "b", "g", "{}")])
    assert answer(read("openai-chat", sse(both, DONE))).calls == wanted


def test_text_ends_where_a_call_begins_and_blank_content_beside_it_is_no_block() -> None:
    events = events_of(
        chunk(content="Let me look."),
        chunk(content="", tool_calls=[call(0, "a", "f", "")]),
        chunk("tool_calls", content="", tool_calls=[call(0, None, None, "{}")]),
        DONE,
    )
    assert events == [
        BlockStart(0, "text"),
        TextDelta(0, "Let me look."),
        BlockStop(0),
        ToolCallStart(1, "a", "f"),
        ToolCallDelta(1, "{}"),
        ToolCallDone(1),
        Done("tool_use", "tool_calls"),
    ]


@pytest.mark.parametrize("index", [None, 0])
def test_an_index_may_be_missing_or_the_same_for_all(index: int | None) -> None:
    assert calls_of(call(index, "a", "f", "{}"), call(index, "b", "f", "[]")) == [("a", "f", "{}"), ("b", "f", "[]")]


def test_without_an_index_a_piece_belongs_to_its_id_or_to_the_last_call() -> None:
    pieces = [call(None, "a", "f", "1"), call(None, "b", "g", "2"), call(None, "a", None, "3"), call(None, "", "", "4")]
    assert calls_of(*pieces) == [("a", "f", "13"), ("b", "g", "24")]


def test_the_id_may_be_empty_after_the_first_piece_or_never_come() -> None:
    assert calls_of(call(0, "a", "f", "{"), call(0, "", "", "}")) == [("a", "f", "{}")]
    assert calls_of(call(0, "", "f", "{}"), call(1, None, "g", "{}")) == [("call_0", "f", "{}"), ("call_1", "g", "{}")]


def test_the_name_may_come_later_or_be_repeated_and_never_changes() -> None:
    assert calls_of(call(0, "a", None, '{"'), call(0, "a", "f", "x"), call(0, "a", "f", '":1}')) == [
        ("a", "f", '{"x":1}')
    ]
    assert calls_of(call(0, "a", "f", "1"), call(0, None, "other", "2")) == [("a", "f", "12")]


def test_arguments_may_be_null_or_an_object() -> None:
    assert calls_of(call(0, "a", "f", None)) == [("a", "f", "")]
    assert calls_of(call(0, "a", "f", {"x": [1, None]})) == [("a", "f", '{"x":[1,null]}')]


def test_the_old_function_call_is_a_call() -> None:
    result = answer(
        read("openai-chat", sse(chunk(function_call={"name": "f", "arguments": "{}"}), chunk("function_call")))
    )
    assert result.calls == [("call_0", "f", "{}")]
    assert result.terminal == Done("tool_use", "function_call")


def test_an_empty_piece_is_nothing() -> None:
    assert events_of(chunk(tool_calls=[call(0), {}]), chunk("stop"), DONE) == [Done("stop", "stop")]


def test_a_call_that_never_gets_a_name_ends_the_attempt() -> None:
    terminal = events_of(*calls(call(0, "a", None, "{}")), DONE)[-1]
    assert isinstance(terminal, Failed)
    assert (terminal.error.code, terminal.error.where) == ("malformed", "tool_calls")


def test_what_a_call_carries_for_its_provider_is_kept() -> None:
    piece = {**call(0, "a", "f", "{}"), "extra_content": {"google": {"thought_signature": "s"}}}
    assert Opaque(0, "extra_content", '{"google":{"thought_signature":"s"}}') in events_of(*calls(piece), DONE)


# --- reasoning ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_is_thinking_and_ends_where_text_begins(field: str) -> None:
    events = events_of(chunk(content="", **{field: "Hm"}), chunk(content="a", **{field: ""}), chunk("stop"), DONE)
    assert events[:5] == [
        BlockStart(0, "thinking"),
        ThinkingDelta(0, "Hm"),
        BlockStop(0),
        BlockStart(1, "text"),
        TextDelta(1, "a"),
    ]


def test_the_same_reasoning_in_several_fields_is_read_once() -> None:
    details = [{"type": "reasoning.text", "text": "Hm"}]
    both = chunk(reasoning="Hm", reasoning_content=None, reasoning_details=details)
    later = chunk(reasoning=None, reasoning_content="Hm Hm")
    assert answer(read("openai-chat", sse(both, both, later, chunk("stop"), DONE))).thinking == "HmHm"
    only = chunk(reasoning_details=[*details, {"type": "reasoning.summary", "summary": " so"}])
    assert answer(read("openai-chat", sse(only, chunk("stop"), DONE))).thinking == "Hm so"


def test_a_vendors_own_field_of_reasoning_is_named_by_its_quirks() -> None:
    quirks = Quirks(reasoning_fields=("thoughts", "reasoning"))
    events = events_of(chunk(thoughts="Hm", reasoning="Hm"), chunk("stop", content="a"), DONE, quirks=quirks)
    assert events[1] == ThinkingDelta(0, "Hm")
    assert events[4] == TextDelta(1, "a")


def test_reasoning_details_are_sent_back_whole_with_the_thinking_if_they_contain_opaque_data() -> None:
    def piece(**fields: Any) -> dict[str, Any]:
        return chunk(reasoning_details=[{"type": "reasoning.text", "index": 0, "format": "f", **fields}])

    encrypted = chunk(content="a", reasoning_details=[{"type": "reasoning.encrypted", "index": 1, "data": "e"}])
    events = events_of(
        piece(text="H", signature=""), piece(text="m"), piece(signature="s"), encrypted, chunk("stop"), DONE
    )
    [kept] = [event for event in events if isinstance(event, Opaque)]
    assert (kept.block, kept.name) == (0, "reasoning_details")
    assert msgspec.json.decode(kept.value) == [
        {"type": "reasoning.text", "index": 0, "format": "f", "text": "Hm", "signature": "s"},
        {"type": "reasoning.encrypted", "index": 1, "data": "e"},
    ]


def test_encrypted_reasoning_alone_is_a_thinking_block_without_text() -> None:
    details = [{"type": "reasoning.encrypted", "data": "e"}]
    assert events_of(chunk("stop", content="a", reasoning_details=details), DONE)[3:] == [
        BlockStart(1, "thinking"),
        BlockStop(1),
        Opaque(1, "reasoning_details", '[{"type":"reasoning.encrypted","data":"e"}]'),
        Done("stop", "stop"),
    ]


# --- other content ------------------------------------------------------------------------------------------------


def test_content_may_be_a_list_of_parts() -> None:
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm"}, {"type": "text", "text": "."}]}
    parts = [thinking, {"type": "text", "text": "a"}, {"type": "reference", "ids": [1]}, {"type": "text", "text": ""}]
    assert events_of(chunk("stop", content=parts), DONE)[:-2] == [
        BlockStart(0, "thinking"),
        ThinkingDelta(0, "Hm."),
        BlockStop(0),
        BlockStart(1, "text"),
        TextDelta(1, "a"),
        Extra("openai-chat.content_part", '{"type":"reference","ids":[1]}', 1),
    ]


def test_a_refusal_is_shown_in_a_text_block() -> None:
    assert events_of(chunk(content=None, refusal="I "), chunk(refusal="can't"), chunk("stop"), DONE)[:4] == [
        BlockStart(0, "text"),
        RefusalDelta(0, "I "),
        RefusalDelta(0, "can't"),
        BlockStop(0),
    ]


def test_what_has_no_name_stays_visible() -> None:
    other = {**HEAD, "choices": [{"index": 1, "delta": {"content": "b"}}]}
    events = events_of(
        chunk(content="a", annotations=[{"url": "u"}], executed_tools=None, audio=[]),
        other,
        {"id": "x", "type": "ping"},
        chunk("stop"),
        DONE,
    )
    assert [event for event in events if isinstance(event, Extra)] == [
        Extra("openai-chat.annotations", '[{"url":"u"}]', 0),
        Extra("openai-chat.choice", '{"index":1,"delta":{"content":"b"}}'),
        Extra("openai-chat.event", '{"id":"x","type":"ping"}'),
    ]
    assert answer([Start("gpt"), *events]).text == "a"


def test_an_image_of_the_answer_is_an_image_block() -> None:
    images = [{"image_url": {"url": "data:image/png;base64,AAAA"}}, {"image_url": {"url": "https://x/y.png"}}]
    assert events_of(chunk("stop", images=images), DONE)[:4] == [
        BlockStart(0, "image"),
        Image(0, "image/png", "AAAA", final=True),
        BlockStop(0),
        Extra("openai-chat.image", '{"image_url":{"url":"https://x/y.png"}}'),
    ]


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        ({"error": {"message": "m", "type": "server_error", "code": None}}, "server", "server_error"),
        ({"error": {"message": "m", "code": 429}}, "rate_limit", "http_429"),
        ({"error": "down", "code": 503}, "overloaded", "http_503"),
        (
            {**HEAD, "error": {"code": 502, "message": "m"}, "choices": [{"finish_reason": "error"}]},
            "server",
            "http_502",
        ),
        ({"object": "error", "message": "m", "type": "BadRequestError", "code": 400}, "invalid_request", None),
        (b'event: error\ndata: {"error":{"message":"m","code":"model_not_found"}}\n\n', "not_found", "model_not_found"),
        (b'error: {"error":{"message":"m","code":500}}\n\n', "server", "http_500"),
    ],
)
def test_an_error_in_a_sound_answer_ends_the_attempt(error: Any, kind: str, code: str | None) -> None:
    for before in (b"", sse(chunk(content="partial"))):
        terminal = read("openai-chat", before + sse(error, chunk("stop"), DONE))[-1]
        assert isinstance(terminal, Failed)
        assert terminal.error.kind == kind
        assert code in (None, terminal.error.code)


@pytest.mark.parametrize(
    ("broken", "where"),
    [
        (b"data: {no}\n\n", "chunk"),
        (b"data: [1]\n\n", "chunk"),
        ({**HEAD, "choices": [{"delta": {"content": 5}}]}, "chunk at $.choices["),
        ({**HEAD, "choices": [{"delta": {"tool_calls": [{"index": 10**20}]}}]}, "chunk at $.choices["),
        ({**HEAD, "usage": {"a": 10**30}}, "usage"),
        (b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n', "event"),
        (b'data: {"choices":[{"delta":{"annotations":"\xff"}}]}\n\n', "event"),
        (b'data: {"x":' + b"[" * 5000 + b"]" * 5000 + b"}\n\n", "chunk"),
    ],
)
def test_a_broken_chunk_ends_the_attempt_and_names_its_place(broken: Any, where: str) -> None:
    terminal = read("openai-chat", sse(chunk(content="a"), broken, chunk("stop"), DONE))[-1]
    assert isinstance(terminal, Failed)
    assert (terminal.error.code, terminal.error.kind) == ("malformed", "protocol")
    assert terminal.error.where
    assert terminal.error.where.startswith(where)


def test_a_whole_response_gives_the_events_of_the_stream_with_one_delta_a_block() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    message = {
        "role": "assistant",
        "reasoning_content": "Hmm",
        "content": "Look",
        "refusal": None,
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}],
    }
    whole = {**HEAD, "object": "chat.completion", "usage": usage}
    whole["choices"] = [{"index": 0, "message": message, "finish_reason": "tool_calls"}]
    streamed = sse(
        chunk(role="assistant", content="", reasoning_content="H"),
        chunk(reasoning_content="mm"),
        chunk(content="Lo"),
        chunk(content="ok"),
        chunk(tool_calls=[call(0, "a", "f", "")]),
        chunk(tool_calls=[call(0, None, None, '{"x"')]),
        chunk(tool_calls=[call(0, None, None, ":1}")]),
        chunk("tool_calls"),
        {**HEAD, "choices": [], "usage": usage},
        DONE,
    )
    body = msgspec.json.format(msgspec.json.encode(whole))
    assert read("openai-chat", body, stream=False) == joined(read("openai-chat", streamed))
    assert read("openai-chat", body, stream=True) == read("openai-chat", body, stream=False)


def test_what_vendors_say_of_each_piece_is_with_its_block_and_of_the_answer_at_its_end() -> None:
    def piece(content: str, number: int, **more: Any) -> dict[str, Any]:
        probable = {"content": [{"token": content, "logprob": -number}]}
        choice = {"index": 0, "delta": {"content": content, "x": {"y": 1}}, "logprobs": probable}
        return {**HEAD, "choices": [choice], "provider": "Fireworks", "service_tier": "default", **more}

    events = events_of(
        piece("a", 1, citations=["u1"]),
        piece("a", 1, citations=["u1", "u2"], search_results=[{"title": "t"}], z=[]),
        chunk("stop"),
        DONE,
    )
    probable = Extra("openai-chat.logprobs", '{"content":[{"token":"a","logprob":-1}]}', 0)
    assert events == [
        BlockStart(0, "text"),
        TextDelta(0, "a"),
        probable,
        Extra("openai-chat.choices.delta.x", '{"y":1}', 0),
        TextDelta(0, "a"),
        probable,
        Extra("openai-chat.citations", '["u1","u2"]', 0),
        Extra("openai-chat.search_results", '[{"title":"t"}]', 0),
        BlockStop(0),
        Extra("openai-chat.service_tier", '"default"'),
        Extra("openai-chat.provider", '"Fireworks"'),
        Done("stop", "stop"),
    ]


def test_sources_of_an_answer_come_with_its_text_once_and_later_ones_with_its_end() -> None:
    sources = {"citations": ["u1"]}
    events = events_of(
        {**chunk(content="a"), **sources},
        {**chunk("stop"), **sources},
        {**chunk(), **sources},
        {**HEAD, "choices": [], **sources},
        DONE,
    )
    assert [event for event in events if isinstance(event, Extra)] == [Extra("openai-chat.citations", '["u1"]', 0)]
    late = events_of(chunk(content="a"), {**chunk("stop"), **sources}, {**chunk(), "citations": ["u1", "u2"]}, DONE)
    assert [(e.json, e.block) for e in late if isinstance(e, Extra)] == [('["u1"]', 0), ('["u1","u2"]', None)]
    alone = events_of({**chunk(), **sources}, chunk("stop"), DONE)
    assert [(e.json, e.block) for e in alone if isinstance(e, Extra)] == [('["u1"]', None)]


def test_what_was_said_of_a_cut_answer_comes_out() -> None:
    events = events_of({**chunk(content="a"), "service_tier": "flex"})
    assert events[-2] == Extra("openai-chat.service_tier", '"flex"')
    assert isinstance(events[-1], Cut)


def encoded(content: bytes) -> str:
    return b64encode(content).decode()


def test_a_spoken_answer_is_one_block_with_its_transcript_and_the_whole_sound() -> None:
    pieces = [b"RIFF\x00", b"\x00", b"", *(bytes([i % 256]) for i in range(300))]
    streamed = [
        chunk(audio={"id": "audio_1"}),
        chunk(audio={"transcript": "Hel"}),
        *(chunk(audio={"data": encoded(piece)}) for piece in pieces),
        chunk(audio={"transcript": "lo"}),
        chunk(audio={"expires_at": 1_900_000_000}),
        chunk("stop"),
        DONE,
    ]
    said = {"id": "audio_1", "data": encoded(b"".join(pieces)), "transcript": "Hello", "expires_at": 1_900_000_000}
    message = {"role": "assistant", "content": None, "audio": said}
    whole = {**HEAD, "object": "chat.completion", "choices": [{"message": message, "finish_reason": "stop"}]}
    sound = Audio(0, "audio/wav", encoded(b"".join(pieces)), "audio_1", 1_900_000_000)
    pieces_of_it, all_of_it = [TranscriptDelta(0, "Hel"), TranscriptDelta(0, "lo")], [TranscriptDelta(0, "Hello")]
    answers = [(streamed, pieces_of_it), ([*streamed[:-2], whole, DONE], pieces_of_it), ([whole], all_of_it)]
    for sent, transcript in answers:
        assert events_of(*sent) == [
            BlockStart(0, "audio"),
            *transcript,
            sound,
            BlockStop(0),
            Done("stop", "stop"),
        ]


def test_a_sound_that_is_cut_off_or_broken_is_no_sound() -> None:
    half = events_of(chunk(audio={"id": "a", "transcript": "Hel", "data": encoded(b"abc")}))
    assert [type(event) for event in half] == [BlockStart, TranscriptDelta, Cut]
    broken = events_of(chunk(audio={"data": "not base64"}), chunk("stop"), DONE)
    assert isinstance(broken[-1], Failed)
    assert broken[-1].error.where == "audio"


@pytest.mark.parametrize(
    ("head", "media_type"),
    [
        (b"ID3\x04", "audio/mpeg"),
        (b"\xff\xfb\x90", "audio/mpeg"),
        (b"\xff\xf1\x50", "audio/aac"),
        (b"OggS", "audio/ogg"),
        (b"fLaC", "audio/flac"),
        (b"\x00\x01", "audio/pcm"),
    ],
)
def test_the_media_type_of_a_sound_is_found_in_its_header(head: bytes, media_type: str) -> None:
    events = events_of(chunk(audio={"data": encoded(head + bytes(30))}), chunk("stop"), DONE)
    assert [event.media_type for event in events if isinstance(event, Audio)] == [media_type]
