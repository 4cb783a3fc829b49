"""Text and reasoning in any mix of forms: strings, content lists, fields and whole messages. Each character is emitted
once, under its kind.
"""

from __future__ import annotations

from itertools import accumulate, count
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.providers.reading import Answer, answer, cut, read_pieces, sse
from tokenbus.events.normalized import Done

FIELDS = ("reasoning_content", "reasoning", "reasoning_details")
PLACES = (*FIELDS, "content")
DONE = b"data: [DONE]\n\n"


class Piece(NamedTuple):
    kind: str
    text: str
    places: tuple[str, ...] = ()
    """thinking: where a chunk has it."""
    listed: bool = False
    """text: as a part of a list."""


class Mix(NamedTuple):
    chunks: list[list[Piece]]
    whole: dict[str, Any] | None
    text: str
    thinking: str
    in_order: bool
    """The whole message does not change the order of what is left of the thinking."""


def place_sets(most: int = 3) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(PLACES), min_size=1, max_size=most, unique=True)


@st.composite
def mixes(draw: st.DrawFn) -> Mix:
    numbers = count(0x4E00)  # no character twice, so that a repetition is never a coincidence

    def words() -> str:
        return "".join(chr(next(numbers)) for _ in range(draw(st.integers(1, 3))))

    by_place = draw(st.booleans())
    always = draw(st.none() | place_sets())
    chunks: list[list[Piece]] = []
    for _ in range(draw(st.integers(1, 6))):
        places = always or draw(place_sets(most=1 if by_place else 3))
        thinking = Piece("thinking", words(), tuple(places))
        text = Piece("text", words(), listed=draw(st.booleans()))
        match draw(st.sampled_from(["text", "thinking", "both"])):
            case "text":
                chunks.append([text])
            case "thinking":
                chunks.append([thinking])
            case _:
                chunks.append([thinking, text._replace(listed=text.listed or "content" in places)])
    every = [piece for pieces in chunks for piece in pieces]
    text, thinking = ("".join(piece.text for piece in every if piece.kind == kind) for kind in ("text", "thinking"))
    kept = draw(st.integers(0, len(chunks)))
    whole = message_of(every, by_place, draw) if kept < len(chunks) or draw(st.booleans()) else None
    repeats = draw(st.sampled_from([(), *((place,) for place in PLACES)]))
    streamed = chunks[:kept]
    if repeats and whole is None and not any(place in repeats for piece in every for place in piece.places):
        streamed = [*streamed, *again(every, repeats, draw)]
    return Mix(streamed, whole, text, thinking, not by_place or kept == len(chunks))


def again(every: list[Piece], places: tuple[str, ...], draw: st.DrawFn) -> list[list[Piece]]:
    """All reasoning a second time, cut in other pieces."""
    thinking = "".join(piece.text for piece in every if piece.kind == "thinking")
    size = draw(st.integers(1, 4))
    return [[Piece("thinking", thinking[at : at + size], places)] for at in range(0, len(thinking), size)]


def message_of(every: list[Piece], by_place: bool, draw: st.DrawFn) -> dict[str, Any]:
    """The whole message, its reasoning in the places of its chunks or in others."""
    others = tuple(draw(place_sets()))
    pieces = [
        piece if piece.kind == "text" else piece._replace(places=piece.places if by_place else others)
        for piece in every
    ]
    listed = any("content" in piece.places for piece in pieces) or draw(st.booleans())
    return delta_of([piece._replace(listed=listed) for piece in pieces])


def delta_of(pieces: list[Piece]) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    listed = any(piece.listed or "content" in piece.places for piece in pieces)
    for piece in pieces:
        for place in piece.places or ("text",):
            if place in ("reasoning_content", "reasoning"):
                delta[place] = delta.get(place, "") + piece.text
            elif place == "reasoning_details":
                delta.setdefault(place, []).append({"type": "reasoning.text", "index": 0, "text": piece.text})
            elif place == "content":
                inner = [{"type": "text", "text": piece.text}]
                delta.setdefault("content", []).append({"type": "thinking", "thinking": inner})
            elif listed:
                delta.setdefault("content", []).append({"type": "text", "text": piece.text})
            else:
                delta["content"] = delta.get("content", "") + piece.text
    return delta


def body_of(mix: Mix) -> bytes:
    form = {"id": "c", "model": "m"}
    events: list[Any] = [
        form | {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta_of(pieces)}]}
        for pieces in mix.chunks
    ]
    last = {"index": 0, "finish_reason": "stop"}
    if mix.whole is not None:
        events.append(form | {"object": "chat.completion", "choices": [last | {"message": mix.whole}]})
    else:
        events.append(form | {"object": "chat.completion.chunk", "choices": [last | {"delta": {}}]})
    return sse(*events, DONE)


@given(mixes(), st.lists(st.integers(0, 10**6), max_size=5), st.booleans())
def test_every_mix_of_forms_is_emitted_once_and_under_its_kind(mix: Mix, cuts: list[int], restored: bool) -> None:
    body = body_of(mix)
    said = answer(read_pieces("openai-chat", cut(body, [at % len(body) for at in cuts]), restored=restored))
    assert said.text == mix.text
    assert (said.thinking if mix.in_order else sorted(said.thinking)) == (
        mix.thinking if mix.in_order else sorted(mix.thinking)
    )
    assert (said.open, said.terminal) == (set(), Done("stop", "stop"))


def chat(*deltas: dict[str, Any], message: dict[str, Any] | None = None) -> Answer:
    chunks: list[Any] = [{"model": "m", "choices": [{"delta": delta}]} for delta in deltas]
    if message:
        chunks.append({"object": "chat.completion", "choices": [{"message": message}]})
    return answer(
        read_pieces("openai-chat", [sse(*chunks, {"choices": [{"delta": {}, "finish_reason": "stop"}]}, DONE)])
    )


def listed(*pieces: tuple[str, str]) -> dict[str, Any]:
    inner = {"text": lambda text: text, "thinking": lambda text: [{"type": "text", "text": text}]}
    return {"content": [{"type": kind, kind: inner[kind](text)} for kind, text in pieces]}


def test_thinking_of_a_content_list_does_not_make_a_later_text_thinking() -> None:
    said = chat(listed(("thinking", "Hm")), {"content": "Hi"}, {"content": " you"})
    assert (said.thinking, said.text, said.kinds) == ("Hm", "Hi you", ["thinking", "text"])


def test_a_field_continues_the_thinking_of_a_content_list() -> None:
    said = chat(listed(("thinking", "Hm")), {"reasoning_content": " so"}, listed(("text", "Hi")))
    assert (said.thinking, said.text) == ("Hm so", "Hi")


def test_what_remains_of_a_whole_message_is_computed_by_its_parts() -> None:
    streamed = [listed(("thinking", "Hm")), listed(("text", "H"))]
    whole = listed(("thinking", "Hm so"), ("text", "Hi"), ("thinking", ", and"), ("text", "!"))
    said = chat(*streamed, message=whole)
    assert (said.thinking, said.text) == ("Hm so, and", "Hi!")


@pytest.mark.parametrize("size", [1, 3, 50])
def test_a_second_field_that_repeats_the_first_late_and_in_other_pieces_is_skipped(size: int) -> None:
    thought = "The user greets me, so I greet them too."
    pieces = [thought[at : at + 7] for at in range(0, len(thought), 7)]
    late = [{"reasoning": thought[at : at + size]} for at in range(0, len(thought), size)]
    assert chat(*({"reasoning_content": piece} for piece in pieces), *late).thinking == thought
    beside = [
        {"reasoning_content": piece, "reasoning": before} for before, piece in zip(["", *pieces], pieces, strict=False)
    ]
    assert chat(*beside).thinking == thought


def test_a_second_field_with_another_text_that_begins_alike_is_whole() -> None:
    said = chat({"reasoning_content": "The long thought."}, {"reasoning": "The "}, {"reasoning": "other."})
    assert said.thinking == "The long thought.The other."


def test_reasoning_of_any_length_in_two_fields_is_emitted_once() -> None:
    pieces = [f"{n} and then " for n in range(20_000)]
    assert sum(map(len, pieces)) > 3 * 64 * 1024
    said = chat(*({"reasoning": piece, "reasoning_details": [{"type": "t", "text": piece}]} for piece in pieces))
    assert len(said.thinking) == list(accumulate(map(len, pieces)))[-1]
