"""Where a body is cut, without any network."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus_services.mock_provider import CutOff, Fixed, Offsets, Random, Stall, Whole
from tokenbus_services.mock_provider.plan import event_ends, fault_offset, read_ends, split_at
from tokenbus_services.mock_provider.script import Cuts

any_cuts = st.one_of(
    st.builds(Whole, events=st.integers(1, 4)),
    st.builds(Fixed, size=st.integers(1, 9)),
    st.builds(Random, seed=st.integers(), largest=st.integers(1, 9)),
    st.builds(Offsets, at=st.lists(st.integers(1, 80)).map(tuple)),
)
line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(body=st.lists(st.sampled_from([b"\n", b"\r", b"data: x", "ü".encode()])).map(b"".join), cuts=any_cuts)
def test_any_way_of_cutting_gives_the_body_again_and_no_empty_read(body: bytes, cuts: Cuts) -> None:
    reads = split_at(body, read_ends(body, cuts))
    assert b"".join(reads) == body
    assert all(reads)


@given(ends=st.lists(line_ends, min_size=1, max_size=4))
def test_an_event_ends_with_its_empty_line_for_every_line_ending(ends: list[bytes]) -> None:
    events = [b"data: x" + end + end for end in ends]
    # An event that ends in CR and an LF right after it would be one CRLF; the next event begins with a letter.
    assert split_at(b"".join(events), event_ends(b"".join(events))) == events


def test_a_crlf_is_one_line_end_not_two() -> None:
    assert event_ends(b"event: a\r\ndata: 1\r\n\r\ndata: 2\r\n\n") == [21, 31]


def test_whole_events_may_share_a_read_and_an_unfinished_one_does_not() -> None:
    body = b"a\n\nb\n\nc\n\nd"
    assert split_at(body, read_ends(body, Whole(events=2))) == [b"a\n\nb\n\n", b"c\n\nd"]


def test_fixed_reads_have_the_size_but_for_the_last() -> None:
    assert split_at(b"abcdefgh", read_ends(b"abcdefgh", Fixed(size=3))) == [b"abc", b"def", b"gh"]


def test_offsets_cut_where_they_say_and_those_past_the_end_are_without_effect() -> None:
    assert split_at(b"abcdefgh", read_ends(b"abcdefgh", Offsets(at=(5, 1, 99)))) == [b"a", b"bcde", b"fgh"]


def test_offsets_before_the_beginning_are_without_effect() -> None:
    """The rest of a body after a fault is cut at the offsets within it."""
    assert split_at(b"abcdefgh", (-7, -3, 0, 2)) == [b"ab", b"cdefgh"]


def test_the_same_seed_cuts_alike_and_no_read_is_over_the_largest() -> None:
    body = bytes(1000)
    cuts = Random(seed=7, largest=11)
    assert read_ends(body, cuts) == read_ends(body, cuts) != read_ends(body, Random(seed=8, largest=11))
    sizes = {len(read) for read in split_at(body, read_ends(body, cuts))}
    assert len(sizes) > 5
    assert max(sizes) <= 11


@pytest.mark.parametrize(
    ("fault", "before"),
    [
        (CutOff(), b""),
        (CutOff(after_events=0), b""),
        (CutOff(after_events=2), b"one\n\ntwo\n\n"),
        (CutOff(after_events=9), b"one\n\ntwo\n\nthree"),
        (CutOff(after_bytes=4), b"one\n"),
        (CutOff(after_bytes=99), b"one\n\ntwo\n\nthree"),
        (Stall(after_text="w"), b"one\n\ntwo\n\n"),
        (Stall(after_text="thr"), b"one\n\ntwo\n\nthree"),
    ],
)
def test_a_fault_strikes_after_its_events_bytes_or_text(fault: CutOff | Stall, before: bytes) -> None:
    body = b"one\n\ntwo\n\nthree"
    assert body[: fault_offset(body, fault)] == before


def test_a_fault_whose_text_is_missing_is_an_error_of_the_script() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        fault_offset(b"one\n\n", Stall(after_text="nowhere"))


def test_a_fault_has_one_place() -> None:
    with pytest.raises(ValueError, match="one place"):
        CutOff(after_events=1, after_bytes=1)
