"""Progress of a tool call is published only while the call is open."""

from __future__ import annotations

import msgspec

from tests.unit.core.run.script import Story, call, of_type, text
from tokenbus.events import normalized as n
from tokenbus.events.frames import CancelRequested, RunLimits, ToolReported, ToolReturned
from tokenbus.events.public import BlockComplete, BlockProgress, RunFailedEvent, ToolProgress


def two_calls(**changes: object) -> Story:
    """A turn that waits for the calls of blocks 0 and 1."""
    story = Story(**changes)
    story.provider(*call(0, "a", "f"), *call(1, "b", "g"), n.Done("tool_use"))
    return story


def test_progress_is_sent_with_its_call_and_changes_nothing_else() -> None:
    story = two_calls()
    before = msgspec.to_builtins(story.run.state)
    assert story.control(ToolReported(1, 1, 4, "one of four"), ToolReported(0, 0.5)) == [
        ToolProgress(
            run="r1",
            seq=before["seq"],
            turn=0,
            attempt=1,
            block=1,
            tool_id="b",
            tool_name="g",
            progress=1,
            total=4,
            message="one of four",
        ),
        ToolProgress(
            run="r1", seq=before["seq"] + 1, turn=0, attempt=1, block=0, tool_id="a", tool_name="f", progress=0.5
        ),
    ]
    after = msgspec.to_builtins(story.run.state)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"seq", "events_applied", "seen_ms"}, "it counts as an event, and shows that the call is alive"


def test_a_call_with_a_result_that_is_not_emitted_yet_makes_no_progress() -> None:
    story = two_calls()
    assert story.control(ToolReturned(1, "second", False)) == []
    assert story.control(ToolReported(1, 3)) == []
    assert [e.block for e in of_type(story.control(ToolReported(0, 1)), ToolProgress)] == [0]
    story.control(ToolReturned(0, "first", False))
    assert story.control(ToolReported(0, 2)) == [], "the next turn has begun"


def test_progress_of_no_call_that_runs_is_dropped() -> None:
    story = Story()
    story.provider(*text(0, "Hi"), *call(1, "a", "f"))
    assert story.control(ToolReported(1, 1)) == [], "not handed out yet"
    story.provider(*call(2, "b", "unlisted"), n.Done("tool_use"))
    assert story.control(ToolReported(0, 1), ToolReported(2, 1), ToolReported(9, 1)) == []


def test_after_a_cancel_no_progress_is_published() -> None:
    story = two_calls()
    story.control(CancelRequested())
    assert story.control(ToolReported(0, 1)) == []


def test_a_checkpoint_between_report_and_result_changes_nothing() -> None:
    story, reborn = two_calls(), two_calls()
    for event in (ToolReported(0, 1), ToolReturned(0, "x", False), ToolReported(0, 2), ToolReturned(1, "y", False)):
        story.control(event)
        reborn.reborn()
        reborn.control(event)
    assert story.events == reborn.events
    assert [e.content for e in of_type(story.events, BlockComplete) if e.kind == "tool_result"] == ["x", "y"]


def test_a_tool_that_reports_without_end_meets_the_bound_of_its_run() -> None:
    story = two_calls(rules=RunLimits(run_events=12))
    for step in range(20):
        story.control(ToolReported(0, step))
    assert len(of_type(story.events, ToolProgress)) < 12
    end = story.events[-1]
    assert isinstance(end, RunFailedEvent)
    assert end.error.code == "too_many_events"


def test_progress_of_a_tool_that_the_provider_runs_comes_inside_its_block():
    story = Story(max_tool_depth=0)
    item, *rest = n.ItemStart(0, "x.search_call", "search", "s1"), n.ToolCallDelta(0, "{}"), n.BlockStop(0)
    story.provider(item, n.ItemProgress(0, "in_progress"), n.ItemProgress(0, "searching"), *rest)
    story.provider(n.ItemProgress(0, "late"), n.Done("stop"))
    names = [type(event).__name__ for event in story.events]
    assert names[1:] == ["BlockStarted", "BlockProgress", "BlockProgress", "Chunk", "BlockComplete", "Completed"]
    reports = [(e.block, e.kind, e.tool_id, e.tool_name, e.status) for e in of_type(story.events, BlockProgress)]
    about = (0, "server_tool", "s1", "search")
    assert reports == [(*about, "in_progress"), (*about, "searching")]
