"""Every end of a run has its usage and the model that answered."""

from __future__ import annotations

import pytest

from tests.unit.core.run.script import Story, of_type, text
from tokenbus.events import normalized as n
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import CancelRequested, FallbackPlan
from tokenbus.events.public import Cancelled, Incomplete, RunEnd, RunFailedEvent, UsageReported
from tokenbus.events.usage import Usage

BUSY = n.Failed(ErrorInfo(code="overloaded_error", kind="overloaded", message="busy", retryable=True))
BROKEN = n.Failed(ErrorInfo(code="invalid", kind="invalid_request", message="no"))
START = n.Start("m-2026", "id-1")
SEEN = n.UsageSeen(Usage(input=10, output=3))


def end_of(story: Story) -> RunEnd:
    [end] = [event for event in story.events if isinstance(event, RunEnd)]
    return end


@pytest.mark.parametrize(
    ("last", "kind"), [(n.Cut("gone"), Incomplete), (BROKEN, RunFailedEvent), (CancelRequested("enough"), Cancelled)]
)
def test_a_run_that_broke_off_reports_its_usage_and_its_model(last: n.Normalized, kind: type[RunEnd]) -> None:
    story = Story()
    story.provider(START, n.BlockStart(0, "text"), n.TextDelta(0, "Hel"), SEEN)
    story.control(last) if isinstance(last, CancelRequested) else story.provider(last)
    end = end_of(story)
    assert isinstance(end, kind)
    assert (end.usage, end.model, end.response_id) == (Usage(input=10, output=3), "m-2026", "id-1")


def test_an_attempt_that_was_tried_again_is_paid_for_too() -> None:
    story = Story()
    story.provider(START, SEEN, BUSY)
    story.provider(n.Start("m-2026", "id-2"), *text(0, "Hi."), n.Done("stop", usage=Usage(input=10, output=5)))
    end = end_of(story)
    assert end.usage == Usage(input=20, output=8)
    assert end.response_id == "id-2"
    [reported] = of_type(story.events, UsageReported)
    assert reported.usage == Usage(input=10, output=5), "the turn's own"
    assert reported.total == end.usage


def test_an_end_before_the_next_answer_names_the_last_there_was() -> None:
    story = Story(on_failure="fail", fallback=(FallbackPlan("second", "b"),))
    story.provider(START, SEEN, *text(0, "Hi."), BROKEN)
    assert end_of(story).provider == "anthropic"
    retried = Story()
    retried.provider(START, SEEN, BUSY)
    retried.reborn()
    retried.provider(BROKEN)
    assert end_of(retried).response_id == "id-1"


def test_a_run_without_an_answer_has_neither() -> None:
    story = Story()
    story.provider(BROKEN)
    end = end_of(story)
    assert (end.usage, end.model, end.response_id, end.provider) == (None, None, None, None)
