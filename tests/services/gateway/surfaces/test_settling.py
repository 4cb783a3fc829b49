"""Which events of a run a client may get, and when: none that a retry discards, and none is lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.core.run.gated_scripts import HeldStory
from tests.unit.core.run.script import Story, call, text
from tests.unit.core.run.test_run_properties import TRY_AGAIN, play, policies, steps
from tokenbus.events import normalized as n
from tokenbus.events.frames import BusEvent, CancelRequested, ToolReported, ToolReturned
from tokenbus.events.public import (
    TERMINAL,
    BlockComplete,
    BlockStarted,
    Chunk,
    Completed,
    ImagePreview,
    PublicEvent,
    Restarted,
    Retrying,
    ToolProgress,
    UnknownEvent,
    UsageReported,
)
from tokenbus.events.requests import OnFailure
from tokenbus.events.usage import Usage
from tokenbus_services.gateway.surfaces.settling import Settling

OF_BLOCK = (BlockStarted, Chunk, ImagePreview, BlockComplete)
DEFAULT: OnFailure = "before_first_visible"


def thinking(block: int, *pieces: str) -> list[BusEvent]:
    return [n.BlockStart(block, "thinking"), *(n.ThinkingDelta(block, p) for p in pieces), n.BlockStop(block)]


def settled(
    events: Iterable[PublicEvent],
    on_failure: OnFailure | None = DEFAULT,
    *,
    hold_thinking: bool = True,
    hold_calls: bool = True,
) -> list[list[PublicEvent]]:
    """What comes out at each event."""
    filter_ = Settling(hold_thinking=hold_thinking, hold_calls=hold_calls, on_failure=on_failure)
    return [filter_.feed(event) for event in events]


def flat(steps: Iterable[Sequence[PublicEvent]]) -> list[PublicEvent]:
    return [event for step in steps for event in step]


def published(steps: Iterable[Sequence[PublicEvent]]) -> list[str]:
    """Kinds of the blocks that were begun, and types of the other events, in order."""
    names: list[str] = []
    for event in flat(steps):
        if isinstance(event, BlockStarted):
            names.append(event.kind)
        elif not isinstance(event, OF_BLOCK):
            names.append(type(event).__name__)
    return names


def numbers(events: Iterable[PublicEvent]) -> list[int]:
    return [event.seq for event in events]


def test_a_call_that_a_retry_voids_is_never_sent() -> None:
    story = Story(max_tool_depth=0)
    story.provider(*thinking(0, "hm"), *call(1, "a", "f", "{}"), n.Failed(TRY_AGAIN))
    story.provider(*text(0, "hello"), n.Done("stop"))
    assert published(settled(story.events)) == ["Started", "Retrying", "text", "Completed"]


def test_the_first_visible_chunk_settles_all_before_it_and_after_it() -> None:
    story = Story(max_tool_depth=0)
    story.provider(*thinking(0, "hm"))
    story.provider(*call(1, "a", "f", "{}"))
    held = len(story.events)
    story.provider(n.BlockStart(2, "text"), n.TextDelta(2, "hello"))
    rest = len(story.events)
    story.provider(n.BlockStop(2), *call(3, "b", "f", "{}"))
    steps = settled(story.events)
    assert numbers(flat(steps[:held])) == [0]
    assert flat(steps[:rest]) == story.events[:rest]
    assert [step for step in steps[rest:] if len(step) != 1] == []


def test_the_start_of_a_text_is_not_published_before_its_first_visible_chunk() -> None:
    story = Story()
    story.provider(n.BlockStart(0, "text"))
    story.provider(n.Failed(TRY_AGAIN))
    story.provider(*text(0, "hello"), n.Done("stop"))
    steps = settled(story.events)
    assert published(steps) == ["Started", "Retrying", "text", "Completed"]


@pytest.mark.parametrize("end", [n.Done("tool_use"), n.Done("stop"), n.Done("length")])
def test_calls_are_sent_whole_at_the_end_of_their_run(end: BusEvent) -> None:
    story = Story(max_tool_depth=0)
    story.provider(*call(0, "a", "f", "{", "}"))
    story.provider(end)
    steps = settled(story.events)
    assert flat(steps) == story.events
    assert numbers(flat(steps[:-1])) == [0]


def test_usage_alone_ends_nothing_because_a_fallback_may_follow() -> None:
    """A provider that ends its turn with an error has reported the usage by then."""
    story = Story(max_tool_depth=0)
    story.provider(*call(0, "a", "f", "{}"))
    used = Usage(input=1)
    seq = len(story.events)
    retry = Retrying(run="r1", seq=seq + 1, turn=0, attempt=1, error=TRY_AGAIN, next_attempt=2, delay_ms=0, drop_from=0)
    usage = UsageReported(run="r1", seq=seq, turn=0, attempt=1, usage=used, total=used)
    assert published(settled([*story.events, usage, retry])) == ["Started", "UsageReported", "Retrying"]


def test_a_tools_progress_settles_its_call() -> None:
    story = Story()
    story.provider(*call(0, "a", "f", "{}"), n.Done("tool_use"))
    before = len(story.events)
    story.control(ToolReported(0, 0.5))
    steps = settled(story.events)
    assert published(steps[:before]) == ["Started"]
    assert published(steps) == ["Started", "tool_call", "ToolProgress"]


def test_a_tools_result_settles_its_call_and_the_order_is_kept() -> None:
    story = Story()
    story.provider(*thinking(0, "hm"), *call(1, "a", "f", "{}"), n.Done("tool_use"))
    story.control(ToolReturned(1, "found", is_error=False))
    steps = settled(story.events)
    assert flat(steps) == story.events


def test_a_later_turn_settles_the_one_before_it() -> None:
    story = Story()
    story.provider(*thinking(0, "hm"), n.Done("pause"))
    story.provider(*thinking(0, "well"))
    steps = settled(story.events)
    assert published(steps) == ["Started", "thinking"]
    assert flat(steps)[-1].turn == 0


def test_each_turn_settles_for_itself() -> None:
    story = Story()
    story.provider(*text(0, "let me see"), *call(1, "a", "f", "{}"), n.Done("tool_use"))
    story.control(ToolReturned(1, "found", is_error=False))
    story.provider(*call(0, "b", "f", "{}"), n.Failed(TRY_AGAIN))
    story.provider(*text(0, "done"), n.Done("stop"))
    assert published(settled(story.events)) == [
        "Started", "text", "tool_call", "tool_result", "Retrying", "text", "Completed",
    ]  # fmt: skip


@pytest.mark.parametrize("end", [n.Cut("cut"), n.Failed(TRY_AGAIN)])
def test_a_held_call_of_a_run_that_breaks_off_is_never_sent_as_runnable(end: BusEvent) -> None:
    story = Story(max_tool_depth=0, on_failure="fail")
    story.provider(*thinking(0, "hm"), *call(1, "a", "f", "{}"), end)
    assert published(settled(story.events, "fail"))[:2] == ["Started", "thinking"]
    assert "tool_call" not in published(settled(story.events, "fail"))


def test_a_call_that_a_cancel_cut_is_not_sent() -> None:
    story = Story()
    story.provider(n.ToolCallStart(0, "a", "f"), n.ToolCallDelta(0, "{"))
    story.control(CancelRequested("enough"))
    assert published(settled(story.events)) == ["Started", "tool_result", "Cancelled"]


def test_under_continue_a_call_after_text_is_held_until_the_turn_ends() -> None:
    story = Story(max_tool_depth=0, on_failure="continue", continues=True)
    story.provider(*text(0, "so "))
    story.provider(*call(1, "a", "f", "{}"))
    story.provider(n.Cut("cut"))
    story.provider(*text(0, "on"), *call(1, "b", "g", "{}"))
    before = len(story.events)
    story.provider(n.Done("tool_use"))
    steps = settled(story.events, "continue")
    assert "tool_call" not in published(steps[:before])
    calls = [event for event in flat(steps) if isinstance(event, BlockComplete) and event.kind == "tool_call"]
    assert [each.tool_id for each in calls] == ["b"]


def test_under_continue_earlier_text_and_the_thinking_before_it_are_sent_at_once() -> None:
    story = Story(on_failure="continue", continues=True)
    story.provider(*thinking(0, "hm"), n.BlockStart(1, "text"), n.TextDelta(1, "so "))
    steps = settled(story.events, "continue")
    assert flat(steps) == story.events
    story.provider(n.Cut("cut"))
    story.provider(n.BlockStart(0, "text"), n.TextDelta(0, "on"))
    assert flat(settled(story.events, "continue")) == story.events


def test_under_restart_no_call_is_sent_before_its_turn_ends_and_text_flows() -> None:
    story = Story(max_tool_depth=0, on_failure="restart")
    story.provider(*call(0, "a", "f", "{}"), *text(1, "hello"), n.Failed(TRY_AGAIN))
    story.provider(*call(0, "b", "f", "{}"), *text(1, "hello"), n.Done("tool_use"))
    steps = settled(story.events, "restart")
    assert published(steps) == ["Started", "text", "Restarted", "text", "tool_call", "Completed"]
    calls = [event.tool_id for event in flat(steps) if isinstance(event, BlockComplete) and event.kind == "tool_call"]
    assert calls == ["b"]


def test_arguments_come_out_as_they_are_written_if_no_retry_follows_the_first() -> None:
    story = Story(max_tool_depth=0, on_failure="before_first_output")
    story.provider(*thinking(0, "hm"), n.ToolCallStart(1, "a", "f"))
    assert published(settled(story.events, "before_first_output")) == ["Started"]
    story.provider(n.ToolCallDelta(1, '{"a'))
    assert published(settled(story.events, "before_first_output")) == ["Started", "thinking", "tool_call"]
    story.provider(n.Cut("reset"))
    *_, end, failed = flat(settled(story.events, "before_first_output"))
    assert isinstance(end, BlockComplete)
    assert end.cut
    assert isinstance(failed, TERMINAL)


def test_an_unknown_on_failure_is_treated_as_continue() -> None:
    story = Story(max_tool_depth=0, on_failure="continue", continues=True)
    story.provider(*text(0, "so "), *call(1, "a", "f", "{}"), n.Cut("cut"))
    story.provider(*text(0, "on"), n.Done("stop"))
    assert settled(story.events, None) == settled(story.events, "continue")
    assert "tool_call" not in published(settled(story.events, None))


def test_no_event_of_an_invisible_run_is_sent_before_its_turn_ends() -> None:
    story = Story(visible=False)
    story.provider(*text(0, "first"), n.Failed(TRY_AGAIN))
    story.provider(*text(0, "second"), n.Done("stop"))
    steps = settled(story.events)
    chunks = [event.text for event in flat(steps) if isinstance(event, Chunk)]
    assert chunks == ["second"]


def test_thinking_that_is_not_held_is_sent_at_once_and_calls_are_still_held() -> None:
    story = Story(max_tool_depth=0)
    story.provider(*call(0, "a", "f", "{}"))
    story.provider(*thinking(1, "hm"), n.Failed(TRY_AGAIN))
    assert published(settled(story.events, hold_thinking=False)) == ["Started", "thinking", "Retrying"]


def test_calls_that_are_not_held_are_sent_at_once() -> None:
    story = Story(max_tool_depth=0)
    story.provider(*call(0, "a", "f", "{}"), n.Failed(TRY_AGAIN))
    assert published(settled(story.events, hold_calls=False)) == ["Started", "tool_call", "Retrying"]


def test_images_wait_unless_they_are_not_held() -> None:
    start = BlockStarted(run="r1", seq=0, turn=0, attempt=1, block=0, kind="image")
    assert Settling(hold_thinking=True, hold_calls=True, on_failure=DEFAULT).feed(start) == []
    assert Settling(hold_thinking=True, hold_calls=True, hold_images=False).feed(start) == [start]


def test_an_unknown_event_passes_at_once() -> None:
    story = Story()
    story.provider(*call(0, "a", "f", "{}"))
    unknown = UnknownEvent(
        run="r1", seq=len(story.events), turn=0, attempt=1, event_type="later", fields={"type": "later"}
    )
    assert settled([*story.events, unknown])[-1] == [unknown]


def test_a_policys_release_is_settled_like_any_run() -> None:
    story = HeldStory()
    story.provider(*thinking(0, "hm"), *call(1, "a", "f", "{}"), n.Failed(TRY_AGAIN))
    story.pass_all()
    story.provider(*text(0, "hello"), n.Done("stop"))
    story.pass_all()
    assert published(settled(story.published)) == ["Started", "Retrying", "text", "Completed"]


# --- for every story ------------------------------------------------------------------------------------------


def void_blocks(events: Sequence[PublicEvent]) -> set[int]:
    void: set[int] = set()
    begun: set[int] = set()
    for event in events:
        if isinstance(event, OF_BLOCK):
            begun.add(event.block)
        elif isinstance(event, Retrying | Restarted):
            void |= {block for block in begun if block >= event.drop_from}
    return void


def never_ran(events: Sequence[PublicEvent]) -> set[int]:
    """Calls that may stay untold: cut ones, and those of the last turn of a run that did not complete."""
    calls = {e.block: e for e in events if isinstance(e, BlockStarted) and e.kind == "tool_call"}
    blocks = {e.block for e in events if isinstance(e, BlockComplete) and e.kind == "tool_call" and e.cut}
    end = events[-1]
    if isinstance(end, TERMINAL) and not isinstance(end, Completed):
        blocks |= {number for number, start in calls.items() if start.turn == end.turn}
    return blocks


@given(steps, policies, st.booleans())
def test_no_void_event_is_sent_and_no_other_is_lost(
    plan: list[list[BusEvent] | BusEvent], policy: OnFailure, known: bool
) -> None:
    events = play(plan, policy, reborn=False).events
    out = flat(settled(events, policy if known or policy == "restart" else None))
    assert len({e.seq for e in out}) == len(out), "each comes out once"
    void = void_blocks(events)
    for event in out:
        if isinstance(event, OF_BLOCK) and event.block in void:
            assert policy == "restart"
            assert event.kind in ("text", "thinking")
    lost = {e.seq for e in events} - {e.seq for e in out}
    untold = never_ran(events) | void
    ended = isinstance(events[-1], TERMINAL)
    for event in events:
        if event.seq in lost and ended:
            assert isinstance(event, OF_BLOCK)
            assert event.block in untold


@given(steps, policies)
def test_each_blocks_events_and_all_turns_keep_their_order(
    plan: list[list[BusEvent] | BusEvent], policy: OnFailure
) -> None:
    events = play(plan, policy, reborn=False).events
    out = flat(settled(events, policy))
    assert [e.turn for e in out] == sorted(e.turn for e in out)
    for number in {e.block for e in out if isinstance(e, OF_BLOCK)}:
        block = [e.seq for e in out if isinstance(e, OF_BLOCK) and e.block == number]
        assert block == sorted(block)
        if not isinstance(next(e for e in out if e.seq == block[0]), BlockStarted):
            pytest.fail("a block begins with its start")


@given(steps, policies)
def test_visible_text_is_never_held(plan: list[list[BusEvent] | BusEvent], policy: OnFailure) -> None:
    for event, step in zip(events := play(plan, policy, reborn=False).events, settled(events, policy), strict=True):
        if isinstance(event, Chunk) and event.visible:
            assert step[-1] == event


@given(steps, st.sampled_from(["before_first_visible", "fail"]))
def test_by_default_the_blocks_come_in_the_order_of_the_log(
    plan: list[list[BusEvent] | BusEvent], policy: OnFailure
) -> None:
    events = play(plan, policy, reborn=False).events
    blocks = [e.seq for e in flat(settled(events, policy)) if isinstance(e, (*OF_BLOCK, ToolProgress))]
    assert blocks == sorted(blocks)


@given(steps, policies, st.integers(0, 40))
def test_a_log_cut_anywhere_gives_a_prefix_of_the_whole(
    plan: list[list[BusEvent] | BusEvent], policy: OnFailure, at: int
) -> None:
    events = play(plan, policy, reborn=False).events
    whole = flat(settled(events, policy))
    part = flat(settled(events[:at], policy))
    assert part == whole[: len(part)]
