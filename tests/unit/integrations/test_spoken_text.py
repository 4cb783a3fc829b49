"""Finding how far a listener heard a run, from the spoken text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenbus.integrations.spoken_text import SpokenText


def spoken_text(*pieces: str) -> SpokenText:
    text = SpokenText()
    for n, piece in enumerate(pieces):
        text.add(10 + n, piece)
    return text


def test_the_last_completely_spoken_piece_counts() -> None:
    text = spoken_text("One ", "two ", "three ", "four.")
    assert [text.through(spoken) for spoken in ("", "On", "One", "One two", "One two thr", "One two three four.")] == [
        *(-1, -1, 10, 11, 11, 13)
    ]


def test_markup_spaces_and_case_make_no_difference() -> None:
    assert spoken_text("**Take** ", "the\n", "umbrella", "!").through("take  the umbrella") == 13


def test_a_word_that_was_spoken_differently_ends_the_match() -> None:
    assert spoken_text("It has ", "3 ", "rooms.").through("It has three rooms.") == 10


def test_an_empty_spoken_text_matches_no_piece() -> None:
    assert spoken_text("… ", "Well").through("") == -1
    assert SpokenText().through("Well") == -1


@given(st.lists(st.text(min_size=1), min_size=1), st.data())
def test_spoken_pieces_count_as_heard_up_to_any_end(pieces: list[str], data: st.DataObject) -> None:
    spoken = data.draw(st.integers(1, len(pieces)))
    text, received = spoken_text(*pieces), "".join(pieces[:spoken])
    if any(letter.isalnum() for letter in received.casefold()):
        assert text.through(received) >= 10 + spoken - 1
