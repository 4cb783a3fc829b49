"""Thinking inside of the text: found however the text comes in pieces, never visible, and nothing else is touched."""

from __future__ import annotations

import re
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import over_rows
from tests.unit.providers.corpus import APIS, CORPUS, Recording, needs_corpus, recordings
from tests.unit.providers.reading import answer, cut, decoder, item, joined, read, sse
from tokenbus.events import normalized as n
from tokenbus.events.quirks import BUILT_IN, ApiName, Quirks
from tokenbus.providers import registry
from tokenbus.providers.response.inline_thinking import MAX_HELD_CHARS, InlineThinking

THINK = Quirks(inline_thinking=("think",))
TWO = Quirks(inline_thinking=("think", "thought"))
Blocks = list[tuple[str, str]]


def made(quirks: Quirks) -> InlineThinking:
    splitter = InlineThinking.of(quirks)
    assert splitter
    return splitter


def of_text(*pieces: str, quirks: Quirks = THINK) -> list[n.Normalized]:
    """What becomes of one text block that comes in these pieces; between any two the state is saved and loaded."""
    splitter = made(quirks)
    out = splitter.split([n.Start("m"), n.BlockStart(0, "text")])
    for piece in pieces:
        out += splitter.split([n.TextDelta(0, piece)])
        splitter = msgspec.msgpack.decode(msgspec.msgpack.encode(splitter), type=InlineThinking)
    return out + splitter.split([n.BlockStop(0), n.Done("stop")])


def blocks(events: list[n.Normalized]) -> Blocks:
    """The blocks with their content, each whole: begun, written, ended."""
    answer(events)
    kinds = {event.block: event.kind for event in events if isinstance(event, n.BlockStart)}
    texts = dict.fromkeys(kinds, "")
    for event in events:
        if isinstance(event, n.TextDelta | n.ThinkingDelta):
            assert isinstance(event, n.ThinkingDelta) == (kinds[event.block] == "thinking")
            texts[event.block] += event.text
    assert list(kinds) == sorted(kinds)
    assert sum(isinstance(event, n.BlockStop) for event in events) == len(kinds)
    return [(kinds[block], texts[block]) for block in kinds]


def plain(text: str, names: tuple[str, ...], inside: str = "") -> Blocks:
    """The rules on a whole text, in the plainest way: what is between the tags that count, and stray closes gone."""
    any_tag = re.compile(rf"<(/?)({'|'.join(names)})[ \t\r\n]*>")
    pieces: Blocks = [("thinking" if inside else "text", "")]
    tagged = bool(inside)
    at = 0
    while at < len(text):
        tag = any_tag.match(text, at)
        if tag and len(tag[0]) <= 256 and (not inside or (tag[1] and tag[2] == inside)):
            tagged = True
            if inside or not tag[1]:
                inside = "" if inside else tag[2]
                pieces.append(("thinking" if inside else "text", ""))
            at = tag.end()
        else:
            pieces[-1] = (pieces[-1][0], pieces[-1][1] + text[at])
            at += 1
    return [
        (kind, content)
        for kind, content in pieces
        if content.strip(" \t\r\n") or len(content) > 256 or (content and not tagged)
    ]


REPLY: dict[str, Blocks] = {
    "<think>a</think>b": [("thinking", "a"), ("text", "b")],
    "<think \t>a</think\r\n>b": [("thinking", "a"), ("text", "b")],
    "a<think>b": [("text", "a"), ("thinking", "b")],
    "<thi<think>a</think>": [("text", "<thi"), ("thinking", "a")],
    "<<think>a</think>": [("text", "<"), ("thinking", "a")],
    "<think>a<think>b</think>c": [("thinking", "a<think>b"), ("text", "c")],
    "<think>a<b</think >c</thi": [("thinking", "a<b"), ("text", "c</thi")],
    "a</think>b": [("text", "ab")],
    "\n<think>\n\n</think>\n\nb": [("text", "\n\nb")],
    "<think>a</think> \n <think>b</think>\n": [("thinking", "a"), ("thinking", "b")],
    "<think> </think> </think> b": [("text", "  b")],
    " </think>": [],
    " \n": [("text", " \n")],
    "": [],
    "<Think>a</Think>": [("text", "<Think>a</Think>")],
    "< think>a": [("text", "< think>a")],
    "<think x=1>a": [("text", "<think x=1>a")],
    "<think/>a<thinking>": [("text", "<think/>a<thinking>")],
    "if a < b": [("text", "if a < b")],
    "</think": [("text", "</think")],
    f"<think{' ' * 249}>a": [("thinking", "a")],
    f"<think{' ' * 250}>a": [("text", f"<think{' ' * 250}>a")],
    f"<think>{' ' * 256}</think>{' ' * 257}<think>a": [("text", " " * 257), ("thinking", "a")],
}


@pytest.mark.parametrize("text", REPLY, ids=repr)
def test_text_becomes_the_blocks_that_it_holds_whole_or_by_the_character(text: str) -> None:
    assert blocks(of_text(text)) == REPLY[text]
    assert blocks(of_text(*text)) == REPLY[text]


def test_each_name_is_a_tag_and_closes_its_own_tag() -> None:
    text = "<thought>a</think>b</thought>c<think>d"
    assert blocks(of_text(*text, quirks=TWO)) == [("thinking", "a</think>b"), ("text", "c"), ("thinking", "d")]
    assert blocks(of_text("<thinking>", quirks=Quirks(inline_thinking=("think", "thinking")))) == []


def test_an_answer_may_begin_inside_of_what_the_prompt_opened() -> None:
    opened = Quirks(inline_thinking=("think",), inline_thinking_opened=True)
    assert blocks(of_text("a", "</think>", "b", quirks=opened)) == [("thinking", "a"), ("text", "b")]


BLANKS = " " * 150
parts = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<thought >",
        "</thought\n>",
        "<thi",
        "nk>",
        "<",
        ">",
        "/",
        "think",
        " ",
        "\n",
        "a",
        " " * 150,
    ]
)


@settings(max_examples=400, deadline=None)
@given(st.lists(parts, max_size=14).map("".join), st.lists(st.integers(0, 200), max_size=8), st.booleans())
def test_any_cutting_of_any_text_gives_what_the_whole_text_holds(text: str, places: list[int], opened: bool) -> None:
    quirks = Quirks(inline_thinking=("think", "thought"), inline_thinking_opened=opened)
    pieces = [text[a:b] for a, b in zip([0, *sorted(places)], [*sorted(places), len(text)], strict=True)]
    events = of_text(*(piece for piece in pieces if piece), quirks=quirks)
    assert blocks(events) == plain(text, ("think", "thought"), "think" if opened else "")
    assert joined(events) == joined(of_text(text, quirks=quirks) if text else of_text(quirks=quirks))


@pytest.mark.parametrize(
    "unit", ["<", "<think", "<think>", "</think>", "<think   ", f"<think{' ' * 300}", " ", "<think>a</think>"]
)
def test_hostile_text_costs_time_in_proportion_and_a_bounded_hold(unit: str) -> None:
    splitter = made(THINK)
    splitter.split([n.Start("m"), n.BlockStart(0, "text")])
    before = time.process_time()
    splitter.split([n.TextDelta(0, unit * (1_000_000 // len(unit)))])
    assert time.process_time() - before < 20  # of the processor; in proportion it takes some tenths, else minutes
    for character in unit * 300:
        splitter.split([n.TextDelta(0, character)])
        held = splitter.open[0]
        assert len(held.held) < MAX_HELD_CHARS
        assert len(held.blank) <= MAX_HELD_CHARS


# --- beside other events ----------------------------------------------------------------------------------------


def split(*events: n.Normalized) -> list[n.Normalized]:
    return made(THINK).split([n.Start("m"), *events])[1:]


def at(number: int, piece: int = 0) -> int:
    """The ordinal of a piece of the decoder's block with this number."""
    return number * 2**32 + piece


def test_other_blocks_keep_their_order_and_what_belongs_to_them() -> None:
    events = split(
        n.BlockStart(0, "text"),
        n.TextDelta(0, "<think>a</think>b"),
        n.BlockStop(0),
        n.ToolCallStart(1, "t1", "weather"),
        n.ToolCallDelta(1, "{}"),
        n.BlockStart(3, "image"),
        n.Image(3, "image/png", "AA", final=True),
        n.BlockStop(3),
        *item(2, "anthropic.item", "{}"),
        n.ToolCallDone(1),
        n.Opaque(1, "extra_content", "{}"),
        n.Extra("anthropic.citation", "{}", block=0),
        n.Extra("anthropic.event", "{}"),
    )
    assert events == [
        n.BlockStart(at(0), "thinking"),
        n.ThinkingDelta(at(0), "a"),
        n.BlockStop(at(0)),
        n.BlockStart(at(0, 1), "text"),
        n.TextDelta(at(0, 1), "b"),
        n.BlockStop(at(0, 1)),
        n.ToolCallStart(at(1), "t1", "weather"),
        n.ToolCallDelta(at(1), "{}"),
        n.BlockStart(at(3), "image"),
        n.Image(at(3), "image/png", "AA", final=True),
        n.BlockStop(at(3)),
        *item(at(2), "anthropic.item", "{}"),
        n.ToolCallDone(at(1)),
        n.Opaque(at(1), "extra_content", "{}"),
        n.Extra("anthropic.citation", "{}", block=at(0, 1)),
        n.Extra("anthropic.event", "{}"),
    ]


def test_thinking_continues_after_a_call_in_between() -> None:
    events = split(
        n.BlockStart(0, "text"),
        n.TextDelta(0, "<think>first"),
        n.BlockStop(0),
        n.ToolCallStart(1, "t1", "weather"),
        n.ToolCallDone(1),
        n.BlockStart(2, "text"),
        n.TextDelta(2, "then</think>said"),
        n.BlockStop(2),
        n.Done("tool_use"),
    )
    deltas = [event for event in events if isinstance(event, n.TextDelta | n.ThinkingDelta)]
    assert deltas == [n.ThinkingDelta(at(0), "first"), n.ThinkingDelta(at(2), "then"), n.TextDelta(at(2, 1), "said")]


def test_texts_that_are_open_together_are_read_apart() -> None:
    events = split(
        n.BlockStart(0, "text"),
        n.BlockStart(1, "text"),
        n.TextDelta(0, "<think>a<"),
        n.TextDelta(1, "/think>b<think"),
        n.TextDelta(0, "/think>c"),
        n.BlockStop(0),
        n.BlockStop(1),
    )
    assert [event for event in events if isinstance(event, n.TextDelta | n.ThinkingDelta)] == [
        n.ThinkingDelta(at(0), "a"),
        n.TextDelta(at(1), "/think>b"),
        n.TextDelta(at(0, 1), "c"),
        n.TextDelta(at(1), "<think"),
    ]


@pytest.mark.parametrize("terminal", [n.Cut("gone"), n.Done("length")])
def test_what_was_held_back_is_text_when_the_answer_ends_in_the_middle(terminal: n.Normalized) -> None:
    events = split(n.BlockStart(0, "text"), n.TextDelta(0, "a <thi"), terminal)
    assert joined(events) == [n.BlockStart(0, "text"), n.TextDelta(0, "a <thi"), terminal]


def test_opaque_data_of_a_text_without_a_word_is_kept_with_it() -> None:
    events = [n.BlockStart(0, "text"), n.Opaque(0, "thought_signature", "s"), n.BlockStop(0)]
    assert split(*events) == events


def test_opaque_data_of_an_empty_text_is_dropped() -> None:
    late = n.Opaque(0, "thought_signature", "s")
    nothing = [n.BlockStart(0, "text"), n.TextDelta(0, "<think> "), n.BlockStop(0)]
    assert split(*nothing, late, n.Extra("x.y", "{}", block=0)) == [n.Extra("x.y", "{}")]


def test_a_refusal_is_text_even_inside_of_thinking() -> None:
    events = split(
        n.BlockStart(0, "text"), n.TextDelta(0, "<think>a<"), n.RefusalDelta(0, "<think>No."), n.BlockStop(0)
    )
    assert joined(events) == [
        n.BlockStart(0, "thinking"),
        n.ThinkingDelta(0, "a<"),
        n.BlockStop(0),
        n.BlockStart(1, "text"),
        n.RefusalDelta(1, "<think>No."),
        n.BlockStop(1),
    ]


def test_a_message_begun_again_voids_all_before_it() -> None:
    events = split(
        n.BlockStart(0, "text"),
        n.TextDelta(0, "<think>a</think>b<think>"),
        n.Start("m", "2", void_before=1),
        n.BlockStart(1, "text"),
        n.TextDelta(1, "c"),
        n.BlockStop(1),
    )
    assert events[-4:] == [
        n.Start("m", "2", void_before=at(1)),
        n.BlockStart(at(1), "text"),
        n.TextDelta(at(1), "c"),
        n.BlockStop(at(1)),
    ]


@pytest.mark.parametrize("opened", [False, True])
def test_a_message_begun_again_begins_where_the_first_began(opened: bool) -> None:
    splitter = made(Quirks(inline_thinking=("think",), inline_thinking_opened=opened))
    for before in ("<think>a", "</think>b"):
        splitter.split([n.Start("m"), n.BlockStart(0, "text"), n.TextDelta(0, before), n.BlockStop(0)])
        events = splitter.split([n.Start("m", void_before=1), n.BlockStart(1, "text"), n.TextDelta(1, "c")])
        assert events[1:2] == [n.BlockStart(at(1), "thinking" if opened else "text")]


def test_many_blocks_keep_no_more_state_than_one() -> None:
    splitter = made(THINK)
    splitter.split([n.Start("m")])
    size = len(msgspec.msgpack.encode(splitter))
    for number in range(2000):
        splitter.split([n.BlockStart(number, "text"), n.TextDelta(number, "<think>a</think>b"), n.BlockStop(number)])
    assert len(msgspec.msgpack.encode(splitter)) < size + 32


# --- in a decoder ----------------------------------------------------------------------------------------------

TEXT = "<think>Hm, 🌧️?</think>\n\nTake <b>it</b>."
WANTED: Blocks = [("thinking", "Hm, 🌧️?"), ("text", "\n\nTake <b>it</b>.")]
STREAMS: dict[ApiName, bytes] = {
    "anthropic": sse(
        {"type": "message_start", "message": {"model": "m"}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": c}} for c in TEXT),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
        {"type": "message_stop"},
    ),
    "openai-chat": sse(
        *({"model": "m", "choices": [{"index": 0, "delta": {"content": c}}]} for c in TEXT),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        b"data: [DONE]\n\n",
    ),
    "openai-responses": sse(
        {"type": "response.created", "response": {"id": "r", "model": "m"}},
        *({"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": c} for c in TEXT),
        {"type": "response.completed", "response": {"status": "completed"}},
    ),
    "gemini": sse(
        *({"modelVersion": "m", "candidates": [{"content": {"parts": [{"text": c}]}}]} for c in TEXT),
        {"candidates": [{"finishReason": "STOP"}]},
    ),
    "gemini-interactions": sse(
        {"event_type": "interaction.created", "interaction": {"id": "i", "model": "m", "status": "in_progress"}},
        {"event_type": "step.start", "index": 0, "step": {"type": "model_output"}},
        *({"event_type": "step.delta", "index": 0, "delta": {"type": "text", "text": c}} for c in TEXT),
        {"event_type": "step.stop", "index": 0},
        {"event_type": "interaction.completed", "interaction": {"id": "i", "status": "completed"}},
    ),
}


def test_every_api_that_writes_text_is_among_them() -> None:
    assert set(STREAMS) == set(BUILT_IN) - {"openai-images"}


@pytest.mark.parametrize("api", STREAMS)
def test_every_api_reads_it_however_its_bytes_are_cut(api: ApiName) -> None:
    data = STREAMS[api]
    whole = read(api, data, quirks=THINK)
    assert blocks(whole) == WANTED
    for size in (1, 7, 100):
        reader = decoder(api, quirks=THINK)
        events: list[n.Normalized] = []
        for piece in cut(data, range(size, len(data), size)):
            events += reader.feed(piece)
            reader = registry.get(api).restore(msgspec.msgpack.encode(reader))
        assert events + reader.end() == whole


@pytest.mark.parametrize("api", STREAMS)
def test_without_the_quirk_a_tag_is_text(api: ApiName) -> None:
    assert decoder(api).inline is None  # pyright: ignore[reportAttributeAccessIssue]
    assert blocks(read(api, STREAMS[api])) == [("text", TEXT)]


@needs_corpus
def test_a_recorded_stream_of_deepseek_r1_is_thinking_and_then_text() -> None:
    data = (CORPUS / "openai_chat" / "pydantic-pydantic-ai__test_hf_model_thinking_part_iter.sse").read_bytes()
    [(_, text)] = blocks(read("openai-chat", data))
    thought, closed, answer_text = text.removeprefix("<think>").partition("</think>")
    assert closed
    assert blocks(read("openai-chat", data, quirks=THINK)) == [("thinking", thought), ("text", answer_text)]


@needs_corpus
@over_rows("row", recordings(*APIS), ids=lambda row: row.file)
def test_a_recorded_stream_without_a_tag_says_exactly_the_same(row: Recording) -> None:
    usual, found = (answer(read(row.api_name, row.data, quirks=quirks)) for quirks in (Quirks(), THINK))
    if "<think" not in usual.text:
        found.open = {ordinal // at(1) for ordinal in found.open}
        assert found == usual
