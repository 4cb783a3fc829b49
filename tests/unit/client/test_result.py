"""Folding a run's events into its result."""

from __future__ import annotations

from typing import Any

import pytest

from tokenbus.client.result import Result, ResultBuilder
from tokenbus.errors import RunCancelled, RunFailed, RunIncomplete
from tokenbus.events.failure import ErrorInfo
from tokenbus.events.public import (
    BlockComplete,
    BlockKind,
    BlockStarted,
    Cancelled,
    Chunk,
    Completed,
    Incomplete,
    PublicEvent,
    Restarted,
    Retrying,
    RunFailedEvent,
    Started,
    Timing,
    UsageReported,
)
from tokenbus.events.usage import Usage

AT: dict[str, Any] = {"run": "r", "seq": 0, "turn": 0, "attempt": 1}
TIMING = Timing(first_byte_ms=1, total_ms=2)
ERROR = ErrorInfo(code="overloaded_error", kind="overloaded", message="Overloaded", retryable=True)


def piece(block: int, text: str, kind: BlockKind = "text", *, visible: bool | None = None) -> Chunk:
    shown = kind == "text" if visible is None else visible
    return Chunk(**AT, block=block, kind=kind, text=text, visible=shown, depth=0)


def whole(block: int, content: str | None, kind: BlockKind = "text", **fields: Any) -> BlockComplete:
    return BlockComplete(**AT, block=block, kind=kind, content=content, **fields)


def completed(**fields: Any) -> Completed:
    return Completed(**AT, finish="stop", timing=TIMING, **fields)


def fold(*events: PublicEvent) -> Result:
    builder = ResultBuilder()
    for event in events[:-1]:
        assert builder.add(event) is None
    result = builder.add(events[-1])
    assert result
    return result


def test_a_completed_run_gives_text_thinking_blocks_and_usage():
    thought, call, said = (
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
        said,
        UsageReported(**AT, usage=Usage(output=1), total=Usage(output=1)),
        completed(usage=Usage(input=5, output=7), finish_raw="end_turn"),
    )
    assert (result.run, result.status, result.text, result.thinking) == ("r", "completed", "It is sunny.", "hm")
    assert [b.block for b in result.blocks] == [0, 1, 2, 3]
    assert result.tool_calls == [call]
    assert (result.usage, result.finish, result.finish_raw) == (Usage(input=5, output=7), "stop", "end_turn")
    assert (result.timing, result.error, result.reason, result.events) == (TIMING, None, None, 14)
    assert result.or_raise() is result


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


def test_only_visible_pieces_of_a_text_block_are_its_text():
    assert fold(piece(0, "say"), piece(0, "[aside]", visible=False), piece(0, "ing"), completed()).text == "saying"


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
    result = fold(piece(0, "Half"), Cancelled(**AT, finish="unknown", timing=TIMING, reason="barge-in"))
    with pytest.raises(RunCancelled, match="barge-in") as caught:
        result.or_raise()
    assert (caught.value.reason, caught.value.result) == ("barge-in", result)
