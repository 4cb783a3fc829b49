"""Parts of a text that were already emitted, and halves of characters: for any text, cut anywhere."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.providers.reading import answer, read, sse
from tokenbus.events.normalized import Normalized, TextDelta
from tokenbus.providers.response.repeats import EmittedText, not_emitted
from tokenbus.providers.response.surrogates import SurrogateJoiner, with_placeholders

TEXTS = st.text(st.sampled_from("ab \n\u00e9\U0001f600\U0001f642"), max_size=12)


def emitted_text(*pieces: str) -> EmittedText:
    emitted = EmittedText()
    for piece in pieces:
        emitted.add(piece)
    return emitted


@given(pieces=st.lists(TEXTS), more=TEXTS)
def test_the_rest_of_a_text_begins_after_the_emitted_part(pieces: list[str], more: str) -> None:
    text = "".join(pieces)
    rest = emitted_text(*pieces).rest(text + more)
    assert rest is not None
    assert rest.split() == more.split() or text + rest == text + more
    if more.strip() and not more[0].isspace():
        assert rest == more


@given(parts=st.lists(TEXTS.filter(str.strip), min_size=1), cuts=st.lists(st.integers(0, 60)))
def test_how_a_text_was_divided_does_not_matter(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    again = [text[a:b] for a, b in pairwise(edges)]
    assert not_emitted([emitted_text(part) for part in parts], again) == [""] * len(again)


def test_another_text_is_not_sent() -> None:
    assert emitted_text("ha").rest("hu ha") is None
    assert emitted_text("ha").rest("h") is None
    assert emitted_text().rest("ha") == "ha"
    assert emitted_text("ha").rest("ha ha") == " ha"
    assert emitted_text("ha ").rest("ha ha") == "ha"


@given(text=TEXTS, cuts=st.lists(st.integers(0, 24)))
def test_a_character_cut_in_two_is_one_however_the_text_is_cut(text: str, cuts: list[int]) -> None:
    units = text.encode("utf-16-le")
    edges = sorted({0, len(units), *(2 * cut for cut in cuts if 2 * cut < len(units))})
    pieces = [units[a:b].decode("utf-16-le", "surrogatepass") for a, b in pairwise(edges)]
    halves = SurrogateJoiner()
    events: list[Normalized] = []
    for piece in pieces:
        data, _ = with_placeholders(json.dumps(piece).encode())
        events += halves.join([TextDelta(0, json.loads(data))])
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == text


@pytest.mark.parametrize("expected", ["\U0010f83d", "\U0010f83d\\ud83d"])
def test_a_placeholder_from_the_provider_is_kept_verbatim(expected: str) -> None:
    def delta(text: str) -> bytes:
        return b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % text.encode()

    end = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
    whole = answer(read("openai-chat", delta(expected) + sse(end)))
    assert whole.text == expected.replace("\\ud83d", "\ufffd")
