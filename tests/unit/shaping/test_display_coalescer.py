"""Joining chunks for a screen."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.events.public import BlockComplete, BlockStarted, Chunk, PublicEvent
from tokenbus.shaping.sentences import Coalescer


def chunk(seq: int, text: str = "a", **fields: Any) -> Chunk:
    about: dict[str, Any] = {"run": "r", "turn": 0, "attempt": 1, "block": 0, "depth": 0}
    return Chunk(seq=seq, text=text, **{**about, "kind": "text", "visible": True, **fields})


def test_pieces_wait_until_the_first_has_waited_long_enough():
    gather = Coalescer(hold_s=1, most=100)
    assert gather.due is None
    assert gather.feed(chunk(0, "a"), 10.0) == []
    assert gather.due == 11.0
    assert gather.feed(chunk(1, "b"), 10.5) == []
    assert gather.due == 11.0
    assert gather.flush() == [chunk(1, "ab")]
    assert gather.flush() == []
    assert gather.feed(chunk(2, "c"), 12.0) == []
    assert gather.feed(chunk(3, "d"), 13.0) == [chunk(3, "cd")]


def test_pieces_go_out_when_they_are_large_enough():
    gather = Coalescer(hold_s=1, most=3)
    assert gather.feed(chunk(0, "ab"), 0) == []
    assert gather.feed(chunk(1, "cd"), 0) == [chunk(1, "abcd")]


def test_boundaries_go_out_at_once_with_what_came_before_them():
    gather = Coalescer(hold_s=1, most=100)
    begin = BlockStarted(run="r", seq=0, turn=0, attempt=1, block=0, kind="text")
    end = BlockComplete(run="r", seq=3, turn=0, attempt=1, block=0, kind="text", content="ab")
    assert gather.feed(begin, 0) == [begin]
    gather.feed(chunk(1, "a"), 0)
    gather.feed(chunk(2, "b"), 0)
    assert gather.feed(end, 0) == [chunk(2, "ab"), end]


OTHER = [{"run": "s"}, {"block": 1}, {"attempt": 2}, {"visible": False}, {"depth": 1}, {"tool_call_part": "input"}]


@pytest.mark.parametrize("other", OTHER)
def test_chunks_that_are_not_of_one_piece_are_not_joined(other: dict[str, Any]):
    gather = Coalescer(hold_s=1, most=100)
    gather.feed(chunk(0), 0)
    assert gather.feed(chunk(1, **other), 0) == [chunk(0)]


EVENTS = st.lists(
    st.one_of(
        st.builds(lambda text, other: chunk(0, text, **other), st.text(max_size=5), st.sampled_from([{}, *OTHER])),
        st.just(BlockStarted(run="r", seq=0, turn=0, attempt=1, block=0, kind="text")),
    ),
    max_size=40,
)


def spread(events: list[PublicEvent]) -> list[object]:
    """Each character of each chunk, and each other event, in order."""
    return [
        c
        for event in events
        for c in (
            [(msgspec.structs.replace(event, text="", seq=0), c) for c in event.text]
            if isinstance(event, Chunk)
            else [event]
        )
    ]


@given(EVENTS, st.lists(st.floats(0, 2), min_size=40, max_size=40), st.integers(0, 10))
def test_content_and_order_do_not_depend_on_the_clock(events: list[PublicEvent], gaps: list[float], most: int):
    gather = Coalescer(hold_s=1, most=most)
    numbered = [msgspec.structs.replace(event, seq=seq) for seq, event in enumerate(events)]
    out: list[PublicEvent] = []
    now = 0.0
    for event, gap in zip(numbered, gaps, strict=False):
        now += gap
        out += gather.feed(event, now)
    out += gather.flush()
    assert [e.seq for e in out] == sorted(e.seq for e in out)
    others = [e for e in numbered if not isinstance(e, Chunk)]
    assert [e for e in out if not isinstance(e, Chunk)] == others
    assert [s for s in spread(out) if isinstance(s, tuple)] == [s for s in spread(numbered) if isinstance(s, tuple)]
    if out:
        assert out[-1].seq == numbered[-1].seq


@pytest.mark.parametrize("bounds", [{"hold_s": -1}, {"most": -1}])
def test_bounds_that_cannot_be_are_refused(bounds: dict[str, Any]):
    with pytest.raises(ValueError, match="must not be negative"):
        Coalescer(**bounds)
