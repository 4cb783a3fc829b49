"""Large parts of JSON values go to the blob store and come back to the letter."""

from __future__ import annotations

import json
from base64 import b64encode, encodebytes, urlsafe_b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.blobs import blob_id_of
from tokenbus.core.blob_refs import MAX_DEPTH, REF, Sanitized, refs, restore, sanitize
from tokenbus.errors import BlobNotFound, CircularValue, Malformed, NestedTooDeep, NotStorable

BYTES = bytes(range(256)) * 60
PLAIN = b64encode(BYTES).decode()
URLSAFE = urlsafe_b64encode(BYTES + b"\xff").decode()
LINES = encodebytes(BYTES).decode()
SPELLINGS = {
    "plain": PLAIN,
    "padded": b64encode(BYTES + b"x").decode(),
    "unpadded": b64encode(BYTES + b"x").decode().rstrip("="),
    "urlsafe": URLSAFE,
    "urlsafe, unpadded": URLSAFE.rstrip("="),
    "in lines": LINES,
    "in lines, the last one open": LINES.rstrip("\n"),
    "in lines of mail": LINES.replace("\n", "\r\n"),
    "data url": f"data:image/png;base64,{PLAIN}",
    "data url with a parameter": f"data:text/plain;charset=utf-8;base64,{LINES}",
}
NEARLY = {
    "two alphabets": "-/" + PLAIN[2:],
    "loose end bits": PLAIN[:-4] + "QUJ=",
    "a blank": PLAIN[:100] + " " + PLAIN[100:],
    "lines of two lengths": LINES[:10] + "\n" + LINES[10:],
    "prose": "The rain in Spain. " * 1000,
    "not ASCII": "é" * 20_000,
}


def stored(sanitized: Sanitized) -> Any:
    """What comes back after the value has been through JSON and the parts through a store."""
    value = json.loads(json.dumps(sanitized.value))
    assert refs(value) == set(sanitized.parts)
    return restore(value, {blob_id: part.content for blob_id, part in sanitized.parts.items()})


@pytest.mark.parametrize("text", SPELLINGS.values(), ids=SPELLINGS)
def test_long_base64_round_trips_with_its_spelling(text: str) -> None:
    sanitized = sanitize({"deep": [{"data": text}]})
    assert len(json.dumps(sanitized.value)) < 400
    [part] = sanitized.parts.values()
    assert BYTES in part.content
    assert stored(sanitized) == {"deep": [{"data": text}]}


@pytest.mark.parametrize("text", NEARLY.values(), ids=NEARLY)
def test_what_could_not_be_spelled_again_stays(text: str) -> None:
    sanitized = sanitize([text])
    assert (sanitized.value, sanitized.parts) == ([text], {})


def test_a_reference_names_blob_size_and_type_and_short_base64_stays() -> None:
    image = {"type": "base64", "media_type": "image/png", "data": PLAIN}
    sanitized = sanitize({"image": image, "gemini": {"mimeType": "no type", "data": PLAIN[:400]}}, threshold=400)
    assert sanitized.value == {
        "image": {
            "type": "base64",
            "media_type": "image/png",
            "data": {REF: blob_id_of(BYTES), "originalSize": len(PLAIN), "mediaType": "image/png"},
        },
        "gemini": {"mimeType": "no type", "data": PLAIN[:400]},
    }
    assert sanitize({"mimeType": "no type", "data": PLAIN}).value["data"]["mediaType"] == "application/octet-stream"
    assert sanitize(f"data:audio/mp3;base64,{PLAIN}").value["mediaType"] == "audio/mp3"


def test_values_of_any_type_at_named_paths_become_references() -> None:
    value = {"raw": "short", "list": [{"x": {"a": [PLAIN, 1.5, "\ud83d\ude00"]}}, {"x": None}], "a/b~": {"k": 10**30}}
    sanitized = sanitize(value, paths=["/raw", "/list/*/x", "/a~1b~0", "/nowhere"])
    assert [REF in sanitized.value["raw"], REF in sanitized.value["list"][0]["x"]] == [True, True]
    assert sanitized.value["list"][1] == {"x": None}
    assert sorted(part.media_type for part in sanitized.parts.values()) == [
        "application/json",
        "application/json",
        "text/plain",
    ]
    assert stored(sanitized) == value
    assert stored(sanitize(value, paths=[""])) == value
    with pytest.raises(ValueError, match="begin with /"):
        sanitize(value, paths=["raw"])


def test_values_that_resemble_references_survive() -> None:
    value = {
        REF: "sha256:" + 64 * "0",
        f"{REF}_": {REF: {"form": 1}},
        f"{REF}__": [PLAIN],
        "originalSize": 3,
        "mediaType": "image/png",
    }
    sanitized = sanitize(value)
    assert len(sanitized.parts) == 1
    assert stored(sanitized) == value


def test_a_value_inside_itself_is_refused_and_a_repeated_value_is_not() -> None:
    twice = [PLAIN]
    assert stored(sanitize({"a": twice, "b": twice})) == {"a": twice, "b": twice}
    circle: dict[str, Any] = {"a": [1]}
    circle["a"].append(circle)
    with pytest.raises(CircularValue, match="/a/1"):
        sanitize(circle)
    with pytest.raises(CircularValue):
        sanitize({"named": circle}, paths=["/named"])


def test_depth_is_bounded_both_ways() -> None:
    def nested(depth: int) -> Any:
        value: Any = PLAIN
        for _ in range(depth):
            value = [value]
        return value

    assert stored(sanitize(nested(MAX_DEPTH))) == nested(MAX_DEPTH)
    with pytest.raises(NestedTooDeep) as refused:
        sanitize(nested(MAX_DEPTH + 1))
    assert refused.value.where == "/0" * MAX_DEPTH
    with pytest.raises(NestedTooDeep):
        restore(nested(MAX_DEPTH + 1), {})


@pytest.mark.parametrize("value", [b"bytes", (1, 2), {1: 2}, {"a": {1, 2}}, object()])
def test_what_is_not_json_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(NotStorable, match=r"value at /in/0"):
        sanitize({"in": [value]})
    with pytest.raises(NotStorable):
        sanitize([value], paths=["/0"])


@pytest.mark.parametrize(
    "reference",
    [
        {REF: 1, "originalSize": 1, "mediaType": "a/b"},
        {REF: "sha256:../../etc", "originalSize": 1, "mediaType": "a/b"},
        {REF: blob_id_of(b"x"), "mediaType": "a/b"},
        {REF: blob_id_of(b"x"), "originalSize": 1, "mediaType": "a/b", "more": 1},
        {REF: blob_id_of(b"x"), "originalSize": 1, "mediaType": "a/b"},
        {REF: blob_id_of(b"x"), "originalSize": 1, "mediaType": "a/b", "form": {"kind": "json"}},
    ],
)
def test_a_reference_that_is_none_is_refused(reference: Any) -> None:
    with pytest.raises(Malformed, match="/deep/0"):
        restore({"deep": [reference]}, {blob_id_of(b"x"): b"x"})


def test_a_blob_that_is_missing_is_named() -> None:
    with pytest.raises(BlobNotFound, match=blob_id_of(BYTES)):
        restore(sanitize([PLAIN]).value, {})


_keys = st.one_of(st.text(max_size=4), st.sampled_from([REF, f"{REF}_", "media_type", "raw"]))
_encoded = st.builds(
    lambda data, spell, head, strip: head + (spell(data).decode().rstrip("=") if strip else spell(data).decode()),
    st.binary(max_size=60),
    st.sampled_from([b64encode, urlsafe_b64encode, encodebytes]),
    st.sampled_from(["", "data:;base64,", "data:image/png;base64,", "data:x;BASE64,"]),
    st.booleans(),
)
_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=()), max_size=20),
    _encoded,
)
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3), max_leaves=12
)


@given(_values, st.integers(0, 40), st.lists(st.sampled_from(["", "/raw", "/*", "/0", "/raw/*"]), max_size=2))
def test_restore_undoes_sanitize(value: Any, threshold: int, paths: list[str]) -> None:
    before = repr(value)
    sanitized = sanitize(value, threshold=threshold, paths=paths)
    contents = {blob_id: part.content for blob_id, part in sanitized.parts.items()}
    assert repr(restore(sanitized.value, contents)) == repr(value) == before
