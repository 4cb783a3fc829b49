"""Policies on a run's public events: the chunks that they get, and that their output is a well-formed run."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.core.run.script import Story
from tests.unit.policy.streams import (
    ELAPSED_MS,
    CallsApart,
    Notes,
    UntilComplete,
    completions,
    public_stream,
    under,
)
from tokenbus.client.response import Response
from tokenbus.events import normalized as n
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.public import (
    BlockComplete,
    BlockStarted,
    Chunk,
    Completed,
    ImagePreview,
    Incomplete,
    PublicEvent,
    Restarted,
    TerminalEvent,
    UsageReported,
)
from tokenbus.events.usage import Usage
from tokenbus.policy.processor import NewText, NewToolCall, StreamContext, StreamProcessor
from tokenbus.policy.stream_state import OtherStreamBlock, StreamState


def call(block: int, name: str, arguments: str) -> list[n.Normalized]:
    start = n.ToolCallStart(block, f"id-{name}", name)
    return [start, n.ToolCallDelta(block, arguments), n.ToolCallDone(block)]


def answer(*events: n.Normalized, finish: n.FinishReason = "tool_use") -> list[PublicEvent]:
    """A run of one turn that says this."""
    story = Story(max_tool_depth=0)
    for event in (*events, n.Done(finish, usage=Usage(output=3))):
        story.provider(event)
    return story.events


ANSWER = answer(
    *(n.BlockStart(0, "thinking"), n.ThinkingDelta(0, "hm"), n.BlockStop(0)),
    *(n.BlockStart(1, "text"), n.TextDelta(1, "Hello "), n.TextDelta(1, "you"), n.BlockStop(1)),
    *call(2, "f", '{"x": 1}'),
    *call(3, "g", "{}"),
)


class Does(StreamProcessor):
    """Does with each chunk what a test says."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self._what = what

    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        for item in self._what(chunk, state, context):
            await context.send(item)


def check_sound(events: list[PublicEvent], end: type[TerminalEvent] = Completed) -> None:
    """What holds for every run that a subscriber sees."""
    assert [event.seq for event in events] == list(range(len(events)))
    started: list[int] = []
    pieces: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, BlockStarted):
            started.append(event.block)
            pieces[event.block] = []
        elif isinstance(event, Chunk):
            if event.tool_call_part in (None, "input"):
                assert event.text
                pieces[event.block].append(event.text)
        elif isinstance(event, BlockComplete):
            whole = event.arguments if event.kind == "tool_call" else event.content
            assert "".join(pieces.pop(event.block)) == (whole or "")
    assert started == list(range(len(started)))
    assert not pieces, "blocks that never end"
    assert isinstance(events[-1], end)


async def test_a_policy_that_passes_everything_changes_nothing():
    assert await under(public_stream(Notes()), ANSWER) == ANSWER


async def test_a_policy_that_withholds_everything_until_the_end_changes_nothing():
    assert await under(public_stream(UntilComplete()), ANSWER) == ANSWER


async def test_a_block_is_complete_with_its_own_event_and_thinking_is_a_block_too():
    notes = Notes()
    await under(public_stream(notes), ANSWER)
    assert notes.done == ["thinking", "Hello you", 'f({"x": 1})', "g({})"]
    assert notes.state
    assert isinstance(notes.state.blocks[0], OtherStreamBlock)
    assert notes.state.finish_reason == "tool_use"


async def test_a_notice_replaces_a_blocked_call_without_a_gap():
    stream = public_stream(CallsApart(["f"]))
    out = await under(stream, ANSWER)
    check_sound(out)
    assert [(b.block, b.kind, b.content or b.tool_name) for b in completions(out)] == [
        (0, "thinking", "hm"),
        (1, "text", "Hello you"),
        (2, "text", "[f blocked]"),
        (3, "tool_call", "g"),
    ]
    assert out[-1].finish == "tool_use"
    (decision,) = stream.decisions()
    assert (decision.action, decision.tool_name, decision.original, decision.final) == (
        "block",
        "f",
        '{"x": 1}',
        "[f blocked]",
    )


async def test_the_finish_reason_is_stop_if_every_call_is_blocked():
    out = await under(public_stream(CallsApart(["f", "g"])), ANSWER)
    check_sound(out)
    assert out[-1].finish == "stop"


async def test_a_call_that_a_policy_adds_makes_the_finish_reason_tool_use():
    plain = answer(n.BlockStart(0, "text"), n.TextDelta(0, "x"), n.BlockStop(0), finish="stop")
    adds = Does(lambda e, s, c: [NewToolCall("i", "f", "[1]"), e] if s.finish_reason else [e])  # pyright: ignore
    out = await under(public_stream(adds), plain)
    check_sound(out)
    added = completions(out)[-1]
    assert (added.tool_id, added.tool_name, added.arguments) == ("i", "f", "[1]")
    assert added.input is None
    assert out[-1].finish == "tool_use"


async def test_one_chunk_may_become_many():
    many = Does(lambda e, s, c: [e, NewText("one"), NewText("two")] if s.just_completed else [e])  # pyright: ignore
    out = await under(public_stream(many), ANSWER)
    check_sound(out)
    assert Response.of(out).text == "onetwoHello youonetwoonetwoonetwo"


async def test_a_changed_text_is_in_its_block_complete_without_the_providers_opaque_data():
    signed = answer(
        *(n.BlockStart(0, "thinking"), n.ThinkingDelta(0, "hm"), n.Opaque(0, "signature", "sig")),
        *(n.Opaque(0, "encrypted", "e"), n.BlockStop(0)),
        *call(1, "f", '{"x": 1}'),
    )
    loud = Does(lambda e, s, c: [c.with_text(e, c.text(e).upper())])  # pyright: ignore
    out = await under(public_stream(loud), signed)
    check_sound(out)
    thought, called = completions(out)
    assert (thought.content, thought.signature, thought.opaque) == ("HM", None, None)
    assert (called.arguments, called.input) == ('{"X": 1}', {"X": 1})
    assert [event.text for event in out if isinstance(event, Chunk) and event.tool_call_part == "name"] == ["f"]


async def test_a_forwarded_end_releases_nothing_that_the_policy_withheld():
    ends = Does(lambda e, s, c: [e] if s.just_completed or s.finish_reason else [])  # pyright: ignore
    out = await under(public_stream(ends), ANSWER)
    check_sound(out)
    assert completions(out) == []
    first = Does(lambda e, s, c: [e] if not isinstance(e, Chunk) or e.text == "Hello " else [])  # pyright: ignore
    out = await under(public_stream(first), ANSWER)
    check_sound(out)
    assert Response.of(out).text == "Hello "
    assert not [b for b in Response.of(out).tool_calls if b.arguments]


async def test_a_call_whose_end_is_held_back_is_cut():
    holds = Does(lambda e, s, c: [] if isinstance(e, BlockComplete) else [e])  # pyright: ignore
    out = await under(public_stream(holds), ANSWER)
    check_sound(out)
    assert [(b.kind, b.cut) for b in completions(out)] == [
        ("thinking", None),
        ("text", None),
        ("tool_call", True),
        ("tool_call", True),
    ]
    assert out[-1].finish == "stop"


async def test_terminating_closes_what_is_open_and_ends_the_run():
    def stop(event: PublicEvent, state: StreamState, context: StreamContext[Any]) -> list[PublicEvent]:
        if isinstance(event, Chunk) and event.text == "you":
            context.terminate("enough")
        return [event]

    stream = public_stream(Does(stop))
    out = await under(stream, ANSWER)
    check_sound(out, Incomplete)
    assert Response.of(out).text == "Hello "
    end = out[-1]
    assert isinstance(end, Incomplete)
    assert (end.finish, end.timing.total_ms) == ("content_filter", ELAPSED_MS)
    assert end.error
    assert (end.error.code, end.reason) == ("policy_terminated", "a policy ended the run: Does: enough")
    assert completions(out)[-1].cut
    assert stream.terminated
    assert stream.terminated.reason == "enough"


async def test_a_cut_block_is_never_complete():
    story = Story(on_failure="fail")
    story.provider(
        n.BlockStart(0, "text"), n.TextDelta(0, "par"), n.ToolCallStart(1, "i", "f"), n.ToolCallDelta(1, "{")
    )
    story.provider(n.Cut("gone"))
    notes = Notes()
    out = await under(public_stream(notes), story.events)
    assert out == story.events
    assert notes.done == []
    assert notes.state
    assert notes.state.blocks
    assert not any(block.is_complete for block in notes.state.blocks)
    held = await under(public_stream(CallsApart()), story.events)
    assert [event.kind for event in completions(held)] == ["text"]


async def test_blocks_that_a_restart_makes_void_are_void_here_too():
    story = Story(on_failure="restart")
    story.provider(*call(0, "f", "{}"), n.BlockStart(1, "text"), n.TextDelta(1, "first"))
    story.provider(n.Failed(ErrorInfo(code="x", kind="overloaded", message="busy", retryable=True)))
    story.provider(n.BlockStart(0, "text"), n.TextDelta(0, "second"), n.BlockStop(0), n.Done("stop"))
    notes = Notes()
    out = await under(public_stream(CallsApart(["f"]), notes), story.events)
    check_sound(out)
    restarted = next(event for event in out if isinstance(event, Restarted))
    assert restarted.drop_from == 0
    assert Response.of(out).text == "second"
    assert notes.state
    assert [block.number for block in notes.state.blocks] == [2]


async def test_an_event_about_a_block_moves_with_its_block_or_is_dropped():
    story = Story(max_tool_depth=0)
    story.provider(*call(0, "f", "{}"), n.BlockStart(1, "image"), n.Image(1, "image/png", "AAAA", final=False))
    story.provider(n.Image(1, "image/png", "BBBB", final=True), n.BlockStop(1), n.Done("stop"))
    assert any(isinstance(event, ImagePreview) for event in story.events)
    out = await under(public_stream(CallsApart(["f"]), Notes()), story.events)
    check_sound(out)
    assert [(b.block, b.kind) for b in completions(out)] == [(0, "text"), (1, "image")]
    assert [event.block for event in out if isinstance(event, ImagePreview)] == [1]
    hidden = Does(lambda e, s, c: [] if getattr(e, "kind", "") == "image" and not isinstance(e, ImagePreview) else [e])  # pyright: ignore
    assert not any(isinstance(event, ImagePreview) for event in await under(public_stream(hidden), story.events))


async def test_usage_is_read_from_every_place_that_vendors_use():
    out = await under(public_stream(CallsApart(["f"])), ANSWER)
    assert [event.usage.output for event in out if isinstance(event, UsageReported)] == [3]


@given(st.data())
async def test_a_run_stays_valid_with_any_output_of_a_policy(data: st.DataObject):
    new = st.sampled_from([NewText("new"), NewText(""), NewToolCall("n", "h", "{}"), NewToolCall("n", "h", "")])

    def anything(event: PublicEvent, state: StreamState, context: StreamContext[Any]) -> list[Any]:
        keep = state.finish_reason is not None or data.draw(st.booleans())
        added = data.draw(st.lists(new, max_size=2))
        return [*added, event] if keep else added

    out = await under(public_stream(Does(anything), Notes()), ANSWER)
    check_sound(out)
    assert [msgspec.json.decode(msgspec.json.encode(event), type=type(event)) for event in out] == out
