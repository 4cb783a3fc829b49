"""The Responses API's answers: what providers.md says of them, event by event."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.providers.reading import answer, items, joined, read, sse
from tokenbus.events import normalized as n
from tokenbus.events.usage import Usage

CREATED = {"type": "response.created", "response": {"id": "r1", "model": "gpt", "tools": []}}
COMPLETED = {"type": "response.completed", "response": {"id": "r1", "status": "completed"}}


def added(index: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "response.output_item.added", "output_index": index, "item": {"type": kind, **fields}}


def done(index: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {**added(index, kind, **fields), "type": "response.output_item.done"}


def event(name: str, index: int, **fields: Any) -> dict[str, Any]:
    return {"type": f"response.{name}", "output_index": index, **fields}


def text(index: int, piece: str, content_index: int = 0) -> dict[str, Any]:
    return event("output_text.delta", index, content_index=content_index, delta=piece)


def ended(status: str = "completed", **response: Any) -> dict[str, Any]:
    return {"type": f"response.{status}", "response": {"status": status, **response}}


def broken_off(reason: str) -> dict[str, Any]:
    return ended("incomplete", incomplete_details={"reason": reason})


def events_of(*events: Any) -> list[n.Normalized]:
    """The normalised events, without the Start."""
    start, *rest = read("openai-responses", sse(CREATED, *events))
    assert start == n.Start("gpt", "r1")
    return rest


STOPPED = n.Done("stop", "completed")


def test_text_is_distinguished_by_item_and_part() -> None:
    events = events_of(
        added(0, "message", id="m0"),
        event("content_part.added", 0, content_index=0),
        text(0, "Hel"),
        text(0, "lo"),
        text(0, "", 1),
        text(0, "again", 1),
        event("content_part.done", 0, content_index=0),
        done(0, "message", id="m0", content=[{"type": "output_text", "text": "Hello"}, {"text": "again"}]),
        added(1, "message", id="m1", phase="final_answer"),
        text(1, "more"),
        done(1, "message", id="m1", phase="final_answer"),
        COMPLETED,
    )
    assert events == [
        n.BlockStart(0, "text"),
        n.TextDelta(0, "Hel"),
        n.TextDelta(0, "lo"),
        n.BlockStart(1, "text"),
        n.TextDelta(1, "again"),
        n.Opaque(0, "item_id", "m0"),
        n.Opaque(1, "item_id", "m0"),
        n.BlockStop(0),
        n.BlockStop(1),
        n.BlockStart(2, "text", phase="final_answer"),
        n.TextDelta(2, "more"),
        n.Opaque(2, "item_id", "m1"),
        n.Opaque(2, "fields", '{"phase":"final_answer"}'),
        n.BlockStop(2),
        STOPPED,
    ]


def test_ids_that_change_from_event_to_event_are_no_matter() -> None:
    result = answer(
        read(
            "openai-responses",
            sse(
                CREATED,
                {**added(0, "message", id="a"), "sequence_number": 1},
                {**text(0, "Hel"), "item_id": "b"},
                {**text(0, "lo"), "item_id": "c"},
                done(0, "message", id="d"),
                COMPLETED,
            ),
        )
    )
    assert (result.text, result.kinds, result.terminal) == ("Hello", ["text"], STOPPED)


def test_what_comes_only_at_the_end_of_a_part_or_item_is_one_delta() -> None:
    for events in (
        [added(0, "message"), event("output_text.done", 0, content_index=0, text="whole"), done(0, "message")],
        [added(0, "message"), done(0, "message", content=[{"text": "whole"}])],
        [done(0, "message", content=[{"text": "whole"}])],
    ):
        assert events_of(*events, COMPLETED) == [
            n.BlockStart(0, "text"),
            n.TextDelta(0, "whole"),
            n.BlockStop(0),
            STOPPED,
        ]


def test_text_of_deltas_is_kept_if_the_end_differs() -> None:
    result = answer(
        read(
            "openai-responses",
            sse(
                CREATED,
                added(0, "message"),
                text(0, "said"),
                event("output_text.done", 0, content_index=0, text="told otherwise"),
                done(0, "message", content=[{"text": "told otherwise"}]),
                COMPLETED,
            ),
        )
    )
    assert result.text == "said"


def test_a_reasonings_parts_are_blocks_that_end_with_what_must_go_back_with_them() -> None:
    events = events_of(
        added(0, "reasoning", id="rs", summary=[], encrypted_content="unfinished"),
        event("reasoning_summary_part.added", 0, summary_index=0),
        event("reasoning_summary_text.delta", 0, summary_index=0, delta="One"),
        event("reasoning_summary_text.done", 0, summary_index=0, text="One"),
        event("reasoning_summary_part.done", 0, summary_index=0),
        event("reasoning_summary_text.done", 0, summary_index=1, text="Two"),
        event("reasoning_summary_part.done", 0, summary_index=1),
        done(0, "reasoning", id="rs", summary=[{"text": "One"}, {"text": "Two"}], encrypted_content="enc"),
        COMPLETED,
    )
    assert events == [
        n.BlockStart(0, "thinking"),
        n.ThinkingDelta(0, "One"),
        n.BlockStart(1, "thinking"),
        n.ThinkingDelta(1, "Two"),
        n.Opaque(0, "encrypted", "enc"),
        n.Opaque(0, "item_id", "rs"),
        n.Opaque(1, "item_id", "rs"),
        n.BlockStop(0),
        n.BlockStop(1),
        STOPPED,
    ]


def test_a_reasoning_may_hold_encrypted_content_alone() -> None:
    events = events_of(
        added(0, "reasoning", id="rs", summary=[]),
        done(0, "reasoning", id="rs", summary=[], encrypted_content="enc"),
        COMPLETED,
    )
    assert events == [
        n.BlockStart(0, "thinking"),
        n.Opaque(0, "encrypted", "enc"),
        n.Opaque(0, "item_id", "rs"),
        n.BlockStop(0),
        STOPPED,
    ]


def test_raw_reasoning_is_marked_and_emitted_once() -> None:
    summary = [{"type": "summary_text", "text": "Hm"}]
    content = [{"type": "reasoning_text", "text": "Hm"}, {"type": "reasoning_text", "text": "so"}]
    streamed = events_of(
        added(0, "reasoning"),
        event("reasoning_text.delta", 0, content_index=0, delta="H"),
        event("reasoning_text.delta", 0, content_index=0, delta="m"),
        event("content_part.done", 0, content_index=0),
        done(0, "reasoning", summary=summary),
        COMPLETED,
    )
    mark = n.Opaque(0, "fields", '{"type":"reasoning_text"}')
    assert streamed == [
        n.BlockStart(0, "thinking"),
        mark,
        n.ThinkingDelta(0, "H"),
        n.ThinkingDelta(0, "m"),
        n.BlockStop(0),
        STOPPED,
    ]
    whole = answer(
        read("openai-responses", sse(CREATED, done(0, "reasoning", summary=summary, content=content), ended()))
    )
    assert (whole.thinking, whole.kinds) == ("Hmso", ["thinking", "thinking"])


def test_a_call_has_its_name_from_its_announcement_and_its_arguments_from_deltas() -> None:
    events = events_of(
        added(0, "function_call", id="fc", call_id="c", name="f", arguments=""),
        event("function_call_arguments.delta", 0, delta='{"a"'),
        event("function_call_arguments.delta", 0, delta=": 1}"),
        event("function_call_arguments.done", 0, arguments='{"a": 1}'),
        done(0, "function_call", id="fc", call_id="c", name="f", arguments='{"a": 1}', caller={"type": "program"}),
        COMPLETED,
    )
    assert events == [
        n.ToolCallStart(0, "c", "f"),
        n.ToolCallDelta(0, '{"a"'),
        n.ToolCallDelta(0, ": 1}"),
        n.Opaque(0, "item_id", "fc"),
        n.Opaque(0, "fields", '{"caller":{"type":"program"}}'),
        n.ToolCallDone(0),
        n.Done("tool_use", "completed"),
    ]


@pytest.mark.parametrize(
    "events",
    [
        [
            added(0, "function_call", call_id="c", name="f"),
            event("function_call_arguments.done", 0, arguments='{"a":1}'),
            done(0, "function_call", call_id="c", name="f", arguments='{"a":1}'),
        ],
        [
            added(0, "function_call", call_id="c", name="f"),
            done(0, "function_call", call_id="c", name="f", arguments='{"a":1}'),
        ],
        [done(0, "function_call", call_id="c", name="f", arguments='{"a":1}')],
        [done(0, "function_call", call_id="c", name="f", arguments={"a": 1})],
        [
            added(0, "function_call"),
            event("function_call_arguments.delta", 0, delta='{"a":1}'),
            done(0, "function_call", call_id="c", name="f", arguments='{"a":1}'),
        ],
        [done(0, "function_call", id="c", name="f", arguments='{"a":1}')],
    ],
)
def test_a_call_is_sent_whole_for_any_order_of_its_parts(events: list[Any]) -> None:
    result = answer(read("openai-responses", sse(CREATED, *events, COMPLETED)))
    assert result.calls == [("c", "f", '{"a":1}')]
    assert result.done_calls == 1
    assert result.terminal == n.Done("tool_use", "completed")


def test_calls_that_interleave_and_end_out_of_order_keep_their_arguments() -> None:
    result = answer(
        read(
            "openai-responses",
            sse(
                CREATED,
                added(0, "function_call", call_id="a", name="f"),
                added(1, "function_call", call_id="b", name="g"),
                event("function_call_arguments.delta", 1, delta="2"),
                event("function_call_arguments.delta", 0, delta="1"),
                done(1, "function_call", call_id="b", name="g"),
                done(0, "function_call", call_id="a", name="f"),
                COMPLETED,
            ),
        )
    )
    assert result.calls == [("a", "f", "1"), ("b", "g", "2")]


def custom(*tools: dict[str, Any]) -> list[n.Normalized]:
    created = {"type": "response.created", "response": {"tools": list(tools)}}
    item = {"id": "ctc", "call_id": "c", "name": "sql", "input": ""}
    return read(
        "openai-responses",
        sse(
            created,
            added(0, "custom_tool_call", **item),
            event("custom_tool_call_input.delta", 0, delta="SELECT "),
            event("custom_tool_call_input.delta", 0, delta="1"),
            event("custom_tool_call_input.done", 0, input="SELECT 1"),
            done(0, "custom_tool_call", **{**item, "input": "SELECT 1"}),
            COMPLETED,
        ),
    )


def test_a_custom_tools_input_is_its_raw_argument_string() -> None:
    assert custom({"type": "custom", "name": "sql"})[1:] == [
        n.ToolCallStart(0, "c", "sql", free_text=True),
        n.ToolCallDelta(0, "SELECT "),
        n.ToolCallDelta(0, "1"),
        n.Opaque(0, "item_id", "ctc"),
        n.ToolCallDone(0),
        n.Done("tool_use", "completed"),
    ]


def test_a_custom_tool_that_the_request_did_not_have_was_run_by_the_provider() -> None:
    events = custom({"type": "x_search"})
    [(name, tool, tool_id, json)] = items(events)
    assert (name, tool, tool_id) == ("openai-responses.custom_tool_call", "sql", "c")
    assert msgspec.json.decode(json)["input"] == "SELECT 1"
    assert events[-1] == STOPPED


def test_a_server_tool_is_an_item_at_its_place_emitted_when_it_is_complete() -> None:
    found = {"id": "ws", "status": "completed", "action": {"query": "q"}}
    events = events_of(
        added(0, "web_search_call", id="ws", status="in_progress"),
        event("web_search_call.searching", 0),
        added(1, "message"),
        text(1, "Found"),
        done(0, "web_search_call", **found),
        event("web_search_call.completed", 0),
        done(1, "message"),
        {"type": "response.odd", "x": 1},
        {"type": "response.odd", "output_index": [0]},
        COMPLETED,
    )
    assert events[0] == n.ItemStart(0, "openai-responses.web_search_call", "web_search", "ws")
    [(*_, json)] = items(events)
    assert msgspec.json.decode(json) == {"type": "web_search_call", **found}
    assert [e for e in events if isinstance(e, n.Extra)] == [
        n.Extra("openai-responses.odd", '{"type":"response.odd","x":1}'),
        n.Extra("openai-responses.odd", '{"type":"response.odd","output_index":[0]}'),
    ]
    assert n.BlockStart(1, "text") in events


@pytest.mark.parametrize(
    ("kind", "field", "events"),
    [
        ("code_interpreter_call", "code", "code_interpreter_call_code"),
        ("mcp_call", "arguments", "mcp_call_arguments"),
        ("custom_tool_call", "input", "custom_tool_call_input"),
    ],
)
@pytest.mark.parametrize("rest", [{}, {"status": "completed", "outputs": [{"logs": "1"}]}])
def test_what_an_item_of_the_provider_streams_is_emitted_as_it_comes(
    kind: str, field: str, events: str, rest: dict[str, Any]
) -> None:
    written = 'print("ä\n")\u2028😀'
    pieces = [written[at : at + 3] for at in range(0, len(written), 3)]
    whole = {"id": "i", field: written + "!", "name": "run", **rest}
    created = {"type": "response.created", "response": {"tools": []}}
    stream = [
        added(0, kind, id="i", name="run"),
        *(event(f"{events}.delta", 0, item_id="i", delta=piece) for piece in pieces),
        event(f"{events}.done", 0, item_id="i", **{field: written}),
        done(0, kind, **whole),
        ended("completed", output=[{"type": kind, **whole}]),
    ]
    found = read("openai-responses", sse(created, *stream))
    [(_, tool, tool_id, json)] = items(found)
    assert (tool, tool_id) == ("run", "i")
    assert msgspec.json.decode(json) == {"type": kind, **whole}
    assert len([e for e in found if isinstance(e, n.ToolCallDelta)]) == len(pieces) + 1
    assert json.startswith(f'{{"{field}":"print')


def test_an_item_whose_streamed_text_differs_at_its_end_stays_as_it_was_streamed() -> None:
    events = events_of(
        added(0, "mcp_call", id="i", name="f"),
        event("mcp_call_arguments.delta", 0, delta="{}"),
        done(0, "mcp_call", id="i", name="f", arguments='{"a":1}', output="x"),
        COMPLETED,
    )
    [(*_, json)] = items(events)
    assert msgspec.json.decode(json) == {"arguments": "{}", "type": "mcp_call", "id": "i", "name": "f", "output": "x"}


def test_a_refusal_is_shown_text_and_ends_in_content_filter() -> None:
    assert events_of(
        added(0, "message"),
        event("refusal.delta", 0, content_index=0, delta="I "),
        event("refusal.delta", 0, content_index=0, delta="won't"),
        event("refusal.done", 0, content_index=0, refusal="I won't"),
        done(0, "message", content=[{"type": "refusal", "refusal": "I won't"}]),
        COMPLETED,
    ) == [
        n.BlockStart(0, "text"),
        n.RefusalDelta(0, "I "),
        n.RefusalDelta(0, "won't"),
        n.BlockStop(0),
        n.Done("content_filter", "completed"),
    ]
    for events in (
        [added(0, "message"), event("refusal.done", 0, refusal="No")],
        [done(0, "message", content=[{"type": "refusal", "refusal": "No"}])],
    ):
        result = answer(read("openai-responses", sse(CREATED, *events, COMPLETED)))
        assert (result.refusal, result.terminal) == ("No", n.Done("content_filter", "completed"))


def test_citations_are_shown_at_once_and_go_back_with_their_block() -> None:
    def cited(index: int) -> dict[str, Any]:
        return event(
            "output_text.annotation.added", 0, content_index=0, annotation_index=index, annotation={"n": index}
        )

    events = events_of(
        added(0, "message"),
        cited(0),
        text(0, "a"),
        event("output_text.done", 0, content_index=0, text="a"),
        cited(1),
        event("content_part.done", 0, content_index=0),
        done(0, "message"),
        cited(2),
        COMPLETED,
    )
    assert events == [
        n.BlockStart(0, "text"),
        n.Extra("openai-responses.annotation", '{"n":0}', 0),
        n.TextDelta(0, "a"),
        n.Extra("openai-responses.annotation", '{"n":1}', 0),
        n.Opaque(0, "citations", '[{"n":0},{"n":1}]'),
        n.BlockStop(0),
        n.Extra("openai-responses.annotation", '{"n":2}'),
        STOPPED,
    ]


def test_an_image_has_previews_and_the_final_one_in_its_item() -> None:
    final = {"result": "BBBB", "output_format": "webp", "revised_prompt": "a cat", "status": "completed"}
    events = events_of(
        added(0, "image_generation_call", status="in_progress"),
        event("image_generation_call.partial_image", 0, partial_image_b64="AAAA", output_format="webp"),
        done(0, "image_generation_call", **final),
        added(1, "image_generation_call"),
        done(1, "image_generation_call", status="failed"),
        COMPLETED,
    )
    assert events == [
        n.BlockStart(0, "image"),
        n.Image(0, "image/webp", "AAAA", final=False),
        n.Image(0, "image/webp", "BBBB", final=True, revised_prompt="a cat"),
        n.BlockStop(0),
        n.BlockStart(1, "image"),
        n.Extra("openai-responses.image_generation_call", '{"type":"image_generation_call","status":"failed"}', 1),
        n.BlockStop(1),
        STOPPED,
    ]


@pytest.mark.parametrize(
    ("terminal", "done"),
    [
        (ended(), STOPPED),
        (broken_off("max_output_tokens"), n.Done("length", "incomplete:max_output_tokens")),
        (broken_off("content_filter"), n.Done("content_filter", "incomplete:content_filter")),
        (broken_off("odd"), n.Done("unknown", "incomplete:odd")),
        (ended("incomplete"), n.Done("unknown", "incomplete")),
        ({"type": "response.completed", "response": {"status": "in_progress"}}, STOPPED),
        ({"type": "response.completed", "response": {}}, STOPPED),
        ({"type": "response.completed", "response": {"status": "incomplete"}}, n.Done("unknown", "incomplete")),
    ],
)
def test_how_a_response_ends(terminal: Any, done: n.Done) -> None:
    [last] = events_of(terminal)
    assert last == done


def test_a_call_in_an_incomplete_response_is_complete_only_if_its_item_is() -> None:
    late = {"call_id": "b", "name": "g", "arguments": '{"a', "status": "incomplete"}
    result = answer(
        read(
            "openai-responses",
            sse(
                CREATED,
                done(0, "function_call", call_id="a", name="f", arguments="{}", status="completed"),
                added(1, "function_call", call_id="b", name="g"),
                event("function_call_arguments.delta", 1, delta='{"a'),
                done(1, "function_call", **late),
                ended("incomplete", incomplete_details={"reason": "max_output_tokens"}),
            ),
        )
    )
    assert result.done_calls == 1
    assert result.open == {1}
    assert result.terminal == n.Done("length", "incomplete:max_output_tokens")


def test_items_without_their_end_are_as_the_response_at_its_end_has_them() -> None:
    output = [
        {"type": "mcp_list_tools", "tools": [1]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "message", "content": [{"text": "other"}]},
    ]
    events = events_of(
        added(0, "mcp_list_tools", tools=[]),
        added(1, "function_call", call_id="c", name="f"),
        added(2, "message"),
        text(2, "open"),
        ended("completed", output=output),
    )
    assert items(events) == [("openai-responses.mcp_list_tools", "", "", '{"type":"mcp_list_tools","tools":[1]}')]
    assert [e for e in events if isinstance(e, n.TextDelta)] == [n.TextDelta(2, "open")]
    assert events[-1] == n.Done("tool_use", "completed")
    unannounced = answer(read("openai-responses", sse(CREATED, ended("completed", output=output))))
    assert (unannounced.calls, unannounced.text) == ([("c", "f", "{}")], "other")


def test_an_item_that_the_end_of_the_response_does_not_have_is_not_completed() -> None:
    result = answer(
        read(
            "openai-responses",
            sse(
                CREATED,
                added(0, "function_call", call_id="c", name="f"),
                added(1, "message"),
                text(1, "a"),
                added(2, "reasoning"),
                added(3, "image_generation_call"),
                added(4, "web_search_call"),
                ended("completed", output=[{"type": "message", "content": []}]),
            ),
        )
    )
    assert result.open == {0, 4}
    assert result.done_calls == 0
    assert result.terminal == STOPPED


def test_counts_come_with_the_end_of_the_response() -> None:
    raw = {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 1},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 11,
    }
    usage = Usage(input=5, output=6, total=11, cache_read=2, cache_write=1, reasoning=3, raw=raw)
    assert events_of(ended(usage=raw)) == [n.UsageSeen(usage), n.Done("stop", "completed", usage)]
    [seen, failed] = events_of(ended("failed", usage=raw, error={"code": "server_error", "message": "m"}))
    assert seen == n.UsageSeen(usage)
    assert isinstance(failed, n.Failed)


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        ({"type": "error", "code": "rate_limit_exceeded", "message": "m"}, "rate_limit", "rate_limit_exceeded"),
        ({"type": "error", "error": {"type": "server_error", "code": None, "message": "m"}}, "server", "server_error"),
        (ended("failed", error={"code": "server_error", "message": "m"}), "server", "server_error"),
        (ended("failed"), "unknown", "response_failed"),
        ({**COMPLETED, "response": {"status": "failed", "error": {"code": "timeout"}}}, "timeout", "timeout"),
        (ended("cancelled"), "unknown", "cancelled"),
        ({"error": {"message": "m", "code": "model_not_found"}}, "not_found", "model_not_found"),
        (b'event: error\ndata: {"type":"error","code":"invalid_api_key","message":"m"}\n\n', "auth", "invalid_api_key"),
    ],
)
def test_an_error_ends_the_attempt_once(error: Any, kind: str, code: str) -> None:
    failed_too = ended("failed", error={"code": "server_error", "message": "m"})
    for before in (b"", sse(CREATED, added(0, "message"), text(0, "partial"))):
        terminal = answer(read("openai-responses", before + sse(error, failed_too, COMPLETED))).terminal
        assert isinstance(terminal, n.Failed)
        assert (terminal.error.kind, terminal.error.code) == (kind, code)


def test_a_stream_without_its_terminal_event_is_cut() -> None:
    cut = answer(read("openai-responses", sse(CREATED, added(0, "message"), text(0, "a"), b"data: [DONE]\n\n")))
    assert cut.terminal == n.Cut("the stream ended before response.completed")
    assert cut.text == "a"
    assert read("openai-responses", b"") == [n.Cut("the body held no response")]


def test_events_without_content_are_ignored() -> None:
    quiet = [
        {"type": "keepalive", "sequence_number": 1},
        {"type": "ping"},
        {"type": "response.in_progress", "response": {"id": "other", "model": "other"}},
        {"type": "response.queued", "response": {}},
    ]
    after = [b"data: [DONE]\n\n", text(0, "late")]
    assert events_of(*quiet, COMPLETED, *after) == [STOPPED]
    assert read("openai-responses", sse({"type": "response.odd"}, CREATED, COMPLETED)) == [
        n.Start("gpt", "r1"),
        STOPPED,
    ]


def test_an_item_announced_twice_is_one() -> None:
    item = added(0, "function_call", call_id="c", name="f")
    events = events_of(
        item, item, done(0, "function_call", arguments="{}", name="f"), done(0, "function_call"), COMPLETED
    )
    assert events == [
        n.ToolCallStart(0, "c", "f"),
        n.ToolCallDelta(0, "{}"),
        n.ToolCallDone(0),
        n.Done("tool_use", "completed"),
    ]


def test_an_output_index_may_be_taken_again_once_its_item_has_ended() -> None:
    result = answer(
        read(
            "openai-responses",
            sse(
                CREATED,
                added(0, "reasoning"),
                done(0, "reasoning"),
                added(0, "message"),
                text(0, "a"),
                done(0, "message"),
                COMPLETED,
            ),
        )
    )
    assert (result.kinds, result.text) == (["thinking", "text"], "a")


@pytest.mark.parametrize(
    ("broken", "where"),
    [
        (b"data: {no}\n\n", "event"),
        (b"data: [1]\n\n", "event"),
        ({"x": 1}, "event"),
        ({"type": "response.output_text.delta"}, "event"),
        ({"type": "response.output_text.delta", "output_index": 0, "delta": 5}, "event at $.delta"),
        ({"type": "response.completed"}, "event"),
        (ended(usage={"a": 10**30}), "usage"),
        (added(0, "function_call", name=5), "item at $.name"),
        ({**added(0, "x"), "item": {}}, "item"),
        (added(1, "message"), "response.output_item.added"),
        (done(1, "message"), "response.output_item.done"),
        (done(2, "function_call"), "response.output_item.done"),
        (text(1, "a"), "event"),
        (text(3, "a"), "event"),
        (event("function_call_arguments.delta", 0, delta="a"), "event"),
        (event("function_call_arguments.delta", 9, delta="a"), "event"),
    ],
)
def test_a_broken_event_ends_the_attempt_and_names_its_place(broken: Any, where: str) -> None:
    before = [added(0, "message"), text(0, "a"), added(1, "function_call", name="f"), done(3, "message")]
    terminal = answer(read("openai-responses", sse(CREATED, *before, broken, COMPLETED))).terminal
    assert isinstance(terminal, n.Failed)
    assert (terminal.error.code, terminal.error.kind, terminal.error.where) == ("malformed", "protocol", where)


def test_a_whole_response_gives_the_events_of_the_stream_with_one_delta_a_block() -> None:
    usage = {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}
    reasoning = {"id": "rs", "summary": [{"type": "summary_text", "text": "Hmm"}], "encrypted_content": "enc"}
    message = {
        "id": "m",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Look"}],
    }
    call = {"id": "fc", "call_id": "c", "name": "f", "arguments": '{"x":1}', "status": "completed"}
    output = [{"type": "reasoning", **reasoning}, {"type": "message", **message}, {"type": "function_call", **call}]
    response = {
        "id": "r1",
        "object": "response",
        "model": "gpt",
        "status": "completed",
        "output": output,
        "usage": usage,
    }
    streamed = sse(
        CREATED,
        added(0, "reasoning", id="rs", summary=[]),
        event("reasoning_summary_text.delta", 0, summary_index=0, delta="H"),
        event("reasoning_summary_text.delta", 0, summary_index=0, delta="mm"),
        done(0, "reasoning", **reasoning),
        added(1, "message", id="m", content=[]),
        text(1, "Lo"),
        text(1, "ok"),
        done(1, "message", **message),
        added(2, "function_call", id="fc", call_id="c", name="f", arguments=""),
        event("function_call_arguments.delta", 2, delta='{"x"'),
        event("function_call_arguments.delta", 2, delta=":1}"),
        done(2, "function_call", **call),
        {"type": "response.completed", "response": response},
    )
    body = msgspec.json.format(msgspec.json.encode(response))
    assert read("openai-responses", body, stream=False) == joined(read("openai-responses", streamed))
    assert read("openai-responses", body, stream=True) == read("openai-responses", body, stream=False)


def test_a_whole_response_that_is_not_complete_says_so() -> None:
    body = msgspec.json.encode({"object": "response", "model": "gpt", "status": "queued", "output": []})
    assert read("openai-responses", body, stream=False)[-1] == n.Cut("the response is not complete (status: queued)")


SHELL = {"id": "sh_1", "call_id": "c1", "action": {"commands": ["ls"]}}


@pytest.mark.parametrize(
    ("items", "finish"),
    [
        ([("mcp_approval_request", {"id": "mcpr_1", "name": "del", "arguments": "{}"})], "tool_use"),
        (
            [("mcp_approval_request", {"id": "mcpr_1", "name": "del", "arguments": "{}"}), ("shell_call", SHELL)],
            "requires_action",
        ),
        ([("computer_call", {"id": "cu_1", "call_id": "c1", "action": {"type": "click"}})], "requires_action"),
        ([("shell_call", SHELL)], "requires_action"),
        ([("shell_call", SHELL), ("shell_call_output", {"id": "so_1", "call_id": "c1", "output": []})], "stop"),
        ([("web_search_call", {"id": "ws_1", "status": "completed"})], "stop"),
        ([("mcp_call", {"id": "mcp_1", "name": "del", "arguments": "{}", "output": "done"})], "stop"),
    ],
)
@pytest.mark.parametrize("streamed", [True, False])
def test_a_hosted_call_that_waits_for_the_client_ends_the_turn_with_a_finish_that_says_so(
    items: list[Any], finish: str, streamed: bool
) -> None:
    events = [e for i, (kind, fields) in enumerate(items) for e in (added(i, kind, **fields), done(i, kind, **fields))]
    output = [{"type": kind, **fields} for kind, fields in items]
    end = events_of(*(events if streamed else ()), ended(output=output))[-1]
    assert isinstance(end, n.Done)
    assert (end.finish, end.finish_raw) == (finish, "completed")


def test_what_a_hosted_tool_does_is_its_progress_in_order() -> None:
    item = {"id": "ci_1", "code": "1+1", "status": "completed"}
    events = events_of(
        added(0, "code_interpreter_call", id="ci_1", status="in_progress"),
        event("code_interpreter_call.in_progress", 0, item_id="ci_1"),
        event("code_interpreter_call_code.delta", 0, item_id="ci_1", delta="1+1"),
        event("code_interpreter_call_code.done", 0, item_id="ci_1", code="1+1"),
        event("code_interpreter_call.interpreting", 0, item_id="ci_1"),
        event("code_interpreter_call.finding", 0, item_id="ci_1", found=[1]),
        done(0, "code_interpreter_call", **item),
        added(1, "image_generation_call", id="ig_1"),
        event("image_generation_call.generating", 1, item_id="ig_1"),
        done(1, "image_generation_call", id="ig_1", result="aW1n"),
        COMPLETED,
    )
    found = '{"type":"response.code_interpreter_call.finding","output_index":0,"item_id":"ci_1","found":[1]}'
    assert events[:8] == [
        n.ItemStart(0, "openai-responses.code_interpreter_call", "code_interpreter", "ci_1"),
        n.ItemProgress(0, "in_progress"),
        n.ToolCallDelta(0, '{"code":"1+1'),
        n.ItemProgress(0, "interpreting"),
        n.ItemProgress(0, "finding"),
        n.Extra("openai-responses.code_interpreter_call.finding", found, 0),
        n.ToolCallDelta(0, '","type":"code_interpreter_call","id":"ci_1","status":"completed"}'),
        n.BlockStop(0),
    ]
    assert events[8:10] == [n.BlockStart(1, "image"), n.ItemProgress(1, "generating")]


def test_a_patch_streams_inside_its_operation() -> None:
    operation = {"type": "update_file", "path": "a.py", "diff": '-"a"\n+b'}
    pieces = ['-"a', '"\n+b']
    events = events_of(
        added(0, "apply_patch_call", call_id="c1", operation={**operation, "diff": ""}),
        *(event("apply_patch_call_operation_diff.delta", 0, item_id="i1", delta=piece) for piece in pieces),
        event("apply_patch_call_operation_diff.done", 0, item_id="i1", diff=operation["diff"]),
        done(0, "apply_patch_call", call_id="c1", operation=operation),
        COMPLETED,
    )
    fragments = [e.fragment for e in events if isinstance(e, n.ToolCallDelta)]
    assert len(fragments) == 3
    assert msgspec.json.decode("".join(fragments)) == {
        "type": "apply_patch_call",
        "call_id": "c1",
        "operation": operation,
    }
    assert events[-2:] == [n.BlockStop(0), n.Done("requires_action", "completed")]


def test_what_the_provider_asks_leave_for_comes_with_the_items_that_answer_it() -> None:
    asked = {"server_label": "crm", "name": "del", "arguments": '{"n":1}'}
    kind = "mcp_approval_request"
    events = events_of(added(0, kind, id="mcpr_1", **asked), done(0, kind, id="mcpr_1", **asked), COMPLETED)
    (found,) = [e for e in events if isinstance(e, n.ApprovalAsked)]
    assert (found.tool_id, found.name, found.arguments, found.server) == ("mcpr_1", "del", '{"n":1}', "crm")
    assert msgspec.json.decode(found.allow) == {
        "type": "mcp_approval_response",
        "approval_request_id": "mcpr_1",
        "approve": True,
    }
    assert events[-1] == n.Done("tool_use", "completed")


def test_a_shells_commands_and_what_it_prints_come_as_they_stream() -> None:
    commands, printed = ["ls -l", 'echo "é"'], [{"stdout": "a\n", "stderr": "b", "outcome": {"type": "exit"}}]
    pieces = [(0, "ls"), (0, " -l"), (1, "echo "), (1, '"é"')]
    events = events_of(
        added(0, "shell_call", call_id="c1", action={"commands": []}),
        *(event("shell_call_command.delta", 0, command_index=place, delta=piece) for place, piece in pieces),
        done(0, "shell_call", call_id="c1", action={"commands": [*commands, "pwd"], "timeout_ms": None}),
        added(1, "shell_call_output", call_id="c1", output=[]),
        event("shell_call_output_content.delta", 1, command_index=0, delta={"stdout": "a"}),
        event("shell_call_output_content.delta", 1, command_index=0, delta={"stdout": "\n", "stderr": "b"}),
        event("shell_call_output_content.delta", 1, command_index=7, delta={"stdout": "of a later one"}),
        done(1, "shell_call_output", call_id="c1", output=printed),
        COMPLETED,
    )
    fragments = [[e.fragment for e in events if isinstance(e, n.ToolCallDelta) and e.block == i] for i in (0, 1)]
    assert [len(each) for each in fragments] == [5, 3]
    call, output = (msgspec.json.decode("".join(each)) for each in fragments)
    assert call["action"] == {"commands": [*commands, "pwd"], "timeout_ms": None}
    assert output["output"] == printed
    assert not [e for e in events if isinstance(e, n.Extra | n.ItemProgress)]


def test_log_probabilities_are_with_their_text_streamed_or_whole() -> None:
    probable = [{"token": "a", "logprob": -0.5}]
    part = {"type": "output_text", "text": "a", "logprobs": probable}
    with_deltas = [
        added(0, "message"),
        event("output_text.delta", 0, delta="a", logprobs=probable),
        event("output_text.done", 0, text="a", logprobs=probable),
    ]
    extra = n.Extra("openai-responses.logprobs", '[{"token":"a","logprob":-0.5}]', 0)
    for before in (with_deltas, []):
        events = events_of(*before, done(0, "message", content=[part]), ended(service_tier="flex"))
        assert [e for e in events if not isinstance(e, n.Done)] == [
            n.BlockStart(0, "text"),
            n.TextDelta(0, "a"),
            extra,
            n.BlockStop(0),
            n.Extra("openai-responses.service_tier", '"flex"'),
        ]
