"""Model fallback: who is asked next, decided from a run's events alone."""

from __future__ import annotations

import pytest

from tests.unit.core.run.script import Story, of_type, text
from tokenbus.core.request.parse import request_from
from tokenbus.core.request.validate import all_choices, left_from, request_for
from tokenbus.core.run.attempts import WORKER_LOST
from tokenbus.core.run.effects import NextTurn
from tokenbus.errors import RequestInvalid
from tokenbus.events import normalized as n
from tokenbus.events.error_info import ErrorClass, ErrorInfo
from tokenbus.events.frames import FallbackPlan, RunLimits, TextReading, ToolReturned
from tokenbus.events.public import Chunk, Completed, ProviderModel, Retrying, RunFailedEvent, Started, UsageReported
from tokenbus.events.requests import Fallback, Generate, Message
from tokenbus.events.usage import Usage

SECOND, THIRD = FallbackPlan("second", "b"), FallbackPlan("third", "c")
ASKED_SECOND = ProviderModel(provider="second", model="b")
REFUSED = n.Failed(ErrorInfo(code="authentication_error", kind="auth", message="no"))
BUSY = n.Failed(ErrorInfo(code="overloaded_error", kind="overloaded", message="busy", retryable=True))
REQUEST = Generate(
    provider="first",
    model="a",
    messages=[Message(role="user", content="hi")],
    extra={"seed": 7},
    fallback=[
        Fallback(provider="first", model="b"),
        Fallback(provider="other", model="c"),
        Fallback(provider="other", model="d", extra={"top_k": 1}),
    ],
)


def work(story: Story) -> tuple[int, int, int]:
    """The attempt handed out last, as turn, attempt and choice."""
    effect = [e for e in story.effects if isinstance(e, NextTurn)][-1]
    return effect.work.turn, effect.work.attempt, effect.work.choice


def test_what_cannot_be_tried_again_is_asked_of_the_next_at_once() -> None:
    story = Story(fallback=(SECOND, THIRD))
    [started] = of_type(story.events, Started)
    assert started.fallback == [ASKED_SECOND, ProviderModel(provider="third", model="c")]
    story.provider(n.Start("m"), n.BlockStart(0, "thinking"), n.ThinkingDelta(0, "hm"), REFUSED)
    [retrying] = of_type(story.events, Retrying)
    assert (retrying.fallback, retrying.delay_ms, retrying.drop_from) == (ASKED_SECOND, 0, 0)
    assert work(story) == (0, 2, 1)
    story.provider(REFUSED)
    assert work(story) == (0, 3, 2)
    story.provider(n.Start("m"), *text(0, "Hello."), n.Done("stop", usage=Usage(output=2)))
    [usage] = of_type(story.events, UsageReported)
    assert usage.provider == "third"
    assert isinstance(story.events[-1], Completed)


def test_each_is_tried_as_often_as_the_first() -> None:
    story = Story(fallback=(SECOND,), rules=RunLimits(max_attempts=2))
    for _ in range(4):
        story.provider(BUSY)
    assert [e.fallback for e in of_type(story.events, Retrying)] == [None, ASKED_SECOND, None]
    [failed] = of_type(story.events, RunFailedEvent)
    assert failed.error.code == "overloaded_error"


def test_a_fallback_never_repeats_visible_output() -> None:
    story = Story(fallback=(SECOND,))
    story.provider(n.Start("m"), n.BlockStart(0, "text"), n.TextDelta(0, "Hel"), REFUSED)
    assert isinstance(story.events[-1], RunFailedEvent)
    assert not of_type(story.events, Retrying)


def test_an_answer_that_its_provider_ends_with_an_error_is_asked_of_the_next() -> None:
    story = Story(fallback=(SECOND,))
    story.provider(n.Start("m"), n.Done("error", finish_raw="MALFORMED_FUNCTION_CALL"))
    assert work(story) == (0, 2, 1)


@pytest.mark.parametrize(
    ("code", "kind"),
    [(WORKER_LOST, "internal"), ("blob_not_found", "invalid_request"), ("poison", "internal"), ("deadline", "timeout")],
)
def test_an_error_that_no_provider_can_avoid_uses_no_fallback(code: str, kind: ErrorClass) -> None:
    story = Story(fallback=(SECOND,), rules=RunLimits(max_losses=0))
    story.provider(n.Failed(ErrorInfo(code=code, kind=kind, message="no", retryable=code == WORKER_LOST)))
    assert isinstance(story.events[-1], RunFailedEvent)


def test_later_turns_stay_with_the_provider_that_answered_and_a_checkpoint_keeps_it() -> None:
    story = Story(fallback=(SECOND,))
    story.provider(REFUSED)
    story.provider(
        n.Start("m"),
        n.ToolCallStart(0, "t1", "weather"),
        n.ToolCallDelta(0, "{}"),
        n.ToolCallDone(0),
        n.Done("tool_use"),
    )
    story.reborn()
    story.control(ToolReturned(0, "rain", is_error=False))
    assert work(story) == (1, 3, 1)
    story.provider(REFUSED)
    assert isinstance(story.events[-1], RunFailedEvent), "nobody is asked twice"


def test_the_provider_of_a_text_decides_if_it_can_be_continued() -> None:
    able = FallbackPlan("second", "b", continues=True)
    story = Story(fallback=(able,), on_failure="continue", continues=False)
    story.provider(REFUSED)
    story.provider(n.Start("m"), n.BlockStart(0, "text"), n.TextDelta(0, "Hel"), BUSY)
    [_, retrying] = of_type(story.events, Retrying)
    assert (retrying.continues, retrying.fallback) == (True, None)
    story.provider(n.Start("m"), *text(0, "lo."), n.Done("stop"))
    assert isinstance(story.events[-1], Completed)


def test_in_prefill_mode_the_end_of_the_text_is_read_as_its_provider_marks_it() -> None:
    plan = FallbackPlan("second", "b", reading=TextReading(end_of_turn="<|eot|>"))
    story = Story(fallback=(plan,), reading=TextReading())
    story.provider(REFUSED)
    story.provider(n.Start("m"), n.BlockStart(0, "text"), n.TextDelta(0, " Hello<|eot|> more"), n.Done("stop"))
    assert "".join(chunk.text for chunk in of_type(story.events, Chunk)).strip() == "Hello"
    assert isinstance(story.events[-1], Completed)


def test_an_extra_is_sent_to_the_provider_it_was_written_for() -> None:
    assert [(r.provider, r.model, r.extra) for r in all_choices(REQUEST)] == [
        ("first", "a", {"seed": 7}),
        ("first", "b", {"seed": 7}),
        ("other", "c", None),
        ("other", "d", {"top_k": 1}),
    ]


def test_a_run_that_continues_with_a_fallback_tries_only_those_after_it() -> None:
    assert left_from(REQUEST, 0) is REQUEST
    rest = left_from(REQUEST, 2)
    assert (rest.provider, rest.model, rest.fallback) == ("other", "c", (REQUEST.fallback or [])[2:])
    assert request_for(rest, 1).model == "d"


def test_on_failure_fail_allows_no_fallback() -> None:
    with pytest.raises(RequestInvalid) as caught:
        request_from(
            {
                "type": "generate",
                "provider": "p",
                "model": "m",
                "messages": [{"role": "user", "content": "hi"}],
                "on_failure": "fail",
                "fallback": [{"provider": "q", "model": "n"}],
            }
        )
    assert caught.value.where == "fallback"
