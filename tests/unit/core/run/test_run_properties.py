"""What holds for every story: numbering, order, one end; and that a checkpoint anywhere changes nothing."""

from __future__ import annotations

import itertools
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.core.run.script import Story, call, text
from tokenbus.events import normalized as n
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import BusEvent, CancelRequested, DeadlinePassed, ToolReported, ToolReturned
from tokenbus.events.public import TERMINAL, BlockComplete, BlockStarted, Chunk, PublicEvent, Restarted, Retrying
from tokenbus.events.usage import Usage

TRY_AGAIN = ErrorInfo(code="overloaded_error", kind="overloaded", message="busy", retryable=True)
words = st.text(min_size=1, max_size=5)
pieces = st.lists(words, max_size=4)


@st.composite
def attempts(draw: st.DrawFn) -> list[BusEvent]:
    """What one attempt may say: some blocks, perhaps cut, and an end."""
    events: list[BusEvent] = []
    for block in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["text", "thinking", "call", "cut", "open text"]))
        if kind == "text":
            events += text(block, *draw(pieces))
        elif kind == "thinking":
            events += [n.BlockStart(block, "thinking"), *(n.ThinkingDelta(block, p) for p in draw(pieces))]
            events += [n.BlockStop(block)]
        elif kind == "call":
            events += call(block, f"id{block}", "f", *draw(pieces))
        elif kind == "open text":
            events += text(block, *draw(pieces))[:-1]
        else:
            events += [n.ToolCallStart(block, f"id{block}", "f")]
    end = draw(
        st.sampled_from(
            [
                n.Done("stop", usage=Usage(input=1)),
                n.Done("tool_use"),
                n.Done("length"),
                n.Failed(TRY_AGAIN),
                n.Cut("cut"),
            ]
        )
    )
    return [*events, end]


controls = st.sampled_from(
    [
        CancelRequested("x"),
        ToolReturned(0, "r", False),
        ToolReturned(1, "", True),
        ToolReported(0, 0.5),
        ToolReported(1, 1, 4, "one of four"),
        DeadlinePassed("deadline"),
        *(DeadlinePassed("silent", taken) for taken in range(6)),
    ]
)
steps = st.lists(st.one_of(attempts(), controls), min_size=1, max_size=8)
policies = st.sampled_from(["before_first_visible", "before_first_output", "restart", "fail", "continue"])


def play(plan: list[list[BusEvent] | BusEvent], policy: str, reborn: bool) -> Story:
    story = Story(on_failure=policy, continues=True)
    for step in plan:
        if reborn:
            story.reborn()
        if isinstance(step, list):
            attempt = story.run.state.attempt
            for event in step:  # each as a frame, a commit and a checkpoint of its own
                story.provider(event, attempt=attempt)
                if reborn:
                    story.reborn()
        else:
            story.control(step)
    return story


@given(steps, policies)
def test_every_story_is_numbered_ordered_and_ends_once(plan: list[list[BusEvent] | BusEvent], policy: str) -> None:
    events = play(plan, policy, reborn=False).events
    assert [e.seq for e in events] == list(range(len(events)))
    assert all(a.attempt <= b.attempt and a.turn <= b.turn for a, b in itertools.pairwise(events))
    ends = [i for i, e in enumerate(events) if isinstance(e, TERMINAL)]
    assert ends in ([], [len(events) - 1])
    check_blocks(events, ended=bool(ends))


def check_blocks(events: list[PublicEvent], *, ended: bool) -> None:
    content: dict[int, str] = {}
    done: set[int] = set()
    inputs: dict[int, str] = defaultdict(str)
    for event in events:
        match event:
            case BlockStarted():
                assert event.block == len(content), "numbered from 0 without a gap"
                content[event.block] = ""
            case Chunk():
                assert event.block in content
                assert event.block not in done
                assert event.visible == (event.kind == "text")
                content[event.block] += event.text
                if event.tool_call_part == "input":
                    inputs[event.block] += event.text
            case BlockComplete():
                assert event.block not in done
                done.add(event.block)
                if event.kind == "tool_call":
                    assert event.arguments == inputs[event.block]
                    assert (event.input is None) == (event.input_error is not None)
                else:
                    assert event.content == content[event.block]
            case _:
                pass
    if ended:
        assert done == set(content), "every block that starts completes"


@given(steps, policies)
def test_a_checkpoint_anywhere_changes_nothing(plan: list[list[BusEvent] | BusEvent], policy: str) -> None:
    whole, parts = play(plan, policy, reborn=False), play(plan, policy, reborn=True)
    assert parts.events == whole.events
    assert parts.effects == whole.effects


@given(steps)
def test_published_output_is_never_void_under_continue(plan: list[list[BusEvent] | BusEvent]) -> None:
    events = play(plan, "continue", reborn=False).events
    received: set[int] = set()
    for event in events:
        match event:
            case Chunk() if event.visible:
                received.add(event.block)
            case Retrying():
                assert all(block < event.drop_from for block in received)
            case Restarted():
                raise AssertionError("nothing begins again once it was heard")
            case _:
                pass
