# ruff: noqa: RUF001 - other scripts are meant
"""Where sentences end, and that nothing else depends on how the text is cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.shaping.sentences import AHEAD, SentenceRules, Sentences

ALONE = SentenceRules(least=0)


def sentences(text: str, rules: SentenceRules = ALONE) -> list[str]:
    cutter = Sentences(rules)
    return cutter.feed(text) + cutter.end()


@pytest.mark.parametrize(
    "marked",
    [
        "Hello there. |How are you? |I am fine!",
        "What?! |No... |Yes.",
        "It costs 3.14 or 1.000,50 today. |See example.com or v1.2.3 now.",
        "Dr. Smith met Mrs. Jones, e.g. at St. Paul's. |They left.",
        "J. R. R. Tolkien wrote it. |So did I. |Then we left.",
        "Apples, pears, etc. and more. |He came at 5 p.m. and slept.",
        "I live in the U.S. |It is big.",
        "See no. 5 and p. 12 there. |I said no. |Then I left.",
        '"Really?" she asked. |"Yes!" |He left.',
        "(It was late.) |They went home (it was far!) and slept.",
        "Wait... what? |And then… nothing. |Good.",
        "Title without a stop\n|The text begins.\n\n|And goes on.",
        "Three things:\n|1. Bread.\n|2. Butter and so on\n|a. Salt.\n|- Last one",
        "It was 1999. |Then it was 2000.",
        "これは文です。|次の文です！|「そうですか？」と言った。|終わり",
        "我喜欢。|你呢？|他说：“好。”|走吧",
        "¿Qué tal? |¡Bien! |Adiós.",
        "यह वाक्य है। |दूसरा वाक्य।",
        "  Leading blanks. |Trailing blanks.  ",
        "",
        "no end at all",
    ],
)
def test_a_sentence_ends_where_a_reader_would_say(marked: str):
    assert sentences(marked.replace("|", "")) == [part for part in marked.split("|") if part]


@pytest.mark.parametrize(
    ("language", "marked"),
    [
        ("de", "Am 3. Mai kam Hr. Müller, z. B. mit Frl. Maier bzw. Kind. |Dann ging er."),
        ("en", "He won on the 3. |May was next."),
        ("fr-FR", "M. Dupont et Mme. Durand sont là. |Bien."),
        ("ru", "Это ул. Ленина и т.е. центр. |Дальше."),
        ("en", "The French say M. Dupont. |We say it was the mind. |So."),
        (None, "Das ist Hr. Müller and Dr. Smith. |So."),
        ("xx", "Das ist Hr. Müller and Dr. Smith. |So."),
    ],
)
def test_abbreviations_are_those_of_the_language(language: str | None, marked: str):
    assert sentences(marked.replace("|", ""), SentenceRules(language=language, least=0)) == marked.split("|")


def test_a_short_sentence_is_spoken_with_the_next_and_the_last_one_alone():
    assert sentences("Oh! No. That is bad. Bye.", SentenceRules(least=8)) == ["Oh! No. That is bad. ", "Bye."]
    assert sentences("はい。そうですね。次。", SentenceRules(least=8)) == ["はい。そうですね。", "次。"]


def test_what_is_too_long_is_cut_after_a_clause_or_between_words_or_anywhere():
    rules = SentenceRules(least=0, most=20)
    words = "one two three four five six seven eight nine ten eleven twelve " * 3
    cut = sentences(words, rules)
    assert "".join(cut) == words
    assert all(len(part) <= 20 and part.endswith(" ") for part in cut)
    assert sentences("a word, one more word" + " and on" * 20, rules)[0] == "a word, one more "
    assert sentences("a long clause, more" + " and on" * 20, rules)[0] == "a long clause, "
    assert [len(part) for part in sentences("x" * 150, rules)][:3] == [20, 20, 20]
    assert sentences("e\u0301" * 80, SentenceRules(least=0, most=19))[0].endswith("\u0301")


def test_a_sentence_is_given_out_as_soon_as_the_next_word_begins_and_wide_ones_at_once():
    cutter = Sentences(ALONE)
    assert cutter.feed("Hello there.") == []
    assert cutter.feed(" ") == []
    assert cutter.feed("H") == ["Hello there. "]
    assert cutter.end() == ["H"]
    assert cutter.feed("はい。") == []
    assert cutter.feed("次") == ["はい。"]


def test_a_timeout_gives_whole_words():
    cutter = Sentences(ALONE)
    cutter.feed("one two thr")
    assert cutter.release() == ["one two "]
    assert cutter.release() == []
    assert cutter.feed("ee. Four") == ["three. "]
    assert cutter.held == "Four"


def test_what_is_held_is_bounded_and_time_is_linear():
    rules = SentenceRules(most=100)
    cutter = Sentences(rules)
    for piece in ["." * 500_000, "\n " * 250_000, "a" * 500_000, "(" * 500_000]:
        cutter.feed(piece)
        assert len(cutter.held) < 100 + AHEAD


@pytest.mark.parametrize("bounds", [{"least": -1}, {"least": 9, "most": 8}, {"least": 0, "most": 0}])
def test_bounds_that_cannot_be_are_refused(bounds: Any):
    with pytest.raises(ValueError, match="least"):
        SentenceRules(**bounds)


ALPHABET = st.sampled_from([*"abIZ 1.!?…。？」\"')(\n,\u0301-zB", "Dr.", "e.g. ", "etc. ", "no. ", " \n\n", ". A"])
TEXTS = st.lists(ALPHABET, max_size=120).map("".join)
RULES = st.builds(
    lambda least, more, language: SentenceRules(least=least, most=least + more, language=language),
    st.integers(0, 12),
    st.integers(1, 60),
    st.sampled_from([None, "de", "en"]),
)


@given(TEXTS, RULES, st.data())
def test_sentences_concatenate_to_the_text_and_are_the_same_however_it_is_cut(
    text: str, rules: SentenceRules, data: st.DataObject
):
    whole = sentences(text, rules)
    assert "".join(whole) == text
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    cutter = Sentences(rules)
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert [s for piece in pieces for s in cutter.feed(piece)] + cutter.end() == whole
