"""Pieces become rows: no character is lost, none is wider than the terminal, and nothing acts on it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.utils import get_cwidth

from tokenbus_services.cli.chat.rows import Rows
from tokenbus_services.cli.chat.transcript import Piece

BLOCK = ("r", 0)


def laid_out(pieces: list[Piece], width: int) -> list[str]:
    rows = Rows()
    for piece in pieces:
        rows.add(piece, width)
    rows.end()
    return ["".join(text for _, text, *_ in row) for row in rows.take()]


def answer(text: str, block: tuple[str, int] = BLOCK) -> Piece:
    return Piece("answer", text, "m", block)


TEXTS = st.lists(st.text(alphabet="ab界 \n", max_size=40), max_size=8)


@given(TEXTS, st.integers(12, 40))
def test_however_a_text_is_cut_into_pieces_its_rows_are_the_same_and_fit(texts: list[str], width: int) -> None:
    rows = laid_out([answer(text) for text in texts], width)
    assert rows == laid_out([answer("".join(texts))] if texts else [], width)
    assert all(sum(map(get_cwidth, row)) < width for row in rows)
    shown = "".join(rows).removeprefix("m > ")
    assert shown.replace(" ", "") == "".join(texts).replace(" ", "").replace("\n", "")


def test_rows_break_at_words_and_a_long_word_anywhere() -> None:
    assert laid_out([answer("one two three four")], 14) == ["m > one two", "three four"]
    assert laid_out([answer("onetwothreefour")], 14) == ["m > onetwothr", "eefour"]


def test_blocks_are_paragraphs_of_their_own_and_asides_are_indented() -> None:
    thought = [Piece("thinking", "let me ", block=BLOCK), Piece("thinking", "think", block=BLOCK)]
    said, tool = Piece("said", "hi", "ada"), Piece("tool", "weather {}")
    rows = laid_out([said, *thought, answer("yes", ("r", 1)), tool, answer("no", ("r", 2))], 40)
    assert rows == ["", "ada > hi", "  let me think", "m > yes", "  weather {}", "m > no"]


def test_what_a_model_writes_cannot_act_on_the_terminal() -> None:
    [row] = laid_out([Piece("answer", "a\x1b[2Jb\r\x07", "m\x1b]0;x\x07", BLOCK)], 60)
    assert row.isprintable()
    assert "a␛[2Jb␍␇" in row
