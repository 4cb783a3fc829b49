"""The life of a run: what its subscribers see, and what it hands out."""

from __future__ import annotations

import pytest

from tests.unit.core.run.script import Story, call, item, of_type, text
from tokenbus.core.request.bounds import MAX_NAME_CHARS
from tokenbus.core.run.attempts import WORKER_LOST
from tokenbus.core.run.effects import EndRun, ForgetRun, NextTurn, RunTools
from tokenbus.events import normalized as n
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import (
    HAS_ENDED,
    CancelRequested,
    DeadlinePassed,
    Noted,
    ResultImage,
    RunLimits,
    ToolReturned,
)
from tokenbus.events.public import (
    Answering,
    BlockComplete,
    BlockStarted,
    Cancelled,
    Chunk,
    Completed,
    ImageRef,
    Incomplete,
    Restarted,
    Retrying,
    RunFailedEvent,
    Started,
    UsageReported,
)
from tokenbus.events.requests import (
    Base64Source,
    BlobSource,
    ImagePart,
    Message,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolResultPart,
)
from tokenbus.events.usage import Usage

OVERLOADED = ErrorInfo(code="overloaded_error", kind="overloaded", message="busy", retryable=True)
LOST = n.Cut("the fetcher was lost", ErrorInfo(code=WORKER_LOST, kind="internal", message="lost", retryable=True))


def test_a_text_reply_starts_streams_and_completes() -> None:
    story = Story()
    story.provider(n.Start("m"), *text(0, "Hel", "lo"))
    story.provider(n.Done("stop", "end_turn", Usage(input=3, output=2)))
    assert [type(e) for e in story.events] == [
        *(Started, Answering, BlockStarted, Chunk, BlockComplete, UsageReported, Completed),
    ]
    assert [e.seq for e in story.events] == list(range(7))
    [chunk] = of_type(story.events, Chunk)
    assert (chunk.text, chunk.visible, chunk.depth) == ("Hello", True, 0)
    end = story.events[-1]
    assert isinstance(end, Completed)
    assert (end.finish, end.finish_raw, end.usage) == ("stop", "end_turn", Usage(input=3, output=2))
    assert (end.timing.first_byte_ms, end.timing.first_visible_ms, end.timing.total_ms) == (10, 10, 20)
    assert story.effects == [EndRun("completed")]


def test_thinking_is_never_visible() -> None:
    story = Story()
    story.provider(n.BlockStart(0, "thinking"), n.ThinkingDelta(0, "secret"), n.BlockStop(0), *text(1, "said"))
    assert [(c.kind, c.visible) for c in of_type(story.events, Chunk)] == [("thinking", False), ("text", True)]


def test_repairs_of_a_request_are_reported_once_at_the_runs_end() -> None:
    story = Story()
    story.provider(Noted("a call had no result"), Noted("a result had no call"), n.Failed(OVERLOADED))
    story.provider(Noted("a call had no result"), Noted("a result had no call"), n.Start("m"), n.Done("stop"))
    end = story.events[-1]
    assert isinstance(end, Completed)
    assert end.provider_extra == [{"note": "a call had no result"}, {"note": "a result had no call"}]


def test_interleaved_blocks_keep_their_order_and_content() -> None:
    story = Story()
    story.provider(
        n.ToolCallStart(0, "a", "f"),
        n.ToolCallStart(1, "b", "g"),
        n.ToolCallDelta(0, '{"x"'),
        n.ToolCallDelta(1, "{}"),
        n.ToolCallDelta(0, ":1}"),
        n.ToolCallDone(1),
        n.ToolCallDone(0),
    )
    chunks = of_type(story.events, Chunk)
    assert [(c.block, c.tool_call_part, c.text) for c in chunks] == [
        (0, "name", "f"),
        (0, "id", "a"),
        (1, "name", "g"),
        (1, "id", "b"),
        (0, "input", '{"x"'),
        (1, "input", "{}"),
        (0, "input", ":1}"),
    ]
    assert [(e.block, e.arguments, e.input) for e in of_type(story.events, BlockComplete)] == [
        (1, "{}", {}),
        (0, '{"x":1}', {"x": 1}),
    ]


@pytest.mark.parametrize("arguments", ['{"x":', "[1]", "nonsense", '{"a":NaN}', "[" * 5_000, '{"a": "\\ud800"}'])
def test_arguments_that_are_no_object_keep_the_raw_string_and_say_why(arguments: str) -> None:
    story = Story()
    [complete] = of_type(story.provider(*call(0, "a", "f", arguments)), BlockComplete)
    assert complete.arguments == arguments
    assert complete.input is None
    assert "not a JSON object" in complete.input_error


def test_empty_arguments_mean_no_arguments() -> None:
    [complete] = of_type(Story().provider(*call(0, "a", "f")), BlockComplete)
    assert (complete.arguments, complete.input, complete.input_error) == ("", {}, None)


def test_calls_are_handed_out_and_their_results_lead_to_the_next_turn() -> None:
    story = Story()
    story.provider(n.BlockStart(0, "thinking"), n.Opaque(0, "signature", "S"), n.BlockStop(0), *text(1, "Let me look."))
    story.provider(*call(2, "a", "weather", "{}"), *call(3, "b", "weather", '{"x":1}'))
    story.provider(n.Done("tool_use", "tool_use"))
    [handed] = of_type(story.effects, RunTools)  # pyright: ignore[reportArgumentType]
    assert [(w.block, w.tool_id, w.name, w.arguments) for w in handed.work] == [
        (2, "a", "weather", "{}"),
        (3, "b", "weather", '{"x":1}'),
    ]
    assert story.control(ToolReturned(3, "second", False)) == [], "told in the order of the calls"
    returned = story.control(ToolReturned(2, "first", True))
    assert [(e.tool_id, e.content, e.is_error, e.block) for e in of_type(returned, BlockComplete)] == [
        ("a", "first", True, 4),
        ("b", "second", None, 5),
    ]
    turn = story.effects[-1]
    assert isinstance(turn, NextTurn)
    assert (turn.work.turn, turn.work.attempt) == (1, 2)
    assert turn.history == [
        Message(
            role="assistant",
            content=[
                ThinkingPart(text="", signature="S"),
                TextPart(text="Let me look."),
                ToolCallPart(tool_id="a", tool_name="weather", arguments="{}"),
                ToolCallPart(tool_id="b", tool_name="weather", arguments='{"x":1}'),
            ],
        ),
        Message(
            role="tool",
            content=[
                ToolResultPart(tool_id="a", tool_name="weather", content="first", is_error=True),
                ToolResultPart(tool_id="b", tool_name="weather", content="second"),
            ],
        ),
    ]
    after = story.provider(*text(0, "Sunny."), n.Done("stop"))
    assert of_type(after, BlockStarted)[0].block == 6, "numbering goes on over turns"
    assert after[-1].turn == 1


def test_a_call_to_a_tool_that_the_request_does_not_list_never_runs() -> None:
    story = Story()
    story.provider(*call(0, "a", "rm_rf"), *call(1, "b", "weather"), n.Done("tool_use"))
    [handed] = of_type(story.effects, RunTools)  # pyright: ignore[reportArgumentType]
    assert [w.tool_id for w in handed.work] == ["b"]
    story.control(ToolReturned(1, "sunny", False))
    results = [(e.tool_id, e.is_error) for e in of_type(story.events, BlockComplete) if e.kind == "tool_result"]
    assert results == [("a", True), ("b", None)]
    assert isinstance(story.effects[-1], NextTurn)


def test_the_model_is_informed_at_once_if_no_call_may_run() -> None:
    story = Story()
    story.provider(*call(0, "a", "rm_rf"), n.Done("tool_use"))
    assert [type(e) for e in story.effects] == [NextTurn]


def test_a_second_result_for_a_call_is_ignored() -> None:
    story = Story()
    story.provider(*call(0, "a", "f"), *call(1, "b", "f"), n.Done("tool_use"))
    story.control(ToolReturned(0, "one", False))
    assert story.control(ToolReturned(0, "two", False)) == []


def test_at_the_depth_limit_calls_are_reported_and_not_run() -> None:
    story = Story(max_tool_depth=0)
    story.provider(*call(0, "a", "f"), n.Done("stop", "completed"))
    assert isinstance(story.events[-1], Completed)
    assert story.events[-1].finish == "tool_use"
    assert story.effects == [EndRun("completed")]


@pytest.mark.parametrize("finish", ["length", "content_filter", "unknown"])
def test_calls_never_run_after_an_unsound_finish(finish: n.FinishReason) -> None:
    story = Story()
    story.provider(*call(0, "a", "f", "{}"), n.Done(finish))
    assert not of_type(story.effects, RunTools)  # pyright: ignore[reportArgumentType]
    assert isinstance(story.events[-1], Completed)
    assert story.events[-1].finish == finish


def test_a_call_that_its_provider_never_completed_is_cut_and_never_runs() -> None:
    story = Story()
    story.provider(n.ToolCallStart(0, "a", "f"), n.ToolCallDelta(0, "{}"), n.Done("tool_use"))
    [complete] = of_type(story.events, BlockComplete)
    assert (complete.cut, complete.input, complete.input_error) == (True, None, "the call was cut off")
    assert story.effects == [EndRun("completed")]


def test_a_failure_before_anything_visible_is_tried_again() -> None:
    story = Story()
    story.provider(n.BlockStart(0, "thinking"), n.ThinkingDelta(0, "hm"), n.Failed(OVERLOADED))
    cut, retry = story.events[-2:]
    assert isinstance(cut, BlockComplete)
    assert cut.cut
    assert isinstance(retry, Retrying)
    assert (retry.next_attempt, retry.drop_from) == (2, 0)
    turn = story.effects[-1]
    assert isinstance(turn, NextTurn)
    assert (turn.work.turn, turn.work.attempt, turn.history) == (0, 2, None)
    assert turn.work.not_before_ms == story.at_ms + retry.delay_ms


def test_a_past_attempt_emits_nothing_more() -> None:
    story = Story()
    story.provider(n.Failed(OVERLOADED))
    assert story.provider(*text(0, "late"), attempt=1) == []
    assert of_type(story.provider(*text(0, "new")), Chunk)[0].text == "new"


def test_after_visible_text_the_default_is_to_end_and_not_to_repeat() -> None:
    failed, cut = Story(), Story()
    for story in (failed, cut):
        story.provider(n.BlockStart(0, "text"), n.TextDelta(0, "Hel"))
    failed.provider(n.Failed(OVERLOADED))
    cut.provider(n.Cut("the stream ended early"))
    assert isinstance(failed.events[-1], RunFailedEvent)
    assert failed.events[-1].error == OVERLOADED
    assert isinstance(cut.events[-1], Incomplete)
    assert cut.events[-1].reason == "the stream ended early"
    assert of_type(cut.events, BlockComplete)[0].content == "Hel"


def test_a_run_without_visible_output_can_be_retried_completely() -> None:
    story = Story(visible=False)
    story.provider(n.BlockStart(0, "text"), n.TextDelta(0, "Hel"), n.Failed(OVERLOADED))
    assert isinstance(story.events[-1], Retrying)
    story.provider(*text(0, "Hello"), n.Done("stop"))
    assert [(c.text, c.visible) for c in of_type(story.events, Chunk)] == [("Hel", False), ("Hello", False)]
    end = story.events[-1]
    assert isinstance(end, Completed)
    assert end.timing.first_visible_ms is None


def test_restart_reports_which_blocks_are_void() -> None:
    story = Story(on_failure="restart")
    story.provider(*text(0, "one"), n.BlockStart(1, "text"), n.TextDelta(1, "tw"), LOST)
    again = story.events[-1]
    assert isinstance(again, Restarted)
    assert again.drop_from == 0
    story.provider(*text(0, "anew"), n.Failed(OVERLOADED))
    assert isinstance(story.events[-1], Restarted)
    assert story.events[-1].drop_from == 2, "numbers are never used twice"


@pytest.mark.parametrize(
    ("policy", "after"), [("before_first_visible", [Incomplete]), ("restart", [Restarted, Answering])]
)
def test_a_message_that_begins_again_is_not_emitted_twice_by_default(policy: str, after: list[type]) -> None:
    story = Story(on_failure=policy)
    story.provider(n.Start("m"), n.BlockStart(0, "text"), n.TextDelta(0, "one"), n.Start("m", "again", 1))
    assert [type(e) for e in story.events[-len(after) :]] == after


def test_who_answers_is_known_before_the_first_block() -> None:
    story = Story()
    story.provider(n.Start("m-2026-11-01", "msg_1"))
    named = Answering(run="r1", seq=1, turn=0, attempt=1, model="m-2026-11-01", response_id="msg_1")
    assert story.events[1:] == [named]
    story.provider(*text(0, "Hello"), n.Done("stop"))
    assert of_type(story.events, Answering) == [named]


def test_an_answer_without_a_name_announces_none() -> None:
    story = Story()
    story.provider(n.Start(""), *text(0, "Hello"), n.Done("stop"))
    assert of_type(story.events, Answering) == []


def test_a_message_that_begins_again_before_any_visible_text_continues() -> None:
    story = Story()
    story.provider(n.Start("m"), n.BlockStart(0, "thinking"), n.ThinkingDelta(0, "hm"), n.Start("m", "again", 1))
    [again], [first, second] = of_type(story.events, Retrying), of_type(story.events, Answering)
    assert (again.next_attempt, again.drop_from) == (1, 0)
    assert first.seq < again.seq < second.seq
    assert (first.response_id, second.response_id) == (None, "again")
    story.provider(*text(1, "said"), n.Done("stop"))
    assert [e.block for e in of_type(story.events, BlockStarted)] == [0, 1]
    assert isinstance(story.events[-1], Completed)


def test_before_first_output_retries_until_the_first_argument_of_a_call() -> None:
    story = Story(on_failure="before_first_output", max_tool_depth=0)
    story.provider(*item(0, "x", "{}"), n.ToolCallStart(1, "a", "f"), n.Failed(OVERLOADED))
    assert isinstance(story.events[-1], Retrying), "an item of the provider and the name of a call may be void"
    story.provider(n.ToolCallStart(0, "a", "f"), n.ToolCallDelta(0, '{"a'), n.Failed(OVERLOADED))
    end, failed = story.events[-2:]
    assert isinstance(end, BlockComplete)
    assert end.cut
    assert isinstance(failed, RunFailedEvent)


def test_before_first_output_does_not_void_an_argument_if_the_provider_begins_again() -> None:
    story = Story(on_failure="before_first_output", max_tool_depth=0)
    story.provider(n.Start("m"), n.ToolCallStart(0, "a", "f"), n.ToolCallDelta(0, '{"a'), n.Start("m", "again", 1))
    assert isinstance(story.events[-1], Incomplete)


def test_fail_means_no_retry() -> None:
    story = Story(on_failure="fail")
    story.provider(n.Failed(OVERLOADED))
    assert isinstance(story.events[-1], RunFailedEvent)


def test_tries_are_bounded_and_lost_workers_are_counted_apart() -> None:
    story = Story(rules=RunLimits(max_attempts=2, max_losses=3))
    for _ in range(3):
        story.provider(LOST)
        assert isinstance(story.events[-1], Retrying)
    story.provider(n.Failed(OVERLOADED))
    assert isinstance(story.events[-1], Retrying)
    story.provider(n.Failed(OVERLOADED))
    assert isinstance(story.events[-1], RunFailedEvent)


def test_a_turn_that_kills_its_workers_is_retried_with_growing_delays_and_then_ends() -> None:
    rules = RunLimits(max_losses=6, base_delay_ms=500, max_delay_ms=2000)
    story = Story(rules=rules)
    for least, most in ((0, 0), (0, 0), (250, 500), (500, 1000), (1000, 2000), (1000, 2000)):
        story.provider(LOST)
        event = story.events[-1]
        assert isinstance(event, Retrying)
        assert least <= event.delay_ms <= most
    story.provider(LOST)
    end = story.events[-1]
    assert isinstance(end, Incomplete)
    assert end.error
    assert end.error.code == WORKER_LOST


def test_retry_after_is_the_least_delay_and_too_long_a_one_ends_the_run() -> None:
    wait = ErrorInfo(code="rate_limit", kind="rate_limit", message="", retryable=True, retry_after_s=7)
    story = Story()
    story.provider(n.Failed(wait))
    assert isinstance(story.events[-1], Retrying)
    assert story.events[-1].delay_ms >= 7_000
    hour = ErrorInfo(code="rate_limit", kind="rate_limit", message="", retryable=True, retry_after_s=3_600)
    story = Story()
    story.provider(n.Failed(hour))
    assert isinstance(story.events[-1], RunFailedEvent)


def test_cancel_keeps_what_came_and_answers_every_call() -> None:
    story = Story()
    story.provider(n.UsageSeen(Usage(input=5)), *call(0, "a", "f"), n.ToolCallStart(1, "b", "g"))
    story.control(CancelRequested("enough", 7))
    results = [
        (e.tool_id, e.content, e.is_error) for e in of_type(story.events, BlockComplete) if e.kind == "tool_result"
    ]
    assert results == [("a", "cancelled", True), ("b", "cancelled", True)]
    end = story.events[-1]
    assert isinstance(end, Cancelled)
    assert (end.reason, end.heard_through, end.usage) == ("enough", 7, Usage(input=5))
    assert story.provider(*text(2, "more")) == []
    assert story.control(CancelRequested(), ToolReturned(0, "late", False)) == []


def test_cancel_during_tools_keeps_the_results_that_came() -> None:
    story = Story()
    story.provider(*call(0, "a", "f"), *call(1, "b", "f"), n.Done("tool_use"))
    story.control(ToolReturned(1, "real", False))
    story.control(CancelRequested())
    results = [e.content for e in of_type(story.events, BlockComplete) if e.kind == "tool_result"]
    assert results == ["cancelled", "real"]


def test_usage_says_which_answer_it_is_of_and_never_that_of_another_turn() -> None:
    story = Story()
    story.provider(n.Start("m-2", "resp_1"), *call(0, "a", "f"), n.Done("tool_use", usage=Usage(input=10)))
    story.control(ToolReturned(0, "ok", False))
    story.provider(*text(0, "done"), n.Done("stop", usage=Usage(input=20)))
    first, second = of_type(story.events, UsageReported)
    assert (first.model, first.response_id) == ("m-2", "resp_1")
    assert (second.model, second.response_id) == (None, None)


def test_names_from_an_answer_are_cut_to_the_allowed_length() -> None:
    story = Story()
    story.provider(n.Start("m" * 10**6, "r" * 10**6), *text(0, "Hi"), n.Done("stop", usage=Usage(input=1)))
    [usage] = of_type(story.events, UsageReported)
    assert (len(usage.model or ""), len(usage.response_id or "")) == (MAX_NAME_CHARS, MAX_NAME_CHARS)


def test_usage_adds_up_over_turns() -> None:
    story = Story()
    story.provider(*call(0, "a", "f"), n.Done("tool_use", usage=Usage(input=10, output=1)))
    story.control(ToolReturned(0, "ok", False))
    story.provider(*text(0, "done"), n.Done("stop", usage=Usage(input=20, output=2, reasoning=1)))
    assert [(e.usage.input, e.total.input) for e in of_type(story.events, UsageReported)] == [(10, 10), (20, 30)]
    end = story.events[-1]
    assert isinstance(end, Completed)
    assert end.usage == Usage(input=30, output=3, reasoning=1)


def test_a_paused_turn_is_continued() -> None:
    story = Story()
    story.provider(*item(0, "server_tool_use", '{"id":1}'), *text(1, "Searching"), n.Done("pause", "pause_turn"))
    turn = story.effects[-1]
    assert isinstance(turn, NextTurn)
    assert turn.history is not None
    assert [type(p).__name__ for p in turn.history[0].content] == ["ExtraPart", "TextPart"]


def test_a_block_beyond_its_limit_ends_the_run_with_a_named_error() -> None:
    story = Story(rules=RunLimits(block_chars=10))
    story.provider(n.BlockStart(0, "text"), n.TextDelta(0, "0123456789"), n.TextDelta(0, "x"))
    end = story.events[-1]
    assert isinstance(end, RunFailedEvent)
    assert (end.error.code, end.error.kind, end.error.where) == ("too_large", "limit", "block 0")


def test_a_large_image_that_the_blob_store_did_not_take_ends_the_run_with_that_reason() -> None:
    story = Story(rules=RunLimits(block_chars=10))
    note = n.Extra("tokenbus.image_not_stored", '"the blob store is unavailable"', 0)
    story.provider(n.BlockStart(0, "image"), note, n.Image(0, "image/png", "A" * 11, True))
    end = story.events[-1]
    assert isinstance(end, RunFailedEvent)
    assert (end.error.code, end.error.retryable) == ("image_not_stored", True)
    assert "the blob store is unavailable" in end.error.message


def test_too_many_events_end_the_run_with_a_named_error() -> None:
    story = Story(rules=RunLimits(run_events=5))
    for block in range(3):
        story.provider(*text(block, "x"))
    end = story.events[-1]
    assert isinstance(end, RunFailedEvent)
    assert end.error.code == "too_many_events"
    assert len(story.events) == end.seq + 1


def test_an_error_finish_fails_the_run() -> None:
    story = Story()
    story.provider(*text(0, "x"), n.Done("error", "MALFORMED_FUNCTION_CALL"))
    end = story.events[-1]
    assert isinstance(end, RunFailedEvent)
    assert end.finish_raw == "MALFORMED_FUNCTION_CALL"


def test_an_id_that_no_provider_gave_is_distinct_in_the_whole_run_and_the_same_everywhere() -> None:
    story = Story()
    nameless = [n.ToolCallStart(0, "call_0", "f", derived=True), n.ToolCallDone(0)]
    story.provider(*nameless, n.Done("tool_use"))
    story.control(ToolReturned(0, "one", False))
    story.provider(*nameless, n.Done("tool_use"))
    story.control(ToolReturned(2, "two", False))
    ids = [e.tool_id for e in of_type(story.events, BlockComplete)]
    assert ids[0] == ids[1]
    assert ids[2] == ids[3]
    assert len(set(ids)) == 2
    assert "call_0" not in ids
    assert [w.work[0].tool_id for w in of_type(story.effects, RunTools)] == [ids[0], ids[2]]  # pyright: ignore[reportArgumentType]
    turns: list[NextTurn] = of_type(story.effects, NextTurn)  # pyright: ignore[reportArgumentType]
    sent = [part.tool_id for turn in turns for message in turn.history or () for part in message.content]  # pyright: ignore
    assert sent == ids, "the provider reads one id in the call and in its result"


def test_images_of_a_result_go_to_the_model_and_are_published() -> None:
    story = Story()
    story.provider(*call(0, "a", "f"), n.Done("tool_use"))
    here = ResultImage("image/png", "aGk=")
    both = ResultImage("image/webp", blob_id="sha256:1", size_bytes=2)
    far = ResultImage("image/gif", blob_id="sha256:2")
    returned = story.control(ToolReturned(0, "a chart", False, images=[here, both, far]))
    [shown] = of_type(returned, BlockComplete)
    assert shown.images == [
        ImageRef(media_type="image/png", base64="aGk="),
        ImageRef(media_type="image/webp", blob_id="sha256:1", size_bytes=2),
        ImageRef(media_type="image/gif", blob_id="sha256:2"),
    ]
    turn = story.effects[-1]
    assert isinstance(turn, NextTurn)
    assert turn.history
    assert turn.history[-1].content == [
        ToolResultPart(
            tool_id="a",
            tool_name="f",
            content=[
                TextPart(text="a chart"),
                ImagePart(source=Base64Source(media_type="image/png", data="aGk=")),
                ImagePart(source=BlobSource(blob_id="sha256:1", media_type="image/webp", size_bytes=2)),
            ],
        )
    ]


def test_a_deadline_ends_a_run_in_any_state_and_gives_every_call_a_result() -> None:
    streaming, tools, waiting = Story(), Story(), Story()
    streaming.provider(n.BlockStart(0, "text"), n.TextDelta(0, "Hel"), *call(1, "a", "f"), n.UsageSeen(Usage(input=5)))
    tools.provider(*call(0, "a", "f"), *call(1, "b", "f"), n.Done("tool_use"))
    tools.control(ToolReturned(1, "real", False))
    for story in (streaming, tools, waiting):
        story.control(DeadlinePassed("deadline"))
        end = story.events[-1]
        assert isinstance(end, RunFailedEvent)
        assert (end.error.code, end.error.kind) == ("deadline", "timeout")
        assert story.effects[-1] == EndRun("failed")
        assert story.control(DeadlinePassed("deadline"), CancelRequested()) == [], "one end and no second"
    results = [e.content for e in of_type(tools.events, BlockComplete) if e.kind == "tool_result"]
    assert results == ["the run's deadline has passed", "real"]
    assert [(e.kind, e.cut) for e in of_type(streaming.events, BlockComplete)] == [
        ("tool_call", None),
        ("text", True),
        ("tool_result", None),
    ]
    assert streaming.events[-1].usage == Usage(input=5)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("policy", ["before_first_visible", "continue", "restart"])
def test_a_deadline_that_the_fetcher_found_first_ends_the_run_in_the_same_way(policy: str) -> None:
    passed = ErrorInfo(code="deadline", kind="timeout", message="the run's deadline has passed")
    before, amid, clock = (Story(on_failure=policy, continues=True) for _ in range(3))
    before.provider(n.Failed(passed))
    for story in (amid, clock):
        story.provider(n.BlockStart(0, "text"), n.TextDelta(0, "Hel"))
    amid.provider(n.Cut("the run's deadline has passed", passed))
    clock.control(DeadlinePassed("deadline"))
    assert amid.events == clock.events
    assert isinstance(before.events[-1], RunFailedEvent)


@pytest.mark.parametrize("policy", ["before_first_visible", "continue", "restart"])
def test_an_attempt_that_breaks_after_the_deadline_ends_the_run_as_the_deadline_does(policy: str) -> None:
    """In any order: the clock, the fetcher, or events that follow from the run's end."""
    story = Story(on_failure=policy, continues=True, deadline_ms=1)
    story.provider(n.BlockStart(0, "text"), n.TextDelta(0, "Hel"))
    lost = ErrorInfo(code="worker_lost", kind="internal", message="the fetcher was lost", retryable=True)
    story.provider(n.Cut("the fetcher was lost", lost))
    end = story.events[-1]
    assert isinstance(end, RunFailedEvent)
    assert end.error.code == "deadline"


def test_a_run_that_ends_during_a_call_has_the_providers_id_of_the_call_for_every_error() -> None:
    passed = ErrorInfo(code="deadline", kind="timeout", message="", request_id="req-1")
    silent, clock, done = Story(), Story(), Story()
    silent.provider(n.Failed(passed))  # before the provider's first event
    for story in (clock, done):
        story.provider(n.Start("m-2026", "resp-1", request_id="req-1"), n.BlockStart(0, "text"), n.TextDelta(0, "Hel"))
    clock.control(DeadlinePassed("deadline"))
    done.provider(n.Done("error"))
    ends = [story.events[-1] for story in (silent, clock, done)]
    assert [end.error.request_id for end in ends if isinstance(end, RunFailedEvent)] == ["req-1"] * 3
    tools = Story()
    tools.provider(n.Start("m-2026", "resp-1", request_id="req-1"), *call(0, "a", "f"), n.Done("tool_use"))
    tools.control(DeadlinePassed("deadline"))
    end = tools.events[-1]
    assert isinstance(end, RunFailedEvent)
    assert end.error.request_id is None, "no call was running"


def test_a_run_without_a_worker_ends_incomplete_unless_an_event_arrives_first() -> None:
    story = Story()
    story.provider(n.BlockStart(0, "text"), n.TextDelta(0, "Hel"))
    judged = story.run.state.events_applied
    story.provider(n.TextDelta(0, "lo"))
    assert story.control(DeadlinePassed("silent", judged)) == []
    story.control(DeadlinePassed("silent", story.run.state.events_applied))
    end = story.events[-1]
    assert isinstance(end, Incomplete)
    assert end.error
    assert end.error.code == "lost"


def test_content_before_calls_and_usage_of_each_turn_come_as_events_in_their_order() -> None:
    story = Story()
    story.provider(n.BlockStart(0, "thinking"), n.ThinkingDelta(0, "hm"), n.BlockStop(0), *text(1, "Let me look."))
    story.provider(*call(2, "a", "f", "{}"), n.Done("tool_use", usage=Usage(output=1)))
    story.control(ToolReturned(2, "found", False))
    story.provider(n.BlockStart(0, "image"), n.Image(0, "image/png", "aGk=", final=True), n.BlockStop(0))
    story.provider(*text(1, "There."), n.Done("stop", usage=Usage(output=2)))
    order = [
        (type(e).__name__, e.kind) if isinstance(e, BlockStarted | BlockComplete) else type(e).__name__
        for e in story.events
        if not isinstance(e, Chunk)
    ]
    blocks = [
        ("BlockStarted", kind) if start else ("BlockComplete", kind)
        for kind in ("thinking", "text", "tool_call", "tool_result", "image", "text")
        for start in (True, False)
    ]
    assert order == ["Started", *blocks[:6], "UsageReported", *blocks[6:], "UsageReported", "Completed"]
    assert [e.total.output for e in of_type(story.events, UsageReported)] == [1, 3]


def test_a_run_that_has_ended_before_is_over_without_another_end() -> None:
    story = Story()
    story.provider(n.BlockStart(0, "text"), n.TextDelta(0, "text"))
    assert story.control(DeadlinePassed("silent", HAS_ENDED), CancelRequested()) == []
    assert story.run.over
    assert story.effects[-1] == ForgetRun()


def test_an_image_that_was_shown_as_a_preview_is_not_drawn_again() -> None:
    story = Story()
    story.provider(n.Start("m"), n.BlockStart(0, "image"), n.Image(0, "image/png", "AAAA", final=False), LOST)
    end = story.events[-1]
    assert isinstance(end, Incomplete)
    assert end.timing.first_visible_ms is not None


def test_a_turn_that_its_provider_ended_with_an_error_may_be_retried_by_the_client() -> None:
    story = Story()
    story.provider(n.Start("m"), n.Done("error", "MALFORMED_FUNCTION_CALL"))
    end = story.events[-1]
    assert isinstance(end, RunFailedEvent)
    assert (end.error.code, end.error.raw, end.error.retryable) == ("finish_error", "MALFORMED_FUNCTION_CALL", True)
