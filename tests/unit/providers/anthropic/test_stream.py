"""The Messages API's answers: what providers.md says of them, event by event."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.providers.reading import answer, decoder, item, items, joined, read, sse
from tokenbus.events import normalized as n
from tokenbus.events.usage import Usage

START = {"type": "message_start", "message": {"id": "msg_1", "model": "claude", "content": []}}
STOP = {"type": "message_stop"}


def block(index: int, **fields: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": fields}


def delta(index: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}


def end(index: int) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}


def stop(reason: str | None, **fields: Any) -> list[dict[str, Any]]:
    return [{"type": "message_delta", "delta": {"stop_reason": reason, **fields}}, STOP]


def text(index: int, *pieces: str) -> list[dict[str, Any]]:
    return [block(index, type="text", text=""), *(delta(index, "text_delta", text=p) for p in pieces), end(index)]


def events_of(*events: Any) -> list[n.Normalized]:
    """The normalised events, without the Start."""
    start, *rest = read("anthropic", sse(START, *events))
    assert start == n.Start("claude", "msg_1")
    return rest


def test_text_comes_in_its_pieces_and_an_empty_text_block_is_none() -> None:
    assert events_of(*text(0), *text(1, "", "Hel", "lo"), *stop("end_turn")) == [
        n.BlockStart(0, "text"),
        n.TextDelta(0, "Hel"),
        n.TextDelta(0, "lo"),
        n.BlockStop(0),
        n.Done("stop", "end_turn"),
    ]


def test_pings_and_done_markers_are_ignored_anywhere() -> None:
    ping = {"type": "ping"}
    noisy = read("anthropic", sse(ping, START, ping, b"data: [DONE]\n\n", *text(0, "a"), ping, *stop("end_turn")))
    assert noisy == read("anthropic", sse(START, *text(0, "a"), *stop("end_turn")))


def test_the_json_type_decides_not_the_event_name() -> None:
    named = b"event: ping\ndata: " + msgspec.json.encode(START) + b"\n\n"
    assert read("anthropic", named)[0] == n.Start("claude", "msg_1")


def test_a_signature_belongs_to_its_thinking_which_may_be_empty() -> None:
    events = events_of(
        block(0, type="thinking", thinking="", signature=""),
        delta(0, "thinking_delta", thinking="Hm"),
        delta(0, "thinking_delta", thinking=""),
        delta(0, "signature_delta", signature="s0"),
        end(0),
        block(1, type="thinking", thinking=""),
        delta(1, "signature_delta", signature="s1"),
        end(1),
        block(2, type="redacted_thinking", data="xyz"),
        end(2),
        *stop("end_turn"),
    )
    assert events[:-1] == [
        n.BlockStart(0, "thinking"),
        n.ThinkingDelta(0, "Hm"),
        n.Opaque(0, "signature", "s0"),
        n.BlockStop(0),
        n.BlockStart(1, "thinking"),
        n.Opaque(1, "signature", "s1"),
        n.BlockStop(1),
        n.BlockStart(2, "thinking"),
        n.Opaque(2, "redacted", "xyz"),
        n.BlockStop(2),
    ]


@pytest.mark.parametrize(
    ("prefilled", "pieces", "fragments"),
    [
        (b"{}", ["", '{"a"', ": 1}"], ['{"a"', ": 1}"]),
        (b"{}", [""], ["{}"]),
        (b"{}", [], ["{}"]),
        (b'{"a":  1.0}', [], ['{"a":  1.0}']),
        (b'{"a": 1}', ['{"b":2}'], ['{"b":2}']),
        (b"null", [], []),
    ],
)
def test_a_tool_calls_arguments_are_the_raw_text_of_its_deltas_or_else_of_its_start(
    prefilled: bytes, pieces: list[str], fragments: list[str]
) -> None:
    events = events_of(
        block(0, type="tool_use", id="t", name="f", input=msgspec.Raw(prefilled)),
        *(delta(0, "input_json_delta", partial_json=piece) for piece in pieces),
        end(0),
        *stop("tool_use"),
    )
    assert events == [
        n.ToolCallStart(0, "t", "f"),
        *(n.ToolCallDelta(0, fragment) for fragment in fragments),
        n.ToolCallDone(0),
        n.Done("tool_use", "tool_use"),
    ]


def test_further_fields_of_a_call_are_kept_to_be_sent_back() -> None:
    caller = msgspec.Raw(b'{"type":"code_execution_20250825","tool_id":"s"}')
    events = events_of(block(0, type="tool_use", id="t", name="f", input={}, caller=caller, other=None), end(0))
    assert n.Opaque(0, "fields", '{"caller":{"type":"code_execution_20250825","tool_id":"s"}}') in events


def test_a_server_tool_is_never_a_call_but_an_item_at_its_place() -> None:
    events = events_of(
        *text(0, "a"),
        block(1, type="server_tool_use", id="s", name="web_search", input={}),
        delta(1, "input_json_delta", partial_json='{"q":'),
        delta(1, "input_json_delta", partial_json=' "x"}'),
        end(1),
        block(2, type="web_search_tool_result", tool_use_id="s", content=[{"url": "u"}]),
        end(2),
        *text(3, "b"),
        *stop("end_turn"),
    )
    call = '{"type":"server_tool_use","id":"s","name":"web_search","input":{"q": "x"}}'
    result = '{"type":"web_search_tool_result","tool_use_id":"s","content":[{"url":"u"}]}'
    assert items(events) == [
        ("anthropic.server_tool_use", "web_search", "s", call),
        ("anthropic.web_search_tool_result", "web_search", "s", result),
    ]
    streamed = [event.fragment for event in events if isinstance(event, n.ToolCallDelta) and event.block == 1]
    assert streamed[1:] == ['{"q":', ' "x"}', "}"], "the input is emitted as it comes"
    assert answer([n.Start("m"), *events]).kinds == [
        "text",
        "anthropic.server_tool_use",
        "anthropic.web_search_tool_result",
        "text",
    ]
    assert events[-1] == n.Done("stop", "end_turn")


def test_a_server_tool_whose_input_was_cut_never_ends() -> None:
    events = events_of(
        block(0, type="server_tool_use", id="s", name="f", input={}),
        delta(0, "input_json_delta", partial_json='{"q":'),
        end(0),
        *stop("max_tokens"),
    )
    assert answer([n.Start("m"), *events]).open == {0}


def test_server_tools_may_give_more_in_all_than_one_may_give() -> None:
    def page(index: int) -> list[dict[str, Any]]:
        return [block(index, type="web_fetch_tool_result", content="x" * 1_000_000), end(index)]

    events = events_of(*(event for index in range(12) for event in page(index)), *stop("end_turn"))
    assert len(items(events)) == 12
    assert events[-1] == n.Done("stop", "end_turn")


def test_a_compaction_is_an_item_with_what_its_deltas_brought() -> None:
    events = events_of(
        block(0, type="compaction", content=None),
        delta(0, "compaction_delta", content=None),
        delta(0, "compaction_delta", content="Sum", encrypted_content="e"),
        end(0),
        *stop("end_turn"),
    )
    json = '{"type":"compaction","content":"Sum","encrypted_content":"e"}'
    assert events[:3] == item(0, "anthropic.compaction", json)


def test_citations_are_shown_at_once_and_go_back_with_their_block() -> None:
    events = events_of(
        block(0, type="text", text=""),
        delta(0, "citations_delta", citation={"url": "u"}),
        delta(0, "text_delta", text="a"),
        delta(0, "citations_delta", citation={"url": "v"}),
        end(0),
        delta(0, "citations_delta", citation={"url": "late"}),
        *stop("end_turn"),
    )
    assert events[:-1] == [
        n.BlockStart(0, "text"),
        n.Extra("anthropic.citation", '{"url":"u"}', 0),
        n.TextDelta(0, "a"),
        n.Extra("anthropic.citation", '{"url":"v"}', 0),
        n.Opaque(0, "citations", '[{"url":"u"},{"url":"v"}]'),
        n.BlockStop(0),
        n.Extra("anthropic.citation", '{"url":"late"}', 0),
    ]


def test_blocks_may_be_open_at_once() -> None:
    result = answer(
        read(
            "anthropic",
            sse(
                START,
                block(0, type="tool_use", id="a", name="f", input={}),
                block(1, type="tool_use", id="b", name="g", input={}),
                delta(1, "input_json_delta", partial_json="{"),
                delta(0, "input_json_delta", partial_json="{}"),
                delta(1, "input_json_delta", partial_json="}"),
                end(1),
                end(0),
                *stop("tool_use"),
            ),
        )
    )
    assert result.calls == [("a", "f", "{}"), ("b", "g", "{}")]
    assert result.done_calls == 2


def test_what_has_no_name_stays_visible() -> None:
    events = events_of(
        {"type": "weather", "sun": True},
        block(0, type="text", text=""),
        delta(0, "signature_delta", signature="x"),
        delta(0, "mood_delta", mood="good"),
        delta(0, "text_delta", text="a"),
        end(0),
        {"type": "message_delta", "delta": {"stop_reason": "tired", "stop_details": {"a": 1}}},
        STOP,
    )
    assert events == [
        n.Extra("anthropic.weather", '{"type":"weather","sun":true}'),
        n.Extra("anthropic.signature_delta", '{"type":"signature_delta","signature":"x"}'),
        n.Extra("anthropic.mood_delta", '{"type":"mood_delta","mood":"good"}'),
        n.BlockStart(0, "text"),
        n.TextDelta(0, "a"),
        n.BlockStop(0),
        n.Extra("anthropic.stop_details", '{"a":1}'),
        n.Done("unknown", "tired"),
    ]


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("refusal", "content_filter"),
        ("pause_turn", "pause"),
        ("something_new", "unknown"),
        ("tool_use", "unknown"),  # with no call there is nothing to use
        (None, "unknown"),
    ],
)
def test_stop_reasons_map_to_one_set_and_keep_their_raw_value(reason: str | None, finish: str) -> None:
    assert events_of(*stop(reason)) == [n.Done(finish, reason or "")]  # pyright: ignore[reportArgumentType]


def test_the_stop_string_is_reported() -> None:
    assert events_of(*stop("stop_sequence", stop_sequence="END")) == [
        n.Done("stop", "stop_sequence", stop_string="END")
    ]


def test_complete_calls_make_a_stop_a_tool_use_but_never_a_length() -> None:
    call = [block(0, type="tool_use", id="t", name="f", input={}), end(0)]
    assert events_of(*call, *stop("end_turn"))[-1] == n.Done("tool_use", "end_turn")
    assert events_of(*call, *stop("max_tokens"))[-1] == n.Done("length", "max_tokens")


def test_counts_are_the_last_that_are_not_null_and_never_a_sum() -> None:
    first = {"input_tokens": 5, "output_tokens": 1, "cache_read_input_tokens": 2, "service_tier": "standard"}
    last = {"input_tokens": 7, "output_tokens": 9, "cache_read_input_tokens": None}
    last |= {"output_tokens_details": {"thinking_tokens": 4}, "cache_creation_input_tokens": 3}
    start = {"type": "message_start", "message": {"id": "m", "model": "c", "usage": first}}
    events = read("anthropic", sse(start, {"type": "message_delta", "delta": {}, "usage": last}, STOP))
    raw = {**first, **last, "cache_read_input_tokens": 2}
    usage = Usage(input=7, output=9, reasoning=4, cache_read=2, cache_write=3, raw=raw)
    assert events[1] == n.UsageSeen(Usage(input=5, output=1, cache_read=2, raw=first))
    assert events[2:] == [n.UsageSeen(usage), n.Done("unknown", "", usage)]


def test_a_message_that_begins_again_voids_earlier_content() -> None:
    anew = {"type": "message_start", "message": {"id": "msg_2", "model": "claude"}}
    events = events_of(
        *text(0, "old"),
        block(1, type="tool_use", id="old", name="f", input={}),
        delta(1, "input_json_delta", partial_json='{"half'),
        anew,
        *text(0, "new"),
        *stop("end_turn"),
    )
    again = events.index(n.Start("claude", "msg_2", 2))
    assert events[again + 1 :] == [
        n.BlockStart(2, "text"),
        n.TextDelta(2, "new"),
        n.BlockStop(2),
        n.Done("stop", "end_turn"),
    ]


def test_a_repeated_message_start_is_ignored() -> None:
    assert events_of(*text(0, "a"), START, *text(1, "b"), *stop("end_turn")) == events_of(
        *text(0, "a"), *text(1, "b"), *stop("end_turn")
    )


def test_a_block_after_content_of_message_start_continues_it_or_is_the_next() -> None:
    message = {"id": "m", "model": "c", "content": [{"type": "text", "text": "Hi"}]}
    begin = {"type": "message_start", "message": message}
    for at, expected in ((0, {0: "Hi there"}), (1, {0: "Hi", 1: " there"})):
        later = (block(at, type="text", text=""), delta(at, "text_delta", text=" there"), end(at))
        events = read("anthropic", sse(begin, *later, STOP))
        texts = dict.fromkeys(expected, "")
        for event in events:
            if isinstance(event, n.TextDelta):
                texts[event.block] += event.text
        assert texts == expected
        assert isinstance(events[-1], n.Done)


def test_content_inside_of_message_start_counts() -> None:
    message = {
        "id": "m",
        "model": "c",
        "stop_reason": "tool_use",
        "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}],
    }
    assert read("anthropic", sse({"type": "message_start", "message": message}, STOP)) == [
        n.Start("c", "m"),
        n.ToolCallStart(0, "t", "f"),
        n.ToolCallDelta(0, '{"a":1}'),
        n.ToolCallDone(0),
        n.Done("tool_use", "tool_use"),
    ]


def test_a_call_without_its_stop_event_is_not_complete() -> None:
    result = answer(
        read(
            "anthropic",
            sse(
                START,
                block(0, type="tool_use", id="t", name="f", input={}),
                delta(0, "input_json_delta", partial_json="{}"),
                block(1, type="text", text="left open"),
                *stop("tool_use"),
            ),
        )
    )
    assert result.done_calls == 0
    assert result.open == {0}
    assert result.terminal == n.Done("unknown", "tool_use")


@pytest.mark.parametrize(
    ("stream", "where"),
    [
        (sse(START, b"data: {nonsense}\n\n"), "event"),
        (sse(START, b'data: {"type":"ping"\n\n'), "event"),
        (sse(START, b"data: 5\n\n"), "event"),
        (sse(START, {"no": "type"}), "event"),
        (sse(START, {"type": "content_block_stop"}), "event"),
        (sse(START, block(0, type="text", text=7)), "content block at $.text"),
        (sse(START, block(0, type="tool_use", id="t")), "content block"),
        (sse(START, block(0, type="tool_use", id="t", name="")), "content_block_start"),
        (sse(START, block(0, type="text"), block(0, type="text")), "content_block_start"),
        (sse(START, delta(3, "text_delta", text="lost")), "content_block_delta"),
        (sse(START, block(0, type="text"), delta(0, "text_delta")), "event at $.delta"),
        (sse(START, *text(0, "a"), delta(0, "text_delta", text="late")), "content_block_delta"),
        (sse(block(0, type="text")), "event"),
        (sse(STOP), "event"),
        (sse(START, {"type": "message_delta", "delta": {}, "usage": {"input_tokens": 10**30}}), "usage"),
    ],
)
def test_a_broken_event_ends_the_attempt_and_names_its_place(stream: bytes, where: str) -> None:
    terminal = read("anthropic", stream + sse(STOP))[-1]
    assert isinstance(terminal, n.Failed)
    assert (terminal.error.code, terminal.error.kind, terminal.error.where) == ("malformed", "protocol", where)
    assert terminal.error.raw
    assert not terminal.error.retryable


def test_an_event_without_a_type_is_an_error_that_says_so() -> None:
    terminal = read("anthropic", sse(START, {"no": "type"}))[-1]
    assert isinstance(terminal, n.Failed)
    assert "`type`" in terminal.error.message


@pytest.mark.parametrize(
    ("stream", "kind", "code"),
    [
        (
            sse({"type": "error", "error": {"type": "overloaded_error", "message": "O"}}),
            "overloaded",
            "overloaded_error",
        ),
        (sse({"error": {"type": "api_error", "message": "O"}}), "server", "api_error"),
        (sse(b'event: error\ndata: {"type":"error","error":{"type":"rate_limit_error"}}\n\n'), "rate_limit", None),
        (sse(b'error: {"code":503,"message":"down"}\n\n'), "overloaded", None),
        (b'[{\n  "error": {\n    "code": 429,\n    "message": "m"\n  }\n}\n]\n', "rate_limit", "http_429"),
        (sse(b"event: error\ndata: gone\n\n"), "unknown", "provider_error"),
    ],
)
def test_an_error_in_a_sound_answer_ends_the_attempt_first_or_later(stream: bytes, kind: str, code: str | None) -> None:
    for before in (b"", sse(START, *text(0, "partial"))):
        terminal = read("anthropic", before + stream + sse(*stop("end_turn")))[-1]
        assert isinstance(terminal, n.Failed)
        assert terminal.error.kind == kind
        assert code in (None, terminal.error.code)


def test_an_error_leaves_open_blocks_open() -> None:
    result = answer(
        read(
            "anthropic", sse(START, block(0, type="text", text="a"), {"type": "error", "error": {"type": "api_error"}})
        )
    )
    assert result.text == "a"
    assert result.open == {0}


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (b"", "the body held no message"),
        (sse(START), "the stream ended before message_stop"),
        (sse(START) + b'data: {"type":"mess', "the body ended inside an event"),
        (b"<html>502</html>", "the body held no message"),
    ],
)
def test_a_body_without_its_end_is_cut(stream: bytes, reason: str) -> None:
    assert read("anthropic", stream)[-1] == n.Cut(reason)


def test_nothing_comes_after_the_terminal_event_but_is_counted() -> None:
    reader = decoder("anthropic")
    assert isinstance(reader.feed(sse(START, STOP, START, *text(0, "late")))[-1], n.Done)
    assert reader.feed(sse(STOP)) + reader.end() + reader.end() == []


def test_a_whole_message_gives_the_events_of_the_stream_with_one_delta_a_block() -> None:
    usage = {"input_tokens": 3, "output_tokens": 4}
    whole = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": [
            {"type": "thinking", "thinking": "Hmm", "signature": "s"},
            {"type": "text", "text": "Look", "citations": [{"url": "u"}]},
            {"type": "server_tool_use", "id": "s", "name": "web", "input": {"q": 1}},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": usage,
    }
    start = {"type": "message_start", "message": {"id": "msg_1", "model": "claude", "usage": usage}}
    streamed = sse(
        start,
        block(0, type="thinking", thinking=""),
        delta(0, "thinking_delta", thinking="H"),
        delta(0, "thinking_delta", thinking="mm"),
        delta(0, "signature_delta", signature="s"),
        end(0),
        block(1, type="text", text=""),
        delta(1, "text_delta", text="Lo"),
        delta(1, "text_delta", text="ok"),
        delta(1, "citations_delta", citation={"url": "u"}),
        end(1),
        block(2, type="server_tool_use", id="s", name="web", input={}),
        delta(2, "input_json_delta", partial_json='{"q":1}'),
        end(2),
        block(3, type="tool_use", id="t", name="f", input={}),
        delta(3, "input_json_delta", partial_json='{"a'),
        delta(3, "input_json_delta", partial_json='":1}'),
        end(3),
        *stop("tool_use"),
    )
    body = msgspec.json.encode(whole)
    assert joined(read("anthropic", body, stream=False)) == joined(read("anthropic", streamed))


def test_half_a_surrogate_pair_is_read_as_a_replacement_character() -> None:
    halves = msgspec.Raw(b'"a\\ud83d \\\\ud83d \\ud83d\\ude00"')
    result = answer(read("anthropic", sse(START, block(0, type="text", text=halves), end(0), *stop("end_turn"))))
    assert result.text == "a\ufffd \\ud83d 😀"
