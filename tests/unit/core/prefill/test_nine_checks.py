"""The nine checks of the original proposal: a listener gets clean content for any text of the model."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.unit.core.run.script import Story, call, of_type, text
from tokenbus.core.prefill.calls import call_id
from tokenbus.events import normalized as n
from tokenbus.events.frames import BusEvent, TextReading, ToolReturned
from tokenbus.events.public import BlockComplete, BlockStarted, Chunk, PublicEvent

DOCUMENT = (
    'Let me <b>look</b>.<thinking>Rome, I think.</thinking>\n<function_calls>\n<invoke name="f">\n'
    '<parameter name="q">Rome</parameter>\n</invoke>\n<invoke name="g"></invoke>\n</function_calls>'
)
CONTENT = [
    ("text", "Let me <b>look</b>."),
    ("thinking", "Rome, I think."),
    ("tool_call", '{"q":"Rome"}'),
    ("tool_call", "{}"),
    ("tool_result", "sunny"),
    ("tool_result", "rainy"),
    ("text", "It is sunny."),
]
RESULTS = (ToolReturned(2, "sunny", False), ToolReturned(3, "rainy", False))


def events_of(document: str, size: int) -> list[n.Normalized]:
    return [n.TextDelta(0, document[i : i + size]) for i in range(0, len(document), size)]


def prefilled(size: int = 3) -> list[PublicEvent]:
    """A run of two turns, each piece in a commit of its own."""
    story = Story(reading=TextReading())
    for event in events_of(DOCUMENT, size):
        story.provider(event, attempt=1)
    story.control(*RESULTS)
    for event in [*events_of("It is sunny.", size), n.Done("stop", "end_turn")]:
        story.provider(event)
    return story.events


def spoken() -> list[PublicEvent]:
    """The same in chat mode."""
    story = Story()
    thinking: list[BusEvent] = [n.BlockStart(1, "thinking"), n.ThinkingDelta(1, "Rome, I think."), n.BlockStop(1)]
    story.provider(*text(0, "Let me <b>look</b>."), *thinking)
    story.provider(*call(2, call_id("r1/0", 0), "f", '{"q":"Rome"}'), *call(3, call_id("r1/0", 1), "g", "{}"))
    story.provider(n.Done("tool_use"))
    story.control(*RESULTS)
    story.provider(*text(0, "It is sunny."))
    story.provider(n.Done("stop", "end_turn"))
    return story.events


def joined(events: list[PublicEvent]) -> list[dict[str, Any]]:
    """Neighbouring chunks joined, without their timing."""
    out: list[dict[str, Any]] = []
    for event in events:
        plain: dict[str, Any] = msgspec.to_builtins(event)
        plain = {name: value for name, value in plain.items() if name not in ("seq", "timing")}
        last = out[-1] if out else {}
        if plain["type"] == last.get("type") == "chunk" and {**plain, "text": ""} == {**last, "text": ""}:
            last["text"] += plain["text"]
        else:
            out.append(plain)
    return out


def content_of(chunk: Chunk) -> str:
    return chunk.text if chunk.tool_call_part in (None, "input") else ""


def test_visible_filtering() -> None:
    visible = "".join(c.text for c in of_type(prefilled(), Chunk) if c.visible)
    assert visible == "Let me <b>look</b>.It is sunny."


def test_partial_tags() -> None:
    assert CONTENT[0][1] == "".join(c.text for c in of_type(prefilled(1), Chunk) if c.block == 0)


def test_tags_never_in_chunks() -> None:
    everything = "".join(c.text for c in of_type(prefilled(1), Chunk))
    assert not any(name in everything for name in ("thinking", "function", "invoke", "parameter"))


def test_tool_results_as_content() -> None:
    results = [c for c in of_type(prefilled(), Chunk) if c.kind == "tool_result"]
    assert [(c.text, c.tool_name, c.visible) for c in results] == [("sunny", "f", False), ("rainy", "g", False)]


def test_block_events_at_the_right_moments() -> None:
    story = Story(reading=TextReading())
    assert [type(e) for e in story.provider(n.TextDelta(0, "Hi"))] == [BlockStarted, Chunk]
    assert story.provider(n.TextDelta(0, "<thinking")) == []
    assert [type(e) for e in story.provider(n.TextDelta(0, ">"))] == [BlockComplete]
    assert [type(e) for e in story.provider(n.TextDelta(0, "Hm"))] == [BlockStarted, Chunk]
    assert [type(e) for e in story.provider(n.TextDelta(0, "</thinking>"))] == [BlockComplete]
    begun = story.provider(n.TextDelta(0, '<function_calls><invoke name="f">'))
    assert [getattr(e, "tool_call_part", None) for e in begun] == [None, "name", "id"]


def test_interleaving() -> None:
    is_open = -1
    for event in prefilled():
        match event:
            case BlockStarted():
                assert is_open == -1
                is_open = event.block
            case Chunk():
                assert event.block == is_open
            case BlockComplete():
                assert event.block == is_open
                is_open = -1
            case _:
                assert is_open == -1


def test_reconstruction() -> None:
    events = prefilled(2)
    wholes = [(e.kind, e.arguments if e.kind == "tool_call" else e.content) for e in of_type(events, BlockComplete)]
    assert wholes == CONTENT
    chunks = of_type(events, Chunk)
    pieces = ["".join(content_of(c) for c in chunks if c.block == block) for block in range(len(CONTENT))]
    assert pieces == [whole for _, whole in CONTENT]


def test_non_streaming_gives_one_chunk_a_block() -> None:
    chunks = of_type(prefilled(len(DOCUMENT)), Chunk)
    assert [c.block for c in chunks if c.tool_call_part in (None, "input")] == list(range(len(CONTENT)))


def test_chat_and_prefill_parity() -> None:
    assert joined(prefilled()) == joined(spoken())
