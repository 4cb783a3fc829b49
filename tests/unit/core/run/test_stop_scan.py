"""Stop strings in chat mode: found however the text is cut, never published, and named in the run's end."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.core.run.script import Story, call, of_type, text
from tokenbus.core.run.effects import CloseAttempt, EndRun, RunTools
from tokenbus.events import normalized as n
from tokenbus.events.frames import CancelRequested
from tokenbus.events.public import BlockComplete, BlockStarted, Cancelled, Chunk, Completed, Incomplete


def story(*stops: str, **changes: Any) -> Story:
    return Story(stops=stops or ("END", "\nBob:"), **changes)


def visible_text(scenario: Story) -> str:
    return "".join(chunk.text for chunk in of_type(scenario.events, Chunk) if chunk.visible)


def contents(scenario: Story) -> list[str | None]:
    return [block.content for block in of_type(scenario.events, BlockComplete)]


@given(st.lists(st.integers(0, 30), max_size=6))
def test_however_the_text_is_cut_it_ends_before_the_first_stop_string(places: list[int]) -> None:
    text = "One E EN and two\nBob: END"
    ends = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    pieces = [text[a:b] for a, b in pairwise(ends)]
    scenario = story()
    scenario.provider(n.BlockStart(0, "text"))
    for piece in pieces:
        scenario.provider(n.TextDelta(0, piece))
        scenario.reborn()
    [end] = of_type(scenario.events, Completed)
    assert (end.finish, end.stop_string) == ("stop", "\nBob:")
    assert contents(scenario) == [visible_text(scenario)] == ["One E EN and two"]
    assert scenario.effects == [EndRun("completed")]


def test_the_start_of_a_stop_string_is_emitted_at_the_blocks_end() -> None:
    scenario = story()
    scenario.provider(*text(0, "The EN"), *text(1, "D"), n.Done("stop"))
    assert contents(scenario) == ["The EN", "D"]
    assert of_type(scenario.events, Completed)[0].stop_string is None


def test_a_text_that_is_nothing_but_a_stop_string_makes_no_block() -> None:
    scenario = story()
    scenario.provider(n.BlockStart(0, "text"), n.TextDelta(0, "END"))
    assert not of_type(scenario.events, BlockStarted)
    assert of_type(scenario.events, Completed)[0].stop_string == "END"


def test_a_block_that_ends_without_a_word_makes_none_either() -> None:
    scenario = story()
    scenario.provider(n.BlockStart(0, "text"), n.BlockStop(0), n.Done("stop"))
    assert not of_type(scenario.events, BlockStarted)


def test_thinking_and_arguments_are_no_place_for_a_stop_string() -> None:
    scenario = story(max_tool_depth=0)
    scenario.provider(n.BlockStart(0, "thinking"), n.ThinkingDelta(0, "END"), n.BlockStop(0))
    scenario.provider(*call(1, "t1", "f", '{"q":"END"}'), n.Done("tool_use"))
    assert [block.kind for block in of_type(scenario.events, BlockComplete)] == ["thinking", "tool_call"]


def test_a_call_complete_before_the_stop_string_runs_and_an_incomplete_one_does_not() -> None:
    scenario = story()
    scenario.provider(*call(0, "t1", "f", "{}"), n.ToolCallStart(1, "t2", "g"), n.BlockStart(2, "text"))
    scenario.provider(n.TextDelta(2, "Wait. END"))
    run, close = scenario.effects
    assert isinstance(run, RunTools)
    assert [work.name for work in run.work] == ["f"]
    assert isinstance(close, CloseAttempt)


def test_the_string_that_the_provider_stopped_on_is_reported_too() -> None:
    scenario = story()
    scenario.provider(*text(0, "One"), n.Done("stop", "stop_sequence", stop_string="END"))
    assert of_type(scenario.events, Completed)[0].stop_string == "END"


@pytest.mark.parametrize("broken", [n.Cut("cut"), CancelRequested()])
def test_withheld_text_is_released_when_the_answer_is_cut_off(broken: Any) -> None:
    scenario = story()
    scenario.provider(n.BlockStart(0, "text"), n.TextDelta(0, "The EN"), broken)
    assert visible_text(scenario) == "The EN"
    assert isinstance(scenario.events[-1], Incomplete | Cancelled)


def test_opaque_data_of_a_text_that_is_held_back_stays_with_it() -> None:
    scenario = story()
    scenario.provider(n.BlockStart(0, "text"), n.TextDelta(0, "EN"), n.Opaque(0, "signature", "sig"), n.BlockStop(0))
    assert of_type(scenario.events, BlockComplete)[0].signature == "sig"


def test_a_continued_answer_is_scanned_further_and_held_text_is_emitted_once() -> None:
    scenario = story(on_failure="continue", continues=True)
    scenario.provider(n.BlockStart(0, "text"), n.TextDelta(0, "The EN"), n.Cut("cut"))
    scenario.provider(n.BlockStart(0, "text"), n.TextDelta(0, "tries are END"))
    assert visible_text(scenario) == "The ENtries are "
    assert contents(scenario) == ["The ENtries are "]
    assert of_type(scenario.events, Completed)[0].stop_string == "END"


def test_data_beside_each_piece_does_not_hide_a_stop_string():
    story = Story(stops=("STOP",), max_tool_depth=0)
    story.provider(n.BlockStart(0, "text"))
    for piece in ("Hi S", "TO", "P there"):
        story.provider(n.TextDelta(0, piece), n.Extra("x.logprobs", "[1]", 0))
    [block] = of_type(story.events, BlockComplete)
    assert block.content == "Hi "
    assert isinstance(end := story.events[-1], Completed)
    assert end.stop_string == "STOP"
