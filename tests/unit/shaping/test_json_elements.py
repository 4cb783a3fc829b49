"""Elements of a JSON text while it is written: as the whole text has them, whatever its pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rows import over_rows
from tests.unit.core.run.script import Story, call, text
from tokenbus.client.response import Response
from tokenbus.errors import Malformed, TooLarge
from tokenbus.events import normalized as n
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import ToolReturned
from tokenbus.events.public import PublicEvent
from tokenbus.shaping import JsonElement, JsonElements, RunElement, RunElements

AGAIN = ErrorInfo(code="overloaded_error", kind="overloaded", message="busy", retryable=True)
NAMES = st.sampled_from(["a", "items", "", "*", "0", "é\n", '"'])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=4) | st.dictionaries(NAMES, v, max_size=4), max_leaves=20)
PATHS = st.lists(NAMES, max_size=3)


@st.composite
def texts(draw: st.DrawFn) -> str:
    """JSON of any value in any form."""
    value, indent = draw(VALUES), draw(st.sampled_from([None, 0, 2, "\t"]))
    written = json.dumps(value, indent=indent, ensure_ascii=draw(st.booleans()))
    return draw(st.sampled_from(["", " ", "\r\n"])) + written


@st.composite
def pieces(draw: st.DrawFn, whole: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


def at_path(value: Any, path: Sequence[str], place: tuple[str | int, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """The values at a path of a whole value, in order."""
    if not path:
        yield place, value
        return
    fields: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in fields:
        if path[0] in ("*", str(key)):
            yield from at_path(each, path[1:], (*place, key))


def read(parts: Sequence[str], path: str | Sequence[str], **options: Any) -> list[JsonElement[Any]]:
    reader: JsonElements[Any] = JsonElements(path, **options)
    return [*(each for part in parts for each in reader.feed(part)), *reader.end()]


@given(st.data(), PATHS)
def test_elements_are_those_of_the_whole_text_once_and_in_order(data: st.DataObject, path: list[str]) -> None:
    whole = data.draw(texts())
    got = [(each.path, each.value) for each in read(data.draw(pieces(whole)), path)]
    assert got == list(at_path(json.loads(whole), path))


@given(st.data(), st.text('[]{}:,"\\ \n\x00u0e-+.1tfnrulase', max_size=12))
def test_what_is_accepted_is_json_and_json_is_accepted(data: st.DataObject, whole: str) -> None:
    try:
        json.loads(whole, parse_constant=lambda name: json.loads(f"[{name}"), object_pairs_hook=_once)
        expected = True
    except (ValueError, RecursionError):
        expected = False
    try:
        read(data.draw(pieces(whole)), ["nowhere"])
        accepted = True
    except Malformed:
        accepted = False
    assert accepted == expected, whole


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(pairs)


def test_an_element_comes_with_the_character_that_completes_it() -> None:
    whole = '{"items": [{"a": "]}"}, "x,y", 12, true, []]}'
    reader: JsonElements[Any] = JsonElements("items.*")
    ends = [whole[: i + 1] for i, character in enumerate(whole) for _ in reader.feed(character)]
    assert [end.rsplit(" ", 1)[-1] for end in ends] == ['"]}"}', '"x,y"', "12,", "true,", "[]"]


@over_rows(
    "path, values",
    [
        ("items.*", [1, {"b": [2]}]),
        ("items.1", [{"b": [2]}]),
        ("items.*.b.*", [2]),
        ("title", ["T"]),
        ("*", [[1, {"b": [2]}], "T"]),
        ("", [{"items": [1, {"b": [2]}], "title": "T"}]),
        ("nothing", []),
    ],
)
def test_a_path_names_fields_and_places(path: str, values: list[Any]) -> None:
    assert [each.value for each in read(['{"items": [1, {"b": [2]}], "title": "T"}'], path)] == values


class City(msgspec.Struct):
    name: str


def test_a_value_is_converted_to_its_type_and_one_that_is_not_of_it_is_an_error_at_its_place() -> None:
    reader = JsonElements("*", City)
    assert [each.value for each in reader.feed('[{"name": "Bonn"}, {"name": 1}, ')] == [City("Bonn")]
    with pytest.raises(Malformed, match=r"at 1: Expected `str`"):
        reader.feed('{"name": "Rome"}')


WRONG = {
    "a field twice": ('{"a": 1, "a": 2}', "a", "twice"),
    "an end too early": ('{"a": [1', "*", "ends early"),
    "a text": ("Here you are: {}", "*", "'H' is no number|'Here'"),
    "text after it": ("[1] [2]", "*", "not expected"),
    "a comma too many": ("[1,]", "*", "not expected"),
    "a control character": ('["\x01"]', "*", "control character"),
    "half a pair": ('["\\ud800"]', "*", "surrogate|truncated"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_json_is_an_error(name: str) -> None:
    whole, path, problem = WRONG[name]
    with pytest.raises(Malformed, match=problem):
        read(list(whole), path)


HOSTILE = {
    "depth": ("[" * 10**6, "*"),
    "depth in a value": ('{"a":' * 10**5, ""),
    "a long value": ('["' + "x" * 2 * 10**6, "*"),
    "a long number": ("1" * 2 * 10**6, "nowhere"),
    "a long name": ('{"' + "x" * 2 * 10**6, "*"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_too_deep_or_too_long_is_refused_before_it_is_kept(name: str) -> None:
    whole, path = HOSTILE[name]
    with pytest.raises(TooLarge):
        read([whole[i : i + 999] for i in range(0, len(whole), 999)], path)


def test_what_is_beside_the_path_may_have_any_length() -> None:
    (element,) = read(['{"log": "', *(["x" * 9_999] * 300), '", "at": {"n": 1}}'], "at")
    assert element == JsonElement(("at",), {"n": 1})


# --- of a run -------------------------------------------------------------------------------------------------------


def elements(events: Sequence[PublicEvent], path: str = "*") -> list[RunElement[Any]]:
    reader: RunElements[Any] = RunElements(path)
    return [element for event in events for element in reader.add(event)]


def test_elements_of_a_run_that_continues_after_a_break_come_once() -> None:
    story = Story(on_failure="continue", continues=True)
    story.provider(n.BlockStart(0, "text"), n.TextDelta(0, '[{"a": 1}, {"b"'), n.Cut("reset", AGAIN))
    story.provider(n.BlockStart(0, "text"), n.TextDelta(0, ": 2}]"), n.BlockStop(0), n.Done("stop"))
    got = elements(story.events)
    assert [each.value for each in got] == Response.of(story.events).parsed()
    assert [(each.number, each.attempt) for each in got] == [(0, 1), (1, 2)]


def test_elements_of_a_text_that_starts_over_come_again_with_its_attempt() -> None:
    story = Story(on_failure="restart")
    story.provider(n.BlockStart(0, "text"), n.TextDelta(0, "[1, 2,"), n.Cut("reset", AGAIN))
    story.provider(*text(0, "[1, 3]"), n.Done("stop"))
    got = [(each.number, each.attempt, each.value) for each in elements(story.events)]
    assert got == [(0, 1, 1), (1, 1, 2), (2, 2, 1), (3, 2, 3)]


def test_the_text_of_an_earlier_turn_may_be_anything() -> None:
    story = Story()
    story.provider(*text(0, "I look."), *call(1, "c", "weather", "{}"), n.Done("tool_use"))
    story.control(ToolReturned(1, "Rain.", False))
    story.provider(*text(0, "[1]"), n.Done("stop"))
    assert [each.value for each in elements(story.events)] == [1]


def test_an_answer_that_is_no_json_is_an_error_at_the_runs_end() -> None:
    story = Story()
    story.provider(*text(0, "[1, oh"))
    assert [each.value for each in elements(story.events)] == [1]
    story.provider(n.Done("stop"))
    with pytest.raises(Malformed):
        elements(story.events)


def test_events_that_were_read_already_add_nothing() -> None:
    story = Story()
    story.provider(*text(0, "[1, 2]"), n.Done("stop"))
    assert [each.number for each in elements([*story.events[:3], *story.events])] == [0, 1]
