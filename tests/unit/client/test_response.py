"""Folding a run's events into its result."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from tokenbus.client.response import Response, ResponseBuilder
from tokenbus.errors import RunCancelled, RunFailed, RunIncomplete
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.public import (
    BlockComplete,
    BlockKind,
    BlockStarted,
    Cancelled,
    Chunk,
    Completed,
    ImagePreview,
    ImageRef,
    Incomplete,
    PublicEvent,
    Restarted,
    Retrying,
    RunFailedEvent,
    Started,
    Timing,
    ToolProgress,
    UsageReported,
)
from tokenbus.events.usage import Usage

AT: dict[str, Any] = {"run": "r", "seq": 0, "turn": 0, "attempt": 1}
TIMING = Timing(first_byte_ms=1, total_ms=2)
ERROR = ErrorInfo(code="overloaded_error", kind="overloaded", message="Overloaded", retryable=True)


def piece(block: int, text: str, kind: BlockKind = "text", *, visible: bool | None = None) -> Chunk:
    shown = kind == "text" if visible is None else visible
    return Chunk(**AT, block=block, kind=kind, text=text, visible=shown, depth=0)


def test_the_text_is_that_of_the_text_blocks_whether_it_is_visible_or_not():
    response = fold(piece(0, "hm", "thinking"), piece(1, "Well ", visible=False), piece(1, "said", visible=False))
    assert (response.text, response.thinking) == ("Well said", "hm")


def test_the_texts_of_turns_stay_apart_and_the_last_one_has_a_name():
    later = msgspec.structs.replace(piece(3, "It is fine."), turn=1)
    response = fold(piece(0, "Let me "), piece(1, "look."), later)
    assert (response.text, response.last_text) == ("Let me look.\n\nIt is fine.", "It is fine.")
    silent = msgspec.structs.replace(piece(3, "{}", "tool_call"), turn=1)
    assert fold(piece(0, "Let me look."), silent).text == "Let me look."
    assert fold(piece(0, "Let me look."), silent).last_text == ""


def whole(block: int, content: str | None, kind: BlockKind = "text", **fields: Any) -> BlockComplete:
    return BlockComplete(**AT, block=block, kind=kind, content=content, **fields)


def completed(**fields: Any) -> Completed:
    return Completed(**AT, finish="stop", timing=TIMING, **fields)


def numbered(events: Iterable[PublicEvent]) -> list[PublicEvent]:
    return [msgspec.structs.replace(event, seq=seq) for seq, event in enumerate(events)]


def fold(*events: PublicEvent) -> Response:
    return Response.of(numbered(events))


def test_a_completed_run_gives_text_thinking_blocks_and_usage():
    thought, call, text_block = (
        whole(0, "hm", "thinking"),
        whole(1, None, "tool_call", arguments="{}"),
        whole(3, "It is sunny."),
    )
    result = fold(
        Started(**AT, provider="p", model="m"),
        BlockStarted(**AT, block=0, kind="thinking"),
        piece(0, "h", "thinking"),
        piece(0, "m", "thinking"),
        thought,
        piece(1, "{}", "tool_call"),
        call,
        piece(2, "sunny", "tool_result"),
        whole(2, "sunny", "tool_result"),
        piece(3, "It is "),
        piece(3, "sunny."),
        text_block,
        UsageReported(**AT, usage=Usage(output=1), total=Usage(output=1)),
        completed(usage=Usage(input=5, output=7), finish_raw="end_turn", stop_string="END"),
    )
    assert (result.run, result.status, result.text, result.thinking) == ("r", "completed", "It is sunny.", "hm")
    assert [b.block for b in result.blocks] == [0, 1, 2, 3]
    assert result.tool_calls == [msgspec.structs.replace(call, seq=6)]
    assert (result.usage, result.finish, result.finish_raw) == (Usage(input=5, output=7), "stop", "end_turn")
    assert result.stop_string == "END"
    assert (result.timing, result.error, result.reason, result.events) == (TIMING, None, None, 14)
    assert result.or_raise() is result


def test_the_images_of_a_run_are_those_of_its_answer_and_none_of_its_drafts():
    draft, cat = ImageRef(media_type="image/png", draft=True), ImageRef(media_type="image/png", blob_id="sha256:1")
    preview = ImagePreview(**AT, block=1, kind="image", index=0, image=ImageRef(media_type="image/png", base64="AA"))
    result = fold(
        BlockStarted(**AT, block=0, kind="image"),
        whole(0, None, "image", image=draft),
        BlockStarted(**AT, block=1, kind="image"),
        preview,
        whole(1, None, "image", image=cat),
        whole(2, None, "image", cut=True),
        completed(),
    )
    assert result.images == [cat]
    assert [block.image for block in result.blocks] == [draft, cat, None]


def test_a_tools_progress_is_no_part_of_the_response():
    progress = ToolProgress(**AT, block=0, tool_id="a", tool_name="f", progress=1)
    result = fold(whole(0, None, "tool_call", arguments="{}"), progress, whole(1, "done", "tool_result"), completed())
    assert [block.kind for block in result.blocks] == ["tool_call", "tool_result"]
    assert (result.text, result.events) == ("", 4)


def test_interleaved_blocks_are_put_in_the_order_of_their_numbers():
    events = [
        piece(1, "se"),
        piece(0, "fir"),
        piece(1, "cond"),
        piece(0, "st, "),
        whole(1, "second"),
        whole(0, "first, "),
    ]
    result = fold(*events, completed())
    assert result.text == "first, second"
    assert [b.block for b in result.blocks] == [0, 1]


@pytest.mark.parametrize("again", [Retrying, Restarted])
def test_blocks_that_a_retry_makes_void_are_dropped_and_later_ones_kept(again: type[Retrying | Restarted]):
    void = again(**AT, error=ERROR, next_attempt=2, delay_ms=0, drop_from=1)
    result = fold(
        *(piece(0, "kept"), whole(0, "kept")),
        *(piece(1, "void"), whole(1, "void"), piece(2, "vo", "thinking"), whole(2, "vo", "thinking", cut=True)),
        void,
        *(piece(3, " again"), whole(3, " again")),
        completed(),
    )
    assert (result.text, result.thinking) == ("kept again", "")
    assert [b.block for b in result.blocks] == [0, 3]
    assert result.events == 10


def test_an_incomplete_run_raises_with_its_partial_result():
    end = Incomplete(**AT, finish="unknown", timing=TIMING, reason="the stream broke off", error=ERROR)
    result = fold(piece(0, "Half"), whole(0, "Half", cut=True), end)
    assert (result.status, result.error, result.reason) == ("incomplete", ERROR, "the stream broke off")
    with pytest.raises(RunIncomplete, match="the stream broke off") as caught:
        result.or_raise()
    assert caught.value.result is result


def test_a_failed_run_raises_with_its_error_and_partial_result():
    result = fold(piece(0, "Half"), RunFailedEvent(**AT, finish="error", timing=TIMING, error=ERROR))
    with pytest.raises(RunFailed, match="overloaded_error: Overloaded") as caught:
        result.or_raise()
    assert (caught.value.run, caught.value.error) == ("r", ERROR)
    assert caught.value.result
    assert caught.value.result.text == "Half"


def test_a_cancelled_run_raises_with_its_reason_and_partial_result():
    end = Cancelled(**AT, finish="unknown", timing=TIMING, reason="barge-in", heard_through=1)
    result = fold(piece(0, "Half"), end)
    with pytest.raises(RunCancelled, match="barge-in") as caught:
        result.or_raise()
    assert (caught.value.reason, caught.value.result) == ("barge-in", result)
    assert result.heard_through == 1


def test_an_open_run_shows_its_open_blocks_as_beginnings():
    call = BlockStarted(**AT, block=1, kind="tool_call", tool_id="t", tool_name="weather")
    name = Chunk(
        **AT,
        block=1,
        kind="tool_call",
        text="weather",
        visible=False,
        depth=0,
        tool_call_part="name",
        tool_name="weather",
    )
    more = Chunk(**AT, block=1, kind="tool_call", text='{"ci', visible=False, depth=0, tool_call_part="input")
    usage = UsageReported(**AT, usage=Usage(output=1), total=Usage(output=3))
    result = fold(Started(**AT, provider="p", model="m"), piece(0, "Hel"), usage, piece(0, "lo"), call, name, more)
    assert (result.status, result.text, result.finish, result.timing) == ("open", "Hello", None, None)
    assert result.usage == Usage(output=3)
    assert [(b.kind, b.content, b.arguments, b.tool_name, b.cut) for b in result.blocks] == [
        ("text", "Hello", None, None, True),
        ("tool_call", None, '{"ci', "weather", True),
    ]
    assert result.or_raise() is result


def test_a_block_that_the_next_attempt_continues_is_one_block():
    on = Retrying(**AT, error=ERROR, next_attempt=2, delay_ms=0, drop_from=1, continues=True)
    later: dict[str, Any] = {**AT, "attempt": 2}
    rest = Chunk(**later, block=0, kind="text", text=" there", visible=True, depth=0)
    events = [BlockStarted(**AT, block=0, kind="text"), piece(0, "Hello"), piece(1, "hm", "thinking"), on, rest]
    assert fold(*events).text == "Hello there"
    end = BlockComplete(**later, block=0, kind="text", content="Hello there")
    result = fold(*events, end, completed())
    assert (result.text, result.thinking, [b.content for b in result.blocks]) == ("Hello there", "", ["Hello there"])


def test_events_that_come_again_change_nothing():
    events = numbered([piece(0, "a"), piece(0, "b"), whole(0, "ab"), completed()])
    builder = ResponseBuilder()
    for upto in range(len(events)):
        for event in events[: upto + 1]:
            builder.add(event)
        assert builder.response == Response.of(events[: upto + 1])
    assert builder.add(events[0])


def test_an_event_of_another_run_and_no_event_at_all_are_refused():
    builder = ResponseBuilder()
    with pytest.raises(ValueError, match="no event"):
        assert builder.response
    builder.add(piece(0, "a"))
    with pytest.raises(ValueError, match="run other"):
        builder.add(msgspec.structs.replace(piece(0, "b"), run="other", seq=1))


class City(msgspec.Struct):
    name: str
    people: int


def test_the_answer_to_a_schema_is_parsed_and_checked():
    answer = fold(piece(0, '{"name": "Uri", '), piece(0, '"people": 37000}'), completed())
    assert answer.parsed() == {"name": "Uri", "people": 37000}
    assert answer.parsed(City) == City("Uri", 37000)
    with pytest.raises(ValueError, match=r"not the JSON that was expected.*people"):
        fold(piece(0, '{"name": "Uri"}'), completed()).parsed(City)


@pytest.mark.parametrize("text", ["", "{", "It is Uri.", "[" * 10_000])
def test_an_answer_that_is_no_json_is_not_parsed(text: str):
    with pytest.raises(ValueError, match="answer of run"):
        fold(piece(0, text), completed()).parsed()


HEARD_RUN = numbered(
    (
        piece(0, "Let me", "thinking"),
        whole(0, "Let me", "thinking", signature="s0"),
        piece(1, "It is "),
        piece(1, "raining 🌧 in Bonn."),
        whole(1, "It is raining 🌧 in Bonn.", opaque={"citations": "[]"}),
        whole(2, None, "tool_call", tool_id="t", tool_name="weather", arguments="{}"),
        whole(3, "18", "tool_result", tool_id="t"),
    )
)


@pytest.mark.parametrize(
    ("through", "characters", "kinds", "text"),
    [
        (-1, None, [], None),
        (0, None, [], None),
        (1, None, ["thinking"], None),
        (2, None, ["thinking", "text"], "It is "),
        (3, 0, ["thinking", "text"], "It is "),
        (3, 9, ["thinking", "text"], "It is raining 🌧"),
        (3, 99, ["thinking", "text"], "It is raining 🌧 in Bonn."),
        (4, None, ["thinking", "text"], "It is raining 🌧 in Bonn."),
        (5, None, ["thinking", "text", "tool_call", "tool_result"], "It is raining 🌧 in Bonn."),
    ],
)
def test_what_was_not_heard_is_not_part_of_the_messages(
    through: int, characters: int | None, kinds: list[str], text: str | None
):
    end = Cancelled(
        **{**AT, "seq": 7}, finish="unknown", timing=TIMING, heard_through=through, heard_characters=characters
    )
    response = Response.of([*HEARD_RUN, end])
    messages: list[Any] = msgspec.to_builtins(response.messages)
    parts = [part for message in messages for part in message["content"]]
    assert [part["type"] for part in parts] == kinds
    assert [part["text"] for part in parts if part["type"] == "text"] == ([] if text is None else [text])
    # The provider gets its data back only with exactly what it wrote.
    assert all(("opaque" in part) == (text == response.text) for part in parts if part["type"] == "text")
    assert response.text == "It is raining 🌧 in Bonn."
    ended = ResponseBuilder(heard_through=through, heard_characters=characters)
    for event in [*HEARD_RUN, Completed(**{**AT, "seq": 7}, finish="stop", timing=TIMING)]:
        ended.add(event)
    assert msgspec.to_builtins(ended.response.messages) == messages
