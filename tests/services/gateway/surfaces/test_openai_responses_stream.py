"""The event stream of the Responses API: what OpenAI's own types and accumulator accept, for any log of a run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.rows import over_rows
from tests.services.gateway.surfaces.test_settling import thinking
from tests.unit.core.run.script import RUN, Story, call, text
from tests.unit.core.run.test_run_properties import TRY_AGAIN, play, policies, steps
from tests.unit.providers.corpus import Recording, recordings
from tests.unit.providers.reading import read
from tokenbus.events import normalized as n
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import BusEvent, CancelRequested, ToolReturned
from tokenbus.events.public import (
    BlockComplete,
    Chunk,
    Completed,
    PublicEvent,
    Restarted,
    RunFailedEvent,
    Timing,
    UnknownEvent,
)
from tokenbus.events.requests import OnFailure
from tokenbus.events.usage import Usage
from tokenbus_services.gateway.problem import Problem
from tokenbus_services.gateway.surfaces.contract import GatewayNote
from tokenbus_services.gateway.surfaces.openai_responses.response_log import (
    DONE,
    ResponseFrames,
    ResponseSoFar,
    ResponseStream,
    WholeResponse,
)

Json = dict[str, Any]
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def note(on_failure: OnFailure | None = "before_first_visible", **more: Any) -> GatewayNote:
    echo = {"on_failure": on_failure, **more} if on_failure else more
    return GatewayNote(surface="openai_responses", version=1, created=1_763_784_000, model="p/m", echo=echo)


def stream(events: list[PublicEvent], told_of: GatewayNote | None = None, *, after: int = -1) -> list[bytes]:
    encoder = ResponseStream(told_of or note(), RUN, after=after)
    return [piece for event in events for piece in encoder.feed(event)]


def read_back(pieces: list[bytes]) -> list[Json]:
    """The events of a stream, each under its own name."""
    events: list[Json] = []
    for piece in pieces:
        if piece == DONE:
            continue
        name, data = piece.decode().removesuffix("\n\n").split("\ndata: ")
        event = msgspec.json.decode(data)
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def types(events: list[Json]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def verify(events: list[Json], *, ended: bool = True) -> None:
    """Numbers have no gap, OpenAI's types accept each event, and its accumulator the whole."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    accumulator = ResponseStreamState(input_tools=[], text_format=omit)
    for event in events:
        if event.get("response", {}).get("status") == "cancelled":
            continue  # its types know no reason `cancelled`, its parser takes it
        items = [event.get("item") or {}, *event.get("response", {}).get("output", [])]
        if any(item.get("type") == "web_search_call" and "action" not in item for item in items):
            continue  # of a vendor whose searches have no action
        accumulator.handle_event(STREAM_EVENT.validate_python(event))
    if ended:
        assert types(events[-1:])[0] in ("completed", "incomplete", "failed")
        done = {e["output_index"]: e["item"] for e in events if e["type"] == "response.output_item.done"}
        assert events[-1]["response"]["output"] == [done[index] for index in sorted(done)]


def test_a_text_is_sent_in_the_order_that_helpers_expect() -> None:
    story = Story()
    story.provider(n.BlockStart(0, "text"), n.TextDelta(0, "Hi "))
    story.provider(n.TextDelta(0, "there"), n.BlockStop(0), n.Done("stop", usage=Usage(input=3, output=2)))
    pieces = stream(story.events)
    events = read_back(pieces)
    verify(events)
    assert pieces[-1] == DONE
    assert types(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    response = events[-1]["response"]
    assert response["id"] == "resp_r1"
    assert response["status"] == "completed"
    assert response["usage"]["total_tokens"] == 5
    assert response["output"][0]["content"][0]["text"] == "Hi there"


def test_thinking_and_a_call_of_the_clients_are_items() -> None:
    story = Story(max_tool_depth=0)
    story.provider(*thinking(0, "h", "m"), *call(1, "call_1", "w", '{"c":', "1}"), n.Done("tool_use"))
    events = read_back(stream(story.events))
    verify(events)
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "function_call"]
    assert output[0]["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert (output[1]["call_id"], output[1]["name"], output[1]["arguments"]) == ("call_1", "w", '{"c":1}')
    assert output[1]["status"] == "completed"


def test_a_call_without_arguments_has_an_empty_object() -> None:
    story = Story(max_tool_depth=0)
    story.provider(*call(0, "call_1", "w"), n.Done("tool_use"))
    events = read_back(stream(story.events))
    verify(events)
    assert events[-1]["response"]["output"][0]["arguments"] == "{}"


def test_the_call_of_a_failed_attempt_is_never_sent() -> None:
    story = Story(max_tool_depth=0)
    story.provider(*thinking(0, "hm"), *call(1, "call_1", "w", "{}"), n.Failed(TRY_AGAIN))
    story.provider(*text(0, "hello"), n.Done("stop"))
    events = read_back(stream(story.events))
    verify(events)
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["message"]


def test_tools_that_the_bus_runs_are_sent_only_on_request() -> None:
    story = Story()
    story.provider(*call(0, "a", "f", "{}"), n.Done("tool_use"))
    story.control(ToolReturned(0, "found", is_error=False))
    story.provider(*text(0, "done"), n.Done("stop"))
    hidden = read_back(stream(story.events, note(bus_tools=True)))
    shown = read_back(stream(story.events, note(bus_tools=True, show_tools=True)))
    verify(hidden)
    verify(shown)
    assert [item["type"] for item in hidden[-1]["response"]["output"]] == ["message"]
    assert [item["type"] for item in shown[-1]["response"]["output"]] == [
        "function_call", "function_call_output", "message",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("end", "expected", "status", "reason"),
    [
        (n.Done("stop"), "completed", "completed", None),
        (n.Done("unknown"), "completed", "completed", None),
        (n.Done("length"), "incomplete", "incomplete", "max_output_tokens"),
        (n.Done("content_filter"), "incomplete", "incomplete", "content_filter"),
        (n.Cut("the stream ended"), "failed", "failed", None),
        (n.Failed(ErrorInfo(code="bad", kind="invalid_request", message="no")), "failed", "failed", None),
        (CancelRequested("enough"), "incomplete", "cancelled", "cancelled"),
    ],
)
def test_each_end_has_its_event_status_and_reason(
    end: BusEvent, expected: str, status: str, reason: str | None
) -> None:
    story = Story()
    story.provider(*text(0, "Hi"))
    story.control(end) if isinstance(end, CancelRequested) else story.provider(end)
    events = read_back(stream(story.events))
    verify(events)
    response = events[-1]["response"]
    assert types(events[-1:]) == [expected]
    assert response["status"] == status
    assert (response["incomplete_details"] or {}).get("reason") == reason
    assert (response["error"] is not None) == (status == "failed")


def test_a_cut_names_the_buss_own_code_in_the_message() -> None:
    story = Story(on_failure="fail")
    story.provider(n.BlockStart(0, "text"), n.TextDelta(0, "Hi"), n.Cut("the stream ended"))
    events = read_back(stream(story.events))
    error = events[-1]["response"]["error"]
    assert error == {"code": "server_error", "message": "stream_cut: the stream ended"}
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"


def test_a_rate_limit_has_the_apis_own_code() -> None:
    story = Story()
    busy = ErrorInfo(code="slow_down", kind="rate_limit", message="later")
    story.provider(n.Failed(busy))
    assert read_back(stream(story.events))[-1]["response"]["error"]["code"] == "rate_limit_exceeded"


def test_a_run_that_failed_alone_is_published_with_its_beginning() -> None:
    failed = RunFailedEvent(
        run=RUN, seq=0, turn=0, attempt=1, finish="error", timing=Timing(total_ms=1),
        error=ErrorInfo(code="key_missing", kind="auth", message="no key"),
    )  # fmt: skip
    events = read_back(stream([failed]))
    verify(events)
    assert types(events) == ["created", "in_progress", "failed"]


def test_a_background_response_is_queued_first() -> None:
    story = Story()
    story.provider(*text(0, "Hi"), n.Done("stop"))
    events = read_back(stream(story.events, note(background=True)))
    verify(events)
    assert types(events)[:3] == ["created", "queued", "in_progress"]
    assert [event["response"]["status"] for event in events[:3]] == ["queued", "queued", "in_progress"]


def test_an_answer_that_the_gateway_must_break_off_ends_as_failed() -> None:
    problem = Problem(status=503, code="gateway_restarting", message="the gateway is restarting", kind="overloaded")
    story = Story()
    story.provider(n.BlockStart(0, "text"), n.TextDelta(0, "Hi"))
    encoder = ResponseStream(note(), RUN)
    pieces = [piece for event in story.events for piece in encoder.feed(event)] + encoder.broken(problem)
    events = read_back(pieces)
    verify(events)
    assert events[-1]["response"]["error"]["message"] == "gateway_restarting: the gateway is restarting"
    assert types(read_back(ResponseStream(note(), RUN).broken(problem))) == ["created", "in_progress", "failed"]


def test_a_resumed_stream_that_breaks_before_the_clients_place_ends_as_failed_too() -> None:
    problem = Problem(status=503, code="gateway_restarting", message="the gateway is restarting", kind="overloaded")
    [end] = read_back(ResponseStream(note(), RUN, after=40).broken(problem))
    assert (end["type"], end["sequence_number"]) == ("response.failed", 41)


def test_a_turn_that_starts_over_after_its_text_fails_a_stream_but_not_a_whole_answer() -> None:
    story = Story(on_failure="restart")
    story.provider(*text(0, "first"), n.Failed(TRY_AGAIN))
    story.provider(*text(0, "second"), n.Done("stop"))
    assert any(isinstance(event, Restarted) for event in story.events)
    events = read_back(stream(story.events, note("restart")))
    verify(events)
    assert events[-1]["response"]["error"]["message"].startswith("restarted: ")
    whole = WholeResponse(note("restart"), RUN)
    answers = [answer for event in story.events if (answer := whole.feed(event))]
    assert [msgspec.json.decode(a.body)["output"][0]["content"][0]["text"] for a in answers] == ["second"]


def test_a_failed_run_is_an_http_error_unless_it_is_looked_up() -> None:
    story = Story()
    story.provider(n.Failed(ErrorInfo(code="bad", kind="invalid_request", message="no", where="tools")))
    whole, so_far = WholeResponse(note(), RUN), ResponseSoFar(note(), RUN)
    answers = [answer for event in story.events if (answer := whole.feed(event))]
    assert [a.status for a in answers] == [400]
    assert msgspec.json.decode(answers[0].body)["error"]["param"] == "tools"
    for event in story.events:
        so_far.feed(event)
    assert so_far.answer().status == 200
    assert msgspec.json.decode(so_far.answer().body)["status"] == "failed"


def test_a_response_that_is_looked_up_has_the_output_so_far() -> None:
    story = Story()
    story.provider(n.BlockStart(0, "text"), n.TextDelta(0, "Hi "))
    so_far = ResponseSoFar(note(), RUN)
    for event in story.events:
        so_far.feed(event)
    response = msgspec.json.decode(so_far.answer().body)
    assert response["status"] == "in_progress"
    assert response["output"][0]["content"][0]["text"] == "Hi "
    assert response["output"][0]["status"] == "in_progress"


def test_an_unknown_event_is_silent() -> None:
    story = Story()
    event_count = len(stream(story.events))
    unknown = UnknownEvent(run=RUN, seq=1, turn=0, attempt=1, event_type="later", fields={})
    assert len(stream([*story.events, unknown])) == event_count


def test_the_settings_of_the_request_are_repeated() -> None:
    story = Story()
    events = read_back(stream(story.events, note(response={"temperature": 0.5, "instructions": "be brief"})))
    assert events[0]["response"]["temperature"] == 0.5
    assert events[0]["response"]["instructions"] == "be brief"


def test_the_answer_names_who_spoke() -> None:
    story = Story()
    story.provider(n.Start("m-2026", "resp_1"), *text(0, "Hi"), n.Done("stop"))
    response = read_back(stream(story.events))[-1]["response"]
    assert response["model"] == "p/m"
    assert response["tokenbus"] == {"run": RUN, "provider": "anthropic", "model": "m-2026"}


# --- for every story ------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(steps, policies)
def test_any_log_is_accepted_and_its_text_is_the_visible_text(
    plan: list[list[BusEvent] | BusEvent], policy: OnFailure
) -> None:
    log = play(plan, policy, reborn=False).events
    events = read_back(stream(log, note(policy)))
    ended = isinstance(log[-1], Completed) or events[-1]["type"] in ("response.failed", "response.incomplete")
    verify(events, ended=ended)
    if policy == "restart":
        return
    received = "".join(e.text for e in log if isinstance(e, Chunk) and e.visible)
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == received


@settings(max_examples=40)
@given(steps, policies, st.integers(-1, 30))
def test_a_resumed_stream_is_the_rest_to_the_byte(
    plan: list[list[BusEvent] | BusEvent], policy: OnFailure, after: int
) -> None:
    log = play(plan, policy, reborn=False).events
    whole, rest = stream(log, note(policy)), stream(log, note(policy), after=after)
    assert rest == whole[after + 1 :] or rest == [DONE]


@settings(max_examples=40)
@given(steps, policies)
def test_frames_carry_the_events_of_the_stream(plan: list[list[BusEvent] | BusEvent], policy: OnFailure) -> None:
    log = play(plan, policy, reborn=False).events
    frames = ResponseFrames(note(policy), RUN)
    assert [msgspec.json.decode(f) for e in log for f in frames.feed(e)] == read_back(stream(log, note(policy)))


@over_rows(
    "recording",
    recordings("anthropic", "openai_chat", "openai_responses", "gemini"),
    ids=lambda recording: recording.file,
)
def test_every_recorded_stream_is_accepted(recording: Recording) -> None:
    story = Story(max_tool_depth=0, on_failure="fail")
    story.provider(*read(recording.api_name, recording.data))
    events = read_back(stream(story.events, note("fail")))
    verify(events, ended=story.run.over)
    received = "".join(e.text for e in story.events if isinstance(e, Chunk) and e.visible)
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == received
    calls = [e for e in story.events if isinstance(e, BlockComplete) and e.kind == "tool_call" and not e.cut]
    items = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    own = (f"fc_{RUN}_", f"ctc_{RUN}_")  # xAI's searches are custom tool calls too
    completed_calls = [item for item in items if item["id"].startswith(own) and item["status"] == "completed"]
    if isinstance(story.events[-1], Completed):
        assert sorted(item["call_id"] for item in completed_calls) == sorted(e.tool_id or "" for e in calls)
