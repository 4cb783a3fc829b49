"""The three ways to use a policy, on recorded streams of all four APIs: react to completions, hold until complete, and
hold each call while text flows on."""

from __future__ import annotations

from collections.abc import Sequence

from tests.rows import over_rows
from tests.unit.policy.streams import (
    CallsApart,
    Notes,
    UntilComplete,
    chunk_stream,
    completions,
    content_of,
    public_stream,
    recorded_chunks,
    recorded_events,
    under,
)
from tests.unit.providers.corpus import APIS, Recording, needs_corpus, recordings
from tokenbus.client.response import Response
from tokenbus.events.public import TERMINAL, BlockComplete, Completed, Retrying
from tokenbus.policy.stream_state import ToolCallStreamBlock

pytestmark = needs_corpus

ROWS = recordings(*APIS)
NOT_TO_JUDGE = ("interleaved-parallel-tool-call-deltas", "mistral-reasoning", "stream-text-with-content-objects")
"""Fragments of a call that another has ended, and text that is not a string: an error, see test_openai_chunks.py."""
CHAT = [
    row
    for row in recordings("openai_chat")
    if row.expected["finish_reason"] and row.expected.get("n_choices") == 1 and not row.expected["bad_json"]
    if not any(name in row.file for name in NOT_TO_JUDGE)
]


def test_there_are_streams_of_all_apis():
    assert {row.api for row in ROWS} == set(APIS)


@over_rows("row", ROWS, ids=lambda row: row.file)
async def test_each_block_is_reported_once_and_whole_on_its_completion(row: Recording):
    events = recorded_events(row)
    notes = Notes()
    assert await under(public_stream(notes), events) == events
    whole = [b for b in completions(events) if not b.cut]
    assert notes.done == [_text_of(b) for b in whole]


@over_rows("row", ROWS, ids=lambda row: row.file)
async def test_holding_everything_until_it_is_complete_gives_the_same_stream(row: Recording):
    events = recorded_events(row)
    out = await under(public_stream(UntilComplete()), events)
    if not isinstance(events[-1], TERMINAL):
        assert out == []  # the recording leads to a further call of the provider
    elif any(isinstance(event, Retrying) for event in events):
        assert Response.of(out).text == Response.of(events).text  # blocks discarded by then are never passed on
    else:
        assert out == events


@over_rows("row", ROWS, ids=lambda row: row.file)
async def test_holding_each_call_keeps_text_as_it_is_and_blocks_what_is_blocked(row: Recording):
    events = recorded_events(row)
    called = [b.tool_name or "" for b in completions(events) if b.kind == "tool_call" and not b.cut]
    passed = await under(public_stream(CallsApart()), events)
    if not any(b.kind == "tool_call" and b.cut for b in completions(events)):
        assert _content(passed) == _content(events)
    out = await under(public_stream(CallsApart(called)), events)
    before, after = Response.of(events), Response.of(out)
    assert not after.tool_calls
    assert sorted(b.block for b in completions(out)) == list(range(len(completions(out))))
    assert before.thinking == after.thinking
    if isinstance(events[-1], Completed) and called and events[-1].finish == "tool_use":
        assert after.finish == "stop"


@over_rows("row", CHAT, ids=lambda row: row.file)
async def test_chat_completions_chunks_say_the_same_as_the_bus(row: Recording):
    chunks, notes, on_bus = recorded_chunks(row), Notes(), Notes()
    out = await under(chunk_stream(notes), chunks)
    await under(public_stream(on_bus), recorded_events(row))
    assert [c for c in out if c in chunks] == [c for c in chunks if c in out]
    assert notes.state
    assert on_bus.state
    expected = [content_of(b) for b in on_bus.state.blocks if isinstance(b, ToolCallStreamBlock)]
    assert [content_of(b) for b in notes.state.blocks if isinstance(b, ToolCallStreamBlock)] == expected


def _text_of(block: BlockComplete) -> str:
    match block.kind:
        case "tool_call":
            return f"{block.tool_name}({block.arguments})"
        case "text":
            return block.content or ""
        case kind:
            return kind


def _content(events: Sequence[object]) -> list[tuple[str, str, str]]:
    """What the blocks hold, whichever of them came first."""
    blocks = (event for event in events if isinstance(event, BlockComplete))
    return sorted((block.kind, block.content or "", block.arguments or "") for block in blocks)
