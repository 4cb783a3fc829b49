"""Arguments in pieces: their value for any object, and values that cannot be represented."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.errors import Malformed
from tokenbus.providers.gemini.partial_args import MAX_DEPTH, ArgsWriter, parse
from tokenbus.providers.gemini.wire import PartialArg

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, min_size=1, max_size=4) | st.dictionaries(st.text(), inner, min_size=1, max_size=4),
    max_leaves=10,
)
objects = st.dictionaries(st.text(), values, max_size=4)


def leaves(value: Any, path: str = "$") -> Iterator[tuple[str, Any]]:
    """The values of an object and their places, in order."""
    if isinstance(value, dict):
        for key, inner in value.items():
            quoted = key.replace("\\", "\\\\").replace("'", "\\'")
            yield from leaves(inner, f"{path}['{quoted}']")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{i}]")
    else:
        yield path, value


def piece(path: str, value: Any) -> PartialArg:
    if isinstance(value, str):
        return PartialArg(path, string_value=value)
    if isinstance(value, bool):
        return PartialArg(path, bool_value=value)
    if value is None:
        return PartialArg(path, null_value=msgspec.Raw(b"null"))
    return PartialArg(path, number_value=msgspec.Raw(msgspec.json.encode(value)))


def written(*pieces: PartialArg) -> str:
    """The whole text. Between any two pieces the writer is saved and loaded."""
    writer = ArgsWriter()
    text = ""
    for one in pieces:
        text += writer.write(one)
        writer = msgspec.msgpack.decode(msgspec.msgpack.encode(writer), type=ArgsWriter)
    return text + writer.end()


@given(objects, st.integers(1, 3))
def test_any_object_in_pieces_is_that_object(value: dict[str, Any], size: int) -> None:
    pieces: list[PartialArg] = []
    for path, leaf in leaves(value):
        cuts = [leaf[i : i + size] for i in range(0, len(leaf), size)] if isinstance(leaf, str) and leaf else [leaf]
        pieces += [piece(path, cut) for cut in cuts]
    assert msgspec.json.decode(written(*pieces)) == value


def test_the_text_grows_with_each_piece_and_has_no_blanks() -> None:
    writer = ArgsWriter()
    assert writer.write(piece("$.a.b", "x")) == '{"a":{"b":"x'
    assert writer.write(piece("$.a.b", 'y"')) == 'y\\"'
    assert writer.write(piece("$.a.c[0]", 1.50)) == '","c":[1.5'
    assert writer.write(piece("$.a.c[1].d", True)) == ',{"d":true'
    assert writer.write(piece("$.e", None)) == '}]},"e":null'
    assert writer.end() == "}"


def test_numbers_stay_as_they_are_written() -> None:
    assert written(PartialArg("$.n", number_value=msgspec.Raw(b"1e3"))) == '{"n":1e3}'


def test_nothing_is_an_empty_object_and_a_place_without_a_value_is_nothing() -> None:
    assert written() == "{}"
    assert written(PartialArg("$.a"), piece("$.b", 1)) == '{"b":1}'


@pytest.mark.parametrize(
    ("path", "segments"),
    [
        ("$.a.b_c-1", ["a", "b_c-1"]),
        ("$.a[0][12].b", ["a", 0, 12, "b"]),
        ("$['a.b'][\"c'd\"]", ["a.b", "c'd"]),
        ("$['a\\'b\\\\']", ["a'b\\"]),
        (r"$['\u263a\n']['a\"b']", ["☺\n", 'a"b']),
    ],
)
def test_a_path_names_keys_and_indexes(path: str, segments: list[Any]) -> None:
    assert parse(path) == segments


@pytest.mark.parametrize(
    "path",
    [
        "",
        "$",
        "a",
        "$.",
        "$..a",
        "$[0]",
        "$.a[-1]",
        "$.a[*]",
        "$.a b]",
        r"$['\ud800']",
        r"$['\q']",
        "$" + ".a" * (MAX_DEPTH + 1),
    ],
)
def test_a_path_that_names_no_single_place_in_an_object_is_refused(path: str) -> None:  # fmt: skip
    with pytest.raises(Malformed):
        parse(path)


@pytest.mark.parametrize(
    "paths",
    [
        ["$.a", "$.a"],
        ["$.a", "$.b", "$.a"],
        ["$.a.b", "$.a"],
        ["$.a", "$.a.b"],
        ["$.a[1]"],
        ["$.a[0]", "$.a[2]"],
        ["$.a[1]", "$.a[0]"],
        ["$.a[0]", "$.a.b"],
        ["$.a.b", "$.c", "$.a.d"],
    ],
)
def test_a_place_that_cannot_be_written_is_refused(paths: list[str]) -> None:
    with pytest.raises(Malformed):
        written(*(piece(path, 1) for path in paths))
