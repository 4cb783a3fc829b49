"""A message that does not wait for the end of the turn: the visible text stands, and the model is asked again."""

from __future__ import annotations

import pytest

from tests.unit.core.run.script import Story, of_type, text
from tests.unit.core.run.test_continuing import begun, next_attempt, visible_text
from tokenbus.core.run.effects import SteerCall
from tokenbus.events import normalized as n
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import BusEvent, CancelRequested, SteerRequested, TextReading
from tokenbus.events.public import BlockComplete, Cancelled, Completed, Retrying, UsageReported
from tokenbus.events.requests import Message, TextPart
from tokenbus.events.usage import Usage

CALL = n.ToolCallStart(1, "c1", "weather")


def test_a_text_that_can_be_continued_stays_one_text() -> None:
    story = Story(continues=True)
    story.provider(n.Start("m"), *begun("Hello", " wor"))
    story.control(SteerRequested())
    [retrying] = of_type(story.events, Retrying)
    assert (retrying.error.code, retrying.next_attempt, retrying.continues) == ("steered", 2, True)
    effect = next_attempt(story)
    assert (effect.work.turn, effect.work.attempt, effect.history, effect.steered) == (0, 2, None, True)
    assert effect.so_far == Message(role="assistant", content=[TextPart(text="Hello wor")])
    assert [report.outcome for report in story.run.reports] == ["stopped"]
    story.provider(n.Start("m"), *text(0, "ms."), n.Done("stop"))
    assert visible_text(story.events) == "Hello worms."
    assert [e.content for e in of_type(story.events, BlockComplete)] == ["Hello worms."]
    assert isinstance(story.events[-1], Completed)


def test_any_other_text_stands_and_another_turn_follows_it() -> None:
    story = Story(continues=False)
    story.provider(n.Start("m"), n.UsageSeen(Usage(input=5)), *begun("Hello", " wor "))
    story.control(SteerRequested())
    assert not of_type(story.events, Retrying)
    effect = next_attempt(story)
    said = Message(role="assistant", content=[TextPart(text="Hello wor")])
    assert (effect.work.turn, effect.history, effect.steered, effect.so_far) == (1, [said], True, None)
    [usage] = of_type(story.events, UsageReported)
    assert (usage.turn, usage.usage.input) == (0, 5)
    story.provider(n.Start("m"), *text(0, "Bye."), n.Done("stop"))
    assert [(e.turn, e.content, e.cut) for e in of_type(story.events, BlockComplete)] == [
        (0, "Hello wor ", True),
        (1, "Bye.", None),
    ]
    assert isinstance(story.events[-1], Completed)


def test_before_the_first_text_the_turn_is_asked_again() -> None:
    story = Story(continues=True)
    story.provider(n.Start("m"), n.BlockStart(0, "thinking"), n.ThinkingDelta(0, "Hm"))
    story.control(SteerRequested())
    effect = next_attempt(story)
    assert (effect.work.turn, effect.work.attempt, effect.so_far, effect.steered) == (0, 2, None, True)
    assert [event.drop_from for event in of_type(story.events, Retrying)] == [0]


@pytest.mark.parametrize(
    ("story", "before"),
    [
        (Story(continues=True), [*begun("Let me see."), CALL]),
        (Story(reading=TextReading(), participant="Claude"), begun("Hello")),
    ],
    ids=["calls have begun", "prefill"],
)
def test_otherwise_it_waits(story: Story, before: list[BusEvent]) -> None:
    story.provider(n.Start("m"), *before)
    at = len(story.effects)
    story.control(SteerRequested())
    assert story.effects[at:] == []
    story.control(CancelRequested("enough"))
    story.control(SteerRequested())
    assert isinstance(story.events[-1], Cancelled)


SERVED = n.Start("m", steers=True)


def test_a_provider_that_steers_its_answer_ends_it_and_another_turn_follows() -> None:
    story = Story(continues=True)
    story.provider(SERVED, *begun("Hello", " wor"))
    at = len(story.effects)
    story.control(SteerRequested())
    assert story.effects[at:] == [SteerCall(1)]
    story.provider(n.TextDelta(0, "ld"), n.BlockStop(0), n.Done("pause", "incomplete:steered"))
    effect = next_attempt(story)
    said = Message(role="assistant", content=[TextPart(text="Hello world")])
    assert (effect.work.turn, effect.work.attempt, effect.history, effect.steered) == (1, 2, [said], True)
    story.provider(n.Start("m"), n.Done("pause"))
    assert not next_attempt(story).steered


def test_the_attempt_after_one_that_is_lost_has_what_should_steer_it() -> None:
    story = Story(on_failure="restart")
    story.provider(SERVED, *begun("Hello", " wor"))
    story.control(SteerRequested())
    story.provider(n.Cut("gone", ErrorInfo(code="worker_lost", kind="internal", message="gone", retryable=True)))
    effect = next_attempt(story)
    assert (effect.work.turn, effect.work.attempt, effect.steered) == (0, 2, True)


@pytest.mark.parametrize("done", [n.Done("stop"), n.Done("length")])
def test_an_answer_that_ends_first_is_the_end(done: n.Done) -> None:
    story = Story()
    story.provider(SERVED, *begun("Hello", " wor"))
    story.control(SteerRequested())
    story.provider(n.BlockStop(0), done)
    assert isinstance(story.events[-1], Completed)


def test_what_stop_strings_change_goes_on_from_what_was_published() -> None:
    story = Story(stops=("x",))
    story.provider(SERVED, *begun("Hello", " wor"))
    story.control(SteerRequested())
    assert next_attempt(story).steered
