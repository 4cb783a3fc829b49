"""The decoder of Gemini's Interactions API.

No stream of this API was recorded. `STREAMS` are synthesized: the streams of Google's documents of 2026 ("Streaming
interactions"), and others in the same form with what the types of Google's SDK add.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import msgspec
import pytest

from tests.unit.providers.reading import Answer, answer, items, read, read_pieces, sse
from tests.unit.providers.test_each_character_once import said_in as voices_in
from tests.unit.providers.test_each_character_once import solid
from tests.unit.providers.test_unknown_fields import said_in, with_unknown_fields
from tokenbus.events import normalized as n
from tokenbus.events.usage import Usage
from tokenbus.providers.api import JobSeen
from tokenbus.providers.gemini_interactions.request import jobs

API = "gemini-interactions"
Json = dict[str, Any]
USAGE: Json = {"total_tokens": 299, "total_input_tokens": 138, "total_output_tokens": 20, "total_thought_tokens": 141}
PIXELS = [b64encode(b"\x89PNG%d" % i).decode() for i in range(3)]


def started() -> list[Json]:
    about = {"id": "v1_a", "status": "in_progress", "object": "interaction", "model": "gemini-3.7-flash"}
    return [
        {"interaction": about, "event_type": "interaction.created"},
        {"interaction_id": "v1_a", "status": "in_progress", "event_type": "interaction.status_update"},
    ]


def step(index: int, start: Json, *deltas: Json) -> list[Json]:
    return [
        {"index": index, "step": start, "event_type": "step.start"},
        *({"index": index, "delta": delta, "event_type": "step.delta"} for delta in deltas),
        {"index": index, "event_type": "step.stop"},
    ]


def completed(status: str = "completed", **more: Any) -> Json:
    about = {"id": "v1_a", "status": status, "usage": USAGE, "service_tier": "standard", "object": "interaction"}
    return {"interaction": about | {"model": "gemini-3.7-flash"} | more, "event_type": "interaction.completed"}


THOUGHT: tuple[Json, ...] = (
    {"type": "thought"},
    {"content": {"text": "**A plan**\n\nI look ", "type": "text"}, "type": "thought_summary"},
    {"content": {"text": "it up."}, "type": "thought_summary"},
    {"signature": "c2ln", "type": "thought_signature"},
)
SEARCH: tuple[Json, ...] = (
    {"id": "mkutnkgn", "signature": "", "type": "google_search_call"},
    {"signature": "cGF0", "type": "google_search_call", "arguments": {"queries": ["largest mountain in Europe"]}},
)
FOUND: tuple[Json, ...] = (
    {"call_id": "mkutnkgn", "signature": "", "type": "google_search_result"},
    {"type": "google_search_result", "result": [{"search_suggestions": "<a>"}], "is_error": False},
    {"type": "google_search_result", "result": [{"search_suggestions": "<b>"}], "signature": "cGF1"},
)
CALL: tuple[Json, ...] = (
    {"id": "ktr5aysg", "type": "function_call", "name": "get_weather", "arguments": {}},
    {"arguments": '{"location":"Mount ', "type": "arguments_delta"},
    {"arguments": 'Elbrus"}', "type": "arguments_delta"},
)
CITATION = {"type": "url_citation", "url": "https://example.org", "title": "E", "start_index": 0, "end_index": 4}
SAID: tuple[Json, ...] = (
    {"type": "model_output"},
    {"text": "It is Mount ", "type": "text"},
    {"text": "Elbrus.", "type": "text"},
    {"type": "text_annotation_delta", "annotations": [CITATION]},
)
OTHER: tuple[Json, ...] = (
    {"type": "model_output"},
    {"text": "Es ist ", "type": "text"},
    {"text": "der Elbrus 🏔️.", "type": "text"},
    {"type": "text", "text": ""},
)
DONE = b"event: done\ndata: [DONE]\n\n"


def stream(*steps: tuple[Json, ...], end: Json | None = None) -> bytes:
    events = [event for index, given in enumerate(steps) for event in step(index, *given)]
    return sse(*started(), *events, end or completed(), DONE)


STREAMS = {
    "text": stream(THOUGHT, SAID),
    "a search and a call": stream(SEARCH, FOUND, THOUGHT, CALL, end=completed("requires_action")),
    "images between texts": stream(
        (
            {"type": "model_output"},
            {"type": "text", "text": "One:"},
            {"type": "image", "mime_type": "image/png", "data": PIXELS[0]},
            {"type": "text", "text": "Two:"},
            {"type": "image", "mime_type": "image/png", "data": PIXELS[1]},
        )
    ),
    "two steps at once": sse(
        *started(),
        *(event for pair in zip(step(0, *SAID), step(1, *OTHER), strict=True) for event in pair),
        completed(),
    ),
}


def said(data: bytes) -> Answer:
    return answer(read(API, data))


def whole(*steps: Json, status: str = "completed", **more: Any) -> bytes:
    return msgspec.json.encode(completed(status, steps=list(steps), **more)["interaction"])


def of_kind(events: list[n.Normalized], kind: type[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_a_thought_and_a_text_are_blocks_with_what_goes_back() -> None:
    events = read(API, STREAMS["text"])
    found = answer(events)
    assert events[0] == n.Start("gemini-3.7-flash", "v1_a")
    assert (found.kinds, found.open) == (["thinking", "text"], set())
    assert (found.thinking, found.text) == ("**A plan**\n\nI look it up.", "It is Mount Elbrus.")
    assert of_kind(events, n.Opaque) == [
        n.Opaque(0, "thought_signature", "c2ln"),
        n.Opaque(1, "citations", f"[{msgspec.json.encode(CITATION).decode()}]"),
    ]
    usage = Usage(input=138, output=20, reasoning=141, total=299, raw=USAGE)
    assert of_kind(events, n.UsageSeen) == [n.UsageSeen(usage)]
    assert events[-2:] == [n.Extra(f"{API}.service_tier", '"standard"'), n.Done("stop", "completed", usage)]


def test_tools_of_the_provider_are_items_that_start_at_once_and_go_back_as_whole_steps() -> None:
    events = read(API, STREAMS["a search and a call"])
    assert of_kind(events, n.ItemStart) == [
        n.ItemStart(0, f"{API}.google_search_call", "google_search", "mkutnkgn"),
        n.ItemStart(1, f"{API}.google_search_result", "google_search", "mkutnkgn"),
    ]
    (*_, call), (*_, result) = items(events)
    assert msgspec.json.decode(call) == {"id": "mkutnkgn", **SEARCH[1]}
    assert msgspec.json.decode(result) == {
        "call_id": "mkutnkgn",
        "type": "google_search_result",
        "result": [{"search_suggestions": "<a>"}, {"search_suggestions": "<b>"}],
        "is_error": False,
        "signature": "cGF1",
    }
    found = answer(events)
    assert found.calls == [("ktr5aysg", "get_weather", '{"location":"Mount Elbrus"}')]
    assert isinstance(found.terminal, n.Done)
    assert (found.terminal.finish, found.terminal.finish_raw, found.done_calls) == ("tool_use", "requires_action", 1)


def test_the_tool_of_an_mcp_server_has_its_name_also_in_its_result() -> None:
    called = {"type": "mcp_server_tool_call", "id": "m1", "name": "roll", "server_name": "dice", "arguments": {}}
    events = read(API, stream((called,), ({"type": "mcp_server_tool_result", "call_id": "m1", "result": "6"},)))
    assert [(event.tool_name, event.tool_id) for event in of_kind(events, n.ItemStart)] == [("roll", "m1")] * 2


def test_images_divide_the_text_and_those_of_a_thought_are_drafts() -> None:
    events = read(API, STREAMS["images between texts"])
    assert answer(events).kinds == ["text", "image", "text", "image"]
    assert [image.base64 for image in of_kind(events, n.Image)] == PIXELS[:2]
    drawn = {"type": "thought_summary", "content": {"type": "image", "mime_type": "image/png", "data": PIXELS[0]}}
    [draft] = of_kind(read(API, stream(({"type": "thought"}, drawn))), n.Image)
    assert draft.draft


def test_pieces_of_sound_are_one_block_that_says_how_it_is_coded() -> None:
    pieces = [b64encode(piece).decode() for piece in (b"abc", b"d")]
    coded = {"type": "audio", "mime_type": "audio/l16", "sample_rate": 24000, "channels": 1}
    events = read(API, stream(({"type": "model_output"}, *({**coded, "data": piece} for piece in pieces))))
    [heard] = of_kind(events, n.Audio)
    assert (heard.media_type, heard.base64) == ("audio/l16;rate=24000;channels=1", b64encode(b"abcd").decode())


@pytest.mark.parametrize("kind", ["image", "video", "document", "odd"])
def test_content_without_its_bytes_is_an_item_that_goes_back_as_a_step(kind: str) -> None:
    content = {"type": kind, "uri": "https://example.org/x"}
    events = read(API, stream(({"type": "model_output"}, {"type": "text", "text": "See:"}, content)))
    assert answer(events).kinds == ["text", f"{API}.{kind}"]
    [(*_, json)] = items(events)
    assert msgspec.json.decode(json) == {"type": "model_output", "content": [content]}


@pytest.mark.parametrize("name", STREAMS)
def test_the_events_do_not_depend_on_where_the_bytes_are_cut(name: str) -> None:
    data = STREAMS[name]
    for size in (1, 7, 100):
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        assert read_pieces(API, pieces, restored=size == 7) == read(API, data)


@pytest.mark.parametrize("name", STREAMS)
def test_each_character_comes_out_once_and_under_one_kind(name: str) -> None:
    found = said(STREAMS[name])
    assert sorted(solid(found.text + found.thinking)) == sorted("".join(voices_in(STREAMS[name])))


@pytest.mark.parametrize("name", STREAMS)
def test_an_unknown_field_at_any_level_comes_out_but_for_empty_arguments_at_the_start_of_a_call(name: str) -> None:
    data, places = with_unknown_fields(STREAMS[name])
    found = said_in(read(API, data))
    heard = {place for mark, place in places.items() if mark in found}  # where a value is repeated, the last one counts
    assert set(places.values()) - heard - {".step.arguments"} == set()


WHOLE: list[Json] = [
    {"type": "thought", "summary": [{"type": "text", "text": "I look it up."}], "signature": "c2ln"},
    {"type": "google_search_call", "id": "g", "arguments": {"queries": ["q"]}, "signature": "s"},
    {"type": "model_output", "content": [{"type": "text", "text": "Elbrus.", "annotations": [CITATION]}]},
    {"type": "function_call", "id": "c", "name": "f", "arguments": {"a": 1}},
]


def test_a_whole_interaction_gives_the_same_blocks_as_its_stream() -> None:
    streamed = stream(
        ({"type": "thought"}, *THOUGHT[3:], {"type": "thought_summary", "content": {"text": "I look it up."}}),
        ({"type": "google_search_call", "id": "g"}, {**WHOLE[1]}),
        ({"type": "model_output"}, {"type": "text", "text": "Elbrus."}, SAID[3]),
        ({**WHOLE[3], "arguments": {}}, {"type": "arguments_delta", "arguments": '{"a":1}'}),
        end=completed("requires_action"),
    )
    assert said(whole(*WHOLE, status="requires_action")) == said(streamed)


@pytest.mark.parametrize("kept", range(len(WHOLE) + 1))
def test_steps_in_the_last_event_repeat_the_stream_and_only_what_it_lacked_is_added(kept: int) -> None:
    streamed = [step(index, given) for index, given in enumerate(WHOLE[:kept])]
    events = [event for given in streamed for event in given]
    found = said(sse(*started(), *events, completed("requires_action", steps=WHOLE)))
    assert msgspec.structs.replace(found, kinds=[]) == msgspec.structs.replace(
        said(whole(*WHOLE, status="requires_action")), kinds=[]
    )


@pytest.mark.parametrize("name", ["text", "a search and a call", "images between texts"])
def test_a_stream_that_is_cut_anywhere_is_completed_by_the_whole_interaction(name: str) -> None:
    """As `jobs` does with one in the background."""
    data = STREAMS[name]
    complete = said(data)
    assert isinstance(complete.terminal, n.Done)
    steps: list[Json] = [msgspec.json.decode(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]
    response = whole(*_assembled(steps), status=complete.terminal.finish_raw)
    ends = [at + 2 for at in range(len(data)) if data[at : at + 2] == b"\n\n"]
    for end in ends[:-2]:
        found = said(data[:end] + jobs.last_event(response))
        assert msgspec.structs.replace(found, kinds=[]) == msgspec.structs.replace(complete, kinds=[]), end


def _assembled(events: list[Json]) -> list[Json]:
    """The steps of a stream as they are when it is whole."""
    steps: list[Json] = []
    for event in events:
        if event["event_type"] == "step.start":
            steps.append(dict(event["step"]))
        elif event["event_type"] == "step.delta":
            step, delta = steps[-1], event["delta"]
            match delta.get("type"):
                case "thought_summary":
                    step.setdefault("summary", []).append({"type": "text", **delta["content"]})
                case "thought_signature":
                    step["signature"] = delta["signature"]
                case "arguments_delta":
                    step["parts"] = step.get("parts", "") + delta["arguments"]
                case "text_annotation_delta":
                    step["content"][-1]["annotations"] = delta["annotations"]
                case "text" | "image":
                    step.setdefault("content", []).append(dict(delta))
                case _:
                    step.update({k: v for k, v in delta.items() if v not in ("", [])})
    for step in steps:
        if "parts" in step:
            step["arguments"] = msgspec.json.decode(step.pop("parts"))
    return steps


def test_the_rest_of_a_text_that_the_stream_had_in_part_is_a_block_of_its_own() -> None:
    given = {"type": "model_output", "content": [{"type": "text", "text": "It is Elbrus."}]}
    begun = step(0, {"type": "model_output"}, {"type": "text", "text": "It is"})
    found = said(sse(*started(), *begun, completed(steps=[given])))
    assert (found.text, found.kinds) == ("It is Elbrus.", ["text", "text"])


@pytest.mark.parametrize(
    ("data", "seen"),
    [
        (b'{"interaction":{"id":"v1_a","status":"in_progress"},"event_type":"interaction.created"}', JobSeen("v1_a")),
        (msgspec.json.encode(completed()), JobSeen("v1_a", over=True)),
        (msgspec.json.encode(completed("requires_action")), JobSeen("v1_a", over=True)),
        (whole(status="failed"), JobSeen("v1_a", over=True)),
        (whole(status="queued"), JobSeen("v1_a")),
        (b'{"error":{"code":"api_error"},"event_type":"error"}', JobSeen(failed=True)),
        (b'{"event_type":"step.stop","index":0}', JobSeen()),
        (b'{"id":7}', JobSeen()),
        (b"[DONE]", JobSeen()),
    ],
)
def test_what_an_event_says_of_a_job_in_the_background(data: bytes, seen: JobSeen) -> None:
    assert jobs.read(data) == seen


def test_the_calls_about_a_job_name_it_as_one_segment() -> None:
    look, cancel = jobs.look("v1/../a"), jobs.cancel("v1_a")
    assert (look.method, look.path) == ("GET", "/v1%2F..%2Fa")
    assert (cancel.method, cancel.path) == ("POST", "/v1_a/cancel")


def test_what_was_sent_is_not_part_of_the_answer() -> None:
    sent = {"type": "user_input", "content": [{"type": "text", "text": "Hi"}]}
    assert said(whole(sent, WHOLE[2])).kinds == ["text"]
    assert said(stream((sent,), SAID)).kinds == ["text"]


@pytest.mark.parametrize(
    ("status", "finish"),
    [
        ("completed", "stop"),
        ("incomplete", "length"),
        ("budget_exceeded", "length"),
        ("requires_action", "requires_action"),
        ("requires_continuation", "pause"),
        ("of_next_year", "unknown"),
    ],
)
def test_a_status_is_a_finish_reason_streamed_and_whole(status: str, finish: str) -> None:
    for data in (stream(SAID, end=completed(status)), whole(WHOLE[2], status=status)):
        terminal = said(data).terminal
        assert isinstance(terminal, n.Done)
        assert (terminal.finish, terminal.finish_raw) == (finish, status)


def test_calls_make_a_completed_interaction_a_tool_use_and_without_a_stop_they_do_not_run() -> None:
    found = said(stream(CALL))
    assert isinstance(found.terminal, n.Done)
    assert (found.terminal.finish, found.done_calls) == ("tool_use", 1)
    cut = said(sse(*started(), *step(0, *CALL)[:-1], completed("incomplete")))
    assert (cut.done_calls, cut.open) == (0, {0})
    assert isinstance(cut.terminal, n.Done)
    assert cut.terminal.finish == "length"


def test_a_call_without_deltas_has_the_arguments_of_its_start_and_one_without_an_id_gets_one() -> None:
    found = said(stream(({"type": "function_call", "name": "f", "arguments": {"a": [1, 2]}},)))
    assert found.calls == [("call_0", "f", '{"a":[1,2]}')]
    [start] = of_kind(read(API, stream(({"type": "function_call", "name": "f"},))), n.ToolCallStart)
    assert start.derived


def test_the_token_of_an_interaction_that_pauses_is_kept_for_its_continuation() -> None:
    events = read(API, stream(SAID, end=completed("requires_continuation", continuation_token="tok")))
    assert n.Extra(f"{API}.continuation_token", '"tok"') in events


@pytest.mark.parametrize(
    ("error", "kind", "retryable"),
    [
        ({"code": "gateway_timeout", "message": "Deadline expired."}, "timeout", True),
        ({"code": "rate_limit_exceeded", "message": "m"}, "rate_limit", True),
        ({"code": "quota_exceeded", "message": "m"}, "rate_limit", False),
        ({"code": "payment_required", "message": "m"}, "auth", False),
        ({"code": "parameter_unknown", "message": "m"}, "invalid_request", False),
        ({"code": "service_unavailable", "message": "m"}, "overloaded", True),
        ({"code": "api_error", "message": "m"}, "server", True),
    ],
)
def test_an_error_is_the_same_in_an_event_with_and_without_its_name_and_in_a_failed_interaction(
    error: Json, kind: str, retryable: bool
) -> None:
    event = {"error": error, "event_type": "error"}
    named = b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"
    for data in (
        sse(*started(), event),
        sse(*started(), named),
        sse(*started(), completed("failed", errors=[error])),
        whole(status="failed", errors=[error]),
    ):
        terminal = said(data).terminal
        assert isinstance(terminal, n.Failed)
        assert (terminal.error.code, terminal.error.kind, terminal.error.retryable) == (error["code"], kind, retryable)


@pytest.mark.parametrize("code", ["safety", "recitation", "prohibited_content", "image_safety", "content_blocked"])
def test_a_filter_that_stops_the_answer_ends_it_as_in_other_apis(code: str) -> None:
    error = {"code": code, "message": "m"}
    named = b"event: error\ndata: " + msgspec.json.encode({"error": error, "event_type": "error"}) + b"\n\n"
    for data in (sse(*started(), *step(0, *SAID)[:3], named), whole(WHOLE[2], status="failed", errors=[error])):
        terminal = said(data).terminal
        assert isinstance(terminal, n.Done)
        assert (terminal.finish, terminal.finish_raw) == ("content_filter", code)


def test_a_stream_that_ends_early_is_cut_and_a_last_status_ends_it_too() -> None:
    begun = [*started(), *step(0, *SAID)[:3]]
    assert said(sse(*begun)).terminal == n.Cut("the stream ended before interaction.completed")
    assert said(sse(*begun, DONE)).text == "It is Mount Elbrus."
    update = {"interaction_id": "v1_a", "status": "cancelled", "event_type": "interaction.status_update"}
    terminal = said(sse(*begun, update, DONE)).terminal
    assert isinstance(terminal, n.Failed)
    assert terminal.error.code == "cancelled"
    assert isinstance(said(whole(status="in_progress")).terminal, n.Cut)


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        ({"event_type": "step.delta", "index": 3, "delta": {"type": "text", "text": "x"}}, "index 3 is not open"),
        ({"event_type": "step.start", "index": 0, "step": {"type": "function_call"}}, "function_call has no name"),
        ({"event_type": "step.start", "index": 0}, "missing required field `step`"),
        ({"event_type": "step.start", "index": 0, "step": {"type": 1}}, "Expected `str`"),
        ({"hello": "there"}, "neither an event nor an interaction"),
    ],
)
def test_an_event_that_violates_the_api_ends_the_answer_and_says_where(event: Json, problem: str) -> None:
    terminal = said(sse(*started(), event)).terminal
    assert isinstance(terminal, n.Failed)
    assert terminal.error.kind == "protocol"
    assert problem in terminal.error.message


def test_what_this_version_does_not_know_is_kept_and_ends_nothing() -> None:
    odd = {"event_type": "interaction.odd", "x": 1}
    delta = {"type": "odd", "x": 1}
    events = read(API, sse(*started(), odd, *step(0, {"type": "odd_step", "x": 1}, {"type": "odd_step", "y": 2})))
    assert n.Extra(f"{API}.interaction.odd", msgspec.json.encode(odd).decode()) in events
    assert [msgspec.json.decode(json) for *_, json in items(events)] == [{"type": "odd_step", "x": 1, "y": 2}]
    events = read(API, stream(({"type": "thought"}, delta)))
    assert n.Extra(f"{API}.delta", msgspec.json.encode(delta).decode(), 0) in events


def test_many_lists_of_one_item_take_linear_time_and_are_one_list() -> None:
    pieces = [{"type": "google_search_result", "result": [{"n": i}]} for i in range(3000)]
    [(*_, json)] = items(read(API, stream(({"type": "google_search_result", "call_id": "g"}, *pieces))))
    assert msgspec.json.decode(json)["result"] == [{"n": i} for i in range(3000)]


def test_a_text_begins_only_with_its_first_piece() -> None:
    events = read(API, stream(({"type": "model_output"}, {"type": "text", "text": ""})))
    assert not of_kind(events, n.BlockStart)
    assert not of_kind(events, n.TextDelta)
