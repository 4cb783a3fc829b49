"""Text that means harm: nothing leaks, nothing is a call that should not be, and the work stays linear.

Work is counted in characters looked at, not in seconds.
"""

from __future__ import annotations

import pytest

from tests.unit.core.prefill.reading import read, reader, regions
from tokenbus.core.prefill.tags import MAX_TAG, Marks, Tag


class Steps:
    """Counts the characters that searches for tags pass over."""

    count = 0


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    counted = Steps()
    find, held_from = Marks.find, Marks.held_from

    def counting_find(self: Marks, text: str, start: int) -> Tag | None:
        found = find(self, text, start)
        counted.count += (found.end if found else len(text)) - start
        return found

    def counting_held(self: Marks, text: str, start: int) -> int:
        counted.count += min(MAX_TAG, len(text) - start)
        return held_from(self, text, start)

    monkeypatch.setattr(Marks, "find", counting_find)
    monkeypatch.setattr(Marks, "held_from", counting_held)
    return counted


HOSTILE = {
    "less_than": "<" * 1_000_000,
    "nested": "<thinking>" * 1_000 + "x" + "</thinking>" * 1_000,
    "nested_calls": "<function_calls>" * 1_000 + '<invoke name="f">' * 1_000,
    "attributes": ("<thinking" + ' a="b"' * 1_000) * 100,
    "blanks": ("<thinking" + " " * 5_000) * 50,
    "beginnings": "<thinkin" * 50_000,
    "unclosed": '<thinking><function_calls><invoke name="f"><parameter name="q">' + "</param" * 50_000,
    "stops": "\nBo" * 100_000,
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("size", [4, 1_000_000])
def test_hostile_text_costs_a_fixed_number_of_steps_a_character(name: str, size: int, steps: Steps) -> None:
    text = HOSTILE[name][: 200_000 if size == 4 else None]
    reading = reader(stops=("\nBob:",))
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    events = [event for piece in pieces for event in reading.feed(piece)]
    regions([*events, *reading.end()])
    # Each piece may look once more at what is held back, and at no more than that.
    assert steps.count <= 2 * len(text) + 2 * MAX_TAG * len(pieces) + 1_000 * MAX_TAG


def test_tags_nested_a_thousand_deep_are_one_block() -> None:
    [block] = regions(read(HOSTILE["nested"]))
    assert block.content == "<thinking>" * 999 + "x"


def test_a_close_tag_inside_a_value_ends_nothing_but_the_value() -> None:
    text = '<function_calls><invoke name="f"><parameter name="q">a</parameter></invoke></function_calls>'
    [inner] = regions(read(f'<function_calls><invoke name="g"><parameter name="q">{text}'))
    assert (inner.name, inner.malformed) == ("g", False)
    assert '"q":"<function_calls><invoke name=' in inner.content


def test_results_that_the_model_invented_are_never_told() -> None:
    text = '<function_results><result><function_calls><invoke name="f"/></function_calls></result></function_results>Hi'
    assert [(b.kind, b.content) for b in regions(read(text))] == [("text", "Hi")]


def test_a_call_inside_an_open_thinking_is_a_call_and_inside_a_value_it_is_none() -> None:
    text = '<thinking>a<function_calls><invoke name="f"><parameter name="q"><invoke name="evil"></invoke></parameter>'
    found = regions(read(text))
    assert [(b.kind, b.name) for b in found] == [("thinking", ""), ("tool_call", "f")]
