"""Thinking without a close tag, if the vendor's data says that it may be the answer."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.providers.reading import joined
from tests.unit.providers.response.test_inline_thinking import blocks
from tokenbus.events import normalized as n
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.quirks import Quirks, ThinkingTags
from tokenbus.providers.response.inline_thinking import MAX_BESIDE, MAX_UNCLOSED_CHARS, InlineThinking


def read(*events: n.Normalized, unclosed: Literal["hold", "release"] = "release") -> list[n.Normalized]:
    """What becomes of an answer that begins inside of thinking; between any two events the state is kept."""
    quirks = Quirks(inline_thinking=("think",), inline_thinking_opened=True, unclosed_thinking=unclosed)
    splitter = InlineThinking.of(quirks)
    assert splitter
    out: list[n.Normalized] = []
    for event in [n.Start("m"), *events]:
        out += splitter.split([event])
        splitter = msgspec.msgpack.decode(msgspec.msgpack.encode(splitter), type=InlineThinking)
    return out


def text(*pieces: str, block: int = 0) -> list[n.Normalized]:
    return [n.BlockStart(block, "text"), *(n.TextDelta(block, piece) for piece in pieces), n.BlockStop(block)]


def test_without_a_close_tag_it_is_the_answer_if_the_turn_completes() -> None:
    assert blocks(read(*text("It ", "rains."), n.Done("stop"))) == [("text", "It rains.")]
    assert blocks(read(*text("It ", "rains."), n.Done("stop"), unclosed="hold")) == [("thinking", "It rains.")]


def test_a_close_tag_turns_it_into_thinking_that_is_emitted_at_the_close() -> None:
    assert blocks(read(*text("H", "m</think>It rains."), n.Done("stop"))) == [("thinking", "Hm"), ("text", "It rains.")]
    early = read(n.BlockStart(0, "text"), n.TextDelta(0, "Hm"))
    assert early == [n.Start("m")], "nothing is heard before it is known"


@pytest.mark.parametrize(
    "end",
    [
        n.Done("length"),
        n.Done("content_filter"),
        n.Cut("cut"),
        n.Failed(ErrorInfo(code="x", kind="server", message="x")),
    ],
)
def test_what_was_cut_off_inside_of_thinking_is_thinking(end: n.Normalized) -> None:
    assert blocks(read(*text("Hm, it"), end)) == [("thinking", "Hm, it")]
    open_still = read(*text("Hm, it")[:-1], end)
    assert [event.text for event in open_still if isinstance(event, n.ThinkingDelta)] == ["Hm, it"]


def test_a_call_without_a_close_before_it_shows_that_it_was_text() -> None:
    events = read(*text("Let me look."), n.ToolCallStart(1, "t", "f"), n.ToolCallDone(1), n.Done("tool_use"))
    assert [type(event) for event in events[1:5]] == [n.BlockStart, n.TextDelta, n.BlockStop, n.ToolCallStart]
    given = [*text("Look."), n.ToolCallStart(1, "t", "f"), n.ToolCallDone(1), *text("So.", block=2), n.Done("tool_use")]
    assert blocks(read(*given)) == [("text", "Look."), ("text", "So.")]


def test_it_may_continue_in_the_next_text_and_is_one_block_there() -> None:
    events = [*text("Hm, ", block=0), *text("so.</think>Yes.", block=1), n.Done("stop")]
    assert blocks(read(*events)) == [("thinking", "Hm, so."), ("text", "Yes.")]


def test_what_belongs_to_it_waits_with_it() -> None:
    given = [*text("Hm"), n.Opaque(0, "item_id", "msg_1")]
    for end, kind in ((n.Done("stop"), n.TextDelta), (n.Done("length"), n.ThinkingDelta)):
        events = read(*given, end)
        assert [type(event) for event in events[1:]] == [n.BlockStart, kind, n.Opaque, n.BlockStop, n.Done]
        assert (
            len(
                {
                    event.block
                    for event in events[1:-1]
                    if isinstance(event, n.TextDelta | n.ThinkingDelta | n.BlockStart | n.BlockStop | n.Opaque)
                }
            )
            == 1
        )


def test_an_item_of_the_provider_keeps_its_place_and_too_many_of_them_settle_it() -> None:
    many = read(n.BlockStart(0, "text"), n.TextDelta(0, "Hm"), *[n.Extra("x", "{}", 0)] * (MAX_BESIDE + 1))
    assert [type(event) for event in many[1:4]] == [n.BlockStart, n.ThinkingDelta, n.Extra]


def test_two_texts_that_are_open_together_lose_nothing() -> None:
    a, b = text("A", block=0), text("<think>B", block=1)
    assert sorted(blocks(read(a[0], b[0], *a[1:], *b[1:], n.Done("stop")))) == [("text", "B"), ("thinking", "A")]


def test_an_overlong_candidate_becomes_thinking_to_bound_the_buffer() -> None:
    pieces = ["x" * 1024] * (MAX_UNCLOSED_CHARS // 1024 + 2)
    events = read(n.BlockStart(0, "text"), *(n.TextDelta(0, piece) for piece in pieces))
    assert sum(len(event.text) for event in events if isinstance(event, n.ThinkingDelta)) == 1024 * len(pieces)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<thi", "nk>", "a", " ", "\n", "<"]), max_size=12), st.data())
def test_however_it_is_cut_it_is_the_same(parts: list[str], data: st.DataObject) -> None:
    whole = "".join(parts)
    places = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    pieces = [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]
    cut = read(*text(*(piece for piece in pieces if piece)), n.Done("stop"))
    assert joined(cut) == joined(read(*text(*([whole] if whole else [])), n.Done("stop")))


def test_the_tags_of_a_model_are_its_own_and_the_longest_beginning_of_its_name_counts() -> None:
    tags = {
        "qwen": ThinkingTags(inline_thinking=("think",), inline_thinking_opened=True),
        "qwen3-instruct": ThinkingTags(inline_thinking=("thought",), unclosed_thinking="release"),
    }
    quirks = Quirks(inline_thinking=("reasoning",), models=tags)
    assert quirks.of("qwen3").inline_thinking == ("think",)
    assert quirks.of("qwen3").inline_thinking_opened
    instruct = quirks.of("qwen3-instruct-2507")
    assert (instruct.inline_thinking, instruct.unclosed_thinking) == (("thought",), "release")
    assert not instruct.inline_thinking_opened
    assert quirks.of("llama").inline_thinking == ("reasoning",)
    assert quirks.of("llama").models == {}
