"""A run in prefill mode: when its turns end, which calls run, and the text that the next turn continues."""

from __future__ import annotations

from typing import Any

from tests.unit.core.run.script import Story, of_type
from tokenbus.core.prefill.turn import MAX_IDLE, MAX_RESUMPTIONS
from tokenbus.core.run.effects import CloseAttempt, EndRun, NextTurn, RunTools
from tokenbus.events import normalized as n
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import TextReading, ToolReturned
from tokenbus.events.public import BlockComplete, Chunk, Completed, Incomplete
from tokenbus.events.requests import Message

CALL = '<function_calls><invoke name="f"><parameter name="q">a</parameter></invoke></function_calls>'
STOPPED = "</function_calls>"


def story(**setting: Any) -> Story:
    return Story(reading=TextReading(**{"stops": ("\nBob:",), **setting}))


def says(text: str) -> list[n.Normalized]:
    return [n.BlockStart(0, "text"), *(n.TextDelta(0, char) for char in text), n.BlockStop(0)]


def blocks(scenario: Story) -> list[tuple[str, str | None]]:
    return [(e.kind, e.arguments or e.content) for e in of_type(scenario.events, BlockComplete)]


def test_a_provider_that_stops_on_the_close_of_calls_ends_the_turn_and_the_calls_run() -> None:
    scenario = story()
    text = CALL.removesuffix(STOPPED)
    scenario.provider(*says(f"Hm.{text}"), n.Done("stop", "stop_sequence", stop_string=STOPPED))
    [handed] = of_type(scenario.effects, RunTools)  # pyright: ignore[reportArgumentType]
    assert [(w.name, w.arguments) for w in handed.work] == [("f", '{"q":"a"}')]
    scenario.control(ToolReturned(1, "result", False))
    turn = scenario.effects[-1]
    assert isinstance(turn, NextTurn)
    assert turn.history
    assert turn.history[0] == Message(role="assistant", content=f"Hm.{CALL}")
    assert (turn.work.turn, turn.so_far) == (1, None)


def test_a_turn_that_ends_before_its_provider_does_closes_the_attempt() -> None:
    scenario = story()
    scenario.provider(*says(f"{CALL} and an invented result"))
    assert [type(effect) for effect in scenario.effects] == [RunTools, CloseAttempt]
    assert scenario.provider(*says("more")) == []


def test_a_malformed_call_gets_an_error_result_and_never_runs() -> None:
    scenario = story(types={"f": {"q": ["integer"]}})
    scenario.provider(*says(CALL))
    assert not of_type(scenario.effects, RunTools)  # pyright: ignore[reportArgumentType]
    call, result = of_type(scenario.events, BlockComplete)
    assert call.input is None
    assert "not JSON" in call.input_error
    assert result.is_error
    assert result.content == call.input_error
    assert isinstance(scenario.effects[-1], NextTurn)


def test_calls_left_open_run_after_a_sound_finish_and_never_after_a_broken_off_one() -> None:
    text = CALL.removesuffix(STOPPED)
    sound, cut = story(), story()
    sound.provider(*says(text), n.Done("stop", "end_turn"))
    cut.provider(*says(text), n.Done("length", "max_tokens"))
    assert of_type(sound.effects, RunTools)  # pyright: ignore[reportArgumentType]
    assert cut.effects == [EndRun("completed")]


def test_a_name_ends_the_turn_in_text_and_is_put_back_in_thinking() -> None:
    scenario = story()
    scenario.provider(*says("<thinking>a"), n.Done("stop", "stop_sequence", stop_string="\nBob:"))
    resumed = scenario.effects[-1]
    assert isinstance(resumed, NextTurn)
    assert (resumed.work.turn, resumed.work.attempt) == (0, 2)
    assert (resumed.history, resumed.so_far) == (None, Message(role="assistant", content="<thinking>a\nBob:"))
    scenario.reborn()
    scenario.provider(*says(" b</thinking>c"), n.Done("stop", "stop_sequence", stop_string="\nBob:"))
    assert blocks(scenario) == [("thinking", "a\nBob: b"), ("text", "c")]
    assert isinstance(scenario.events[-1], Completed)


def test_a_turn_is_not_resumed_for_ever() -> None:
    scenario = story()
    scenario.provider(*says("<thinking>a"), n.Done("stop", stop_string="\nBob:"))
    for _ in range(MAX_IDLE):
        scenario.provider(n.Done("stop", stop_string="\nBob:"))
    assert isinstance(scenario.events[-1], Completed)
    assert scenario.run.state.attempt == 1 + MAX_IDLE


def test_a_provider_that_stopped_inside_a_value_continues_it() -> None:
    scenario = story()
    scenario.provider(
        *says('<function_calls><invoke name="f"><parameter name="q">Ask'), n.Done("stop", stop_string="\nBob:")
    )
    resumed = scenario.effects[-1]
    assert isinstance(resumed, NextTurn)
    assert resumed.so_far
    assert str(resumed.so_far.content).endswith(">Ask\nBob:")
    scenario.provider(*says(" hi</parameter></invoke></function_calls>"))
    assert blocks(scenario) == [("tool_call", '{"q":"Ask\\nBob: hi"}')]
    assert of_type(scenario.effects, RunTools)  # pyright: ignore[reportArgumentType]


def test_resumptions_are_bounded_by_themselves_and_each_turn_has_its_own() -> None:
    scenario = story()
    for turn in range(2):
        scenario.provider(*says("<thinking>a"), n.Done("stop", stop_string="\nBob:"))
        for _ in range(MAX_RESUMPTIONS - 1):
            scenario.provider(*says("b"), n.Done("stop", stop_string="\nBob:"))
        assert scenario.run.state.turn == turn
        assert scenario.run.state.tool_turns == turn, "a resumption is no tool turn"
        assert not scenario.run.over
        scenario.provider(*says(f"</thinking>{CALL}"))
        scenario.control(ToolReturned(scenario.run.state.calls[0].call.block, "fine", False))
    scenario.provider(*says("<thinking>a"), n.Done("stop", stop_string="\nBob:"))
    for _ in range(MAX_RESUMPTIONS):
        scenario.provider(*says("b"), n.Done("stop", stop_string="\nBob:"))
    assert isinstance(scenario.events[-1], Completed)


def test_withheld_text_is_released_when_the_stream_breaks() -> None:
    scenario = story()
    scenario.provider(*says("Hi\nBo"), n.Cut("cut"))
    assert "".join(chunk.text for chunk in of_type(scenario.events, Chunk)) == "Hi\nBo"
    assert blocks(scenario) == [("text", "Hi\nBo")]
    assert isinstance(scenario.events[-1], Incomplete)


def test_a_retry_reads_the_turn_from_its_beginning() -> None:
    scenario = story(inside="thinking")
    busy = ErrorInfo(code="overloaded_error", kind="overloaded", message="busy", retryable=True)
    scenario.provider(*says("half a thou"), n.Failed(busy))
    scenario.provider(*says("A thought.</thinking>Hi"), n.Done("stop"))
    assert blocks(scenario)[1:] == [("thinking", "A thought."), ("text", "Hi")]


def test_thinking_that_a_call_interrupted_continues_in_the_next_turn() -> None:
    scenario = story()
    scenario.provider(*says(f"<thinking>a{CALL}"))
    scenario.control(ToolReturned(1, "r", False))
    scenario.provider(*says("b</thinking>c"), n.Done("stop"))
    assert [kind for kind, _ in blocks(scenario)] == ["thinking", "tool_call", "tool_result", "thinking", "text"]


def test_a_call_of_the_providers_own_never_runs_in_prefill() -> None:
    scenario = story()
    scenario.provider(n.ToolCallStart(0, "x", "f"), n.ToolCallDelta(0, "{}"), n.ToolCallDone(0), n.Done("tool_use"))
    assert scenario.effects == [EndRun("completed")]
