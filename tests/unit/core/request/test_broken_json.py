"""Requests that are not JSON, or not plain: the error names the place, and the run has its name."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.core.request.parse import MAX_TOKENS, decode_request, rejected_run_id, top_texts
from tokenbus.errors import Malformed, RequestInvalid

REQUEST = b'{"type":"generate","provider":"p","model":"m","messages":[{"role":"user","content":"%s"}],"id":"r"%s}'


def request(content: bytes = b"hi", more: bytes = b"") -> dict[bytes, bytes]:
    return {b"__data__": REQUEST % (content, more)}


@pytest.mark.parametrize(
    ("fields", "where", "problem"),
    [
        (request(more=b',"temperature":NaN'), "temperature", "a number that is not finite"),
        (request(more=b',"metadata":{"a":[1,-Infinity]}'), "metadata.a[1]", "a number that is not finite"),
        (request(more=b',"extra":{"x":1e999}'), "extra.x", "a number that is not finite"),
        (request(b"half \\ud83d of it"), "messages[0].content", "text with half of a surrogate pair"),
        (request(more=b',"metadata":{"\\udc00":1}'), "metadata", "a key is text with half of a surrogate pair"),
        (request(more=b',"extra":{"x":' + b"[" * 3000 + b"]" * 3000 + b"}"), "$", "nested deeper than 100 levels"),
        (request(more=b',"extra":{"x":' + b"[" * 3000), "$", "nested deeper than 100 levels"),
        (
            {b"__data__": msgspec.json.encode({"data": (REQUEST % (b"hi", b',"top_p":NaN')).decode(), "headers": {}})},
            "top_p",
            "a number that is not finite",
        ),
        (
            {b"__data__": msgspec.msgpack.encode({"type": "generate", "id": "r", "top_p": float("nan")})},
            "top_p",
            "a number that is not finite",
        ),
    ],
)
def test_what_json_does_not_have_is_named_with_its_place_and_the_run_with_its_id(
    fields: dict[bytes, bytes], where: str, problem: str
):
    with pytest.raises(RequestInvalid) as caught:
        decode_request(fields)
    assert (caught.value.where, caught.value.problem) == (where, problem)
    assert rejected_run_id(fields) == "r"


@pytest.mark.parametrize(
    "fields",
    [
        request(b"\xff\xfe"),
        request(more=b',"temperature":nope'),
        request(more=b',"stop":["a" "b"]'),
        {b"__data__": (REQUEST % (b"hi", b""))[:-1]},
        {b"__data__": b"\xef\xbb\xbf" + REQUEST % (b"hi", b"")},
    ],
)
def test_a_text_that_is_no_json_is_malformed_and_its_run_still_has_its_id(fields: dict[bytes, bytes]):
    with pytest.raises(Malformed):
        decode_request(fields)
    assert rejected_run_id(fields) == "r"


@pytest.mark.parametrize(
    "data",
    [
        b'{"type":"cancel","id":"r","run":NaN}',
        b'{"messages":[{"id":"inner"}],"x":NaN}',
        b'{"id":"no id, for it has blanks","x":NaN}',
        b'[{"id":"r"},NaN]',
        b'{"text":"never closed, "id":"r"',
        b"",
    ],
)
def test_data_without_a_run_id_gives_none(data: bytes):
    assert rejected_run_id({b"__data__": data}) is None


def test_the_last_of_two_equal_fields_counts_as_in_a_valid_request():
    assert top_texts(b'{"id":"a","x":NaN,"id":"b"}', "id") == {"id": "b"}
    assert decode_request(request(more=b',"id":"b"')).id == "b"  # pyright: ignore[reportAttributeAccessIssue]


def test_a_search_in_a_hostile_text_ends():
    assert top_texts(b'{"x":"' + b'\\"' * 500_000, "id") == {}
    assert top_texts(b'{"x":[' + b"1," * (2 * MAX_TOKENS) + b'],"id":"r"}', "id") == {}
    assert top_texts(b'"' * 500_001, "id") == {}


@given(st.binary())
def test_no_bytes_make_it_raise(data: bytes):
    top_texts(data, "id")
    rejected_run_id({b"__data__": data})
