"""What the inbound stream may carry, and that nothing it carries ends in anything but a request or a named error."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from faststream.redis.parser import BinaryMessageFormatV1
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.core.request.parse import decode_request, rejected_run_id
from tokenbus.errors import Malformed, RequestInvalid, RequestTooLarge
from tokenbus.events.requests import Append, Cancel, Generate, Request, WaitDecision

GENERATE: dict[str, Any] = {
    "type": "generate",
    "id": "run-1",
    "provider": "anthropic",
    "model": "m",
    "messages": [{"role": "user", "content": "Zdravím, 世界"}],
    "metadata": {"call": 7, "nested": [1.5, None, True]},
}
CANCEL = {"type": "cancel", "run": "run-1", "reason": "barge-in", "heard_through": 41}


def entry(data: bytes) -> dict[bytes, bytes]:
    return {b"__data__": data}


def json_of(**changes: object) -> dict[bytes, bytes]:
    return entry(msgspec.json.encode({**GENERATE, **changes}))


async def faststream(message: Any, headers: dict[str, Any] | None = None) -> bytes:
    return await BinaryMessageFormatV1.encode(message=message, reply_to=None, headers=headers, correlation_id="c")


def legacy_envelope(body: str) -> bytes:
    return msgspec.json.encode({"data": body, "headers": {"correlation_id": "c", "content-type": "application/json"}})


async def every_form(request: dict[str, Any]) -> list[bytes]:
    json, msgpack = msgspec.json.encode(request), msgspec.msgpack.encode(request)
    return [
        json,
        b" \r\n\t" + json,
        msgpack,
        await faststream(request),
        await faststream(request, headers={"x-trace": "abc", "reply": "1"}),
        await faststream(msgpack),
        await faststream(json.decode()),
        legacy_envelope(json.decode()),
    ]


async def test_every_form_of_a_generate_request_reads_the_same():
    for data in await every_form(GENERATE):
        request = decode_request(entry(data))
        assert request == msgspec.convert(GENERATE, Generate)


async def test_every_form_of_a_cancel_reads_the_same():
    for data in await every_form(CANCEL):
        assert decode_request(entry(data)) == Cancel(run="run-1", reason="barge-in", heard_through=41)


async def test_a_faststream_message_gives_what_faststreams_own_parser_gives():
    for data in await every_form(GENERATE):
        if data.startswith((b"\x89BIN", b'{"data"')):
            body, _ = BinaryMessageFormatV1.parse(data)
            assert decode_request(entry(body)) == decode_request(entry(data))


def test_a_request_with_media_named_data_is_not_taken_for_an_envelope():
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    request = decode_request(json_of(messages=[{"role": "user", "content": [{"type": "image", "source": source}]}]))
    assert isinstance(request, Generate)


def test_unknown_fields_are_ignored_at_every_level_and_in_the_entry():
    fields = json_of(future=1, messages=[{"role": "user", "content": "x", "future": {}}]) | {b"other": b"y"}
    assert isinstance(decode_request(fields), Generate)


@pytest.mark.parametrize(
    ("changes", "where", "problem"),
    [
        ({"type": "generat"}, "type", "unknown 'generat': did you mean 'generate'"),
        ({"type": None}, "type", "Expected `str`"),
        ({"type": "x - at `$.a`"}, "type", "unknown 'x - at"),
        ({"model": None}, "model", "Expected `str`, got `null`"),
        ({"model": ""}, "model", "length >= 1"),
        ({"id": "a b"}, "id", "matching regex"),
        ({"id": "a\n"}, "id", "matching regex"),
        ({"id": "x" * 129}, "id", "length <= 128"),
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": {}}, "messages", "Expected `array`, got `object`"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "Expected `str | array`"),
        (
            {"messages": [{"role": "boss", "content": "x"}]},
            "messages[0].role",
            "unknown 'boss': must be one of 'assistant', 'system', 'tool', 'user'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "no"}]}]}, "messages[0].content[0].type", "'no'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "`text`"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"max_tokens": 1.5}, "max_tokens", "got `float`"),
        ({"max_tokens": 2**70}, "max_tokens", "more than 64 bits"),
        ({"temperature": "hot"}, "temperature", "got `str`"),
        ({"top_p": 1.1}, "top_p", "<= 1"),
        ({"stop": [""]}, "stop[0]", "length >= 1"),
        ({"extra": {"a": [0, 2**64]}}, "extra.a[1]", "more than 64 bits"),
        ({"extra": []}, "extra", "Expected `object | null`"),
    ],
)
def test_what_is_wrong_is_named_with_its_path(changes: dict[str, Any], where: str, problem: str):
    with pytest.raises(RequestInvalid) as caught:
        decode_request(json_of(**changes))
    assert caught.value.where == where
    assert problem in caught.value.problem


def test_a_missing_field_is_named():
    with pytest.raises(RequestInvalid, match="missing required field `model`"):
        decode_request(entry(b'{"type":"generate","provider":"p","messages":[{"role":"user","content":"x"}]}'))


@pytest.mark.parametrize("data", [b"[]", b"5", b'"generate"', b"null", b'[{"type":"generate"}]'])
def test_json_other_than_an_object_is_a_wrong_type_at_the_top_level(data: bytes):
    with pytest.raises(RequestInvalid) as caught:
        decode_request(entry(data))
    assert caught.value.where == "$"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b'{"type":',
        b'{"type":"generate"}}',
        b'{"a":"\xff"}',
        b'{"a":' + b"9" * 5000 + b"}",
        b"\x81",
        b"\x81\xa1\xff\x01",
        b"\xdf\x7f\xff\xff\xff",
        b"\x80\x80",
        b"\x89BIN\r\n\x1a\n",
        b"\x89BIN\r\n\x1a\n\x00\x02\x00\x00\x00\x12\x00\x00\x00\x14\x00\x00{}",
        b"\x89BIN\r\n\x1a\n\x00\x01\x00\x00\x00\x12\xff\xff\xff\xff\x00\x00{}",
        b"\x89BIN\r\n\x1a\n\x00\x01\x00\x00\x00\x12\x00\x00\x00\x00\x00\x00{}",
    ],
)
def test_bytes_in_no_known_form_are_malformed(data: bytes):
    with pytest.raises(Malformed):
        decode_request(entry(data))
    assert rejected_run_id(entry(data)) is None


def test_the_error_for_a_missing_field_says_what_was_expected_and_found():
    with pytest.raises(Malformed, match=r"fields are data, x; expected __data__"):
        decode_request({b"data": b"{}", b"x": b"1"})


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (math.nan, "not finite"),
        (-math.inf, "not finite"),
        (b"bytes", "type bytes"),
        (datetime(2026, 1, 1, tzinfo=UTC), "type datetime"),
        (msgspec.msgpack.Ext(5, b"x"), "type Ext"),
        ({1: 2}, "a key is int"),
    ],
)
def test_msgpack_that_json_could_not_carry_is_refused(value: object, problem: str):
    with pytest.raises(RequestInvalid) as caught:
        decode_request(entry(msgspec.msgpack.encode({**GENERATE, "metadata": {"a": [value]}})))
    assert caught.value.where == "metadata.a[0]"
    assert problem in caught.value.problem


@pytest.mark.parametrize("levels", [101, 2_000, 1_000_000])
def test_hostile_nesting_is_refused_in_json_and_msgpack(levels: int):
    head = msgspec.json.encode(GENERATE)[:-1] + b',"extra":{"a":'
    packed = msgspec.msgpack.encode({**GENERATE, "extra": 0})
    for data in (head + b"[" * levels + b"]" * levels + b"}}", packed[:-1] + b"\x91" * levels + b"\xc0"):
        with pytest.raises(RequestInvalid, match="nested deeper than 100 levels"):
            decode_request(entry(data))


def test_the_size_limit_is_in_bytes_of_the_value():
    data = json_of()[b"__data__"]
    assert decode_request(entry(data), limit=len(data))
    with pytest.raises(RequestTooLarge) as caught:
        decode_request(entry(data), limit=len(data) - 1)
    assert (caught.value.size, caught.value.limit) == (len(data), len(data) - 1)


@given(st.binary(max_size=200) | st.binary(max_size=40).map(lambda tail: b"\x89BIN\r\n\x1a\n\x00\x01" + tail))
def test_any_bytes_give_a_request_or_a_named_error(data: bytes):
    try:
        decode_request(entry(data))
    except (Malformed, RequestInvalid):
        rejected_run_id(entry(data))


def outcome_of(data: bytes) -> Request | RequestInvalid:
    try:
        return decode_request(entry(data))
    except RequestInvalid as e:
        return e


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["user", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4) | st.sampled_from(["type", "role", "content"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.sampled_from(list(Generate.__struct_fields__)), ANY_JSON)
def test_any_value_in_any_field_gives_a_request_or_a_named_error(field: str, value: object):
    for encode in (msgspec.json.encode, msgspec.msgpack.encode):
        try:
            data = encode({**GENERATE, field: value})
        except (OverflowError, UnicodeEncodeError):
            continue
        outcome = outcome_of(data)
        assert not isinstance(outcome, Append | Cancel | WaitDecision)
        assert isinstance(outcome, Generate) or outcome.where == "$" or outcome.where.startswith(field)


async def test_the_id_of_a_refused_request_is_read_if_possible():
    broken = {**GENERATE, "model": 5}
    for data in await every_form(broken):
        assert rejected_run_id(entry(data)) == "run-1"


@pytest.mark.parametrize("bad_id", [None, 5, "", "a b", "x" * 129, "a\n", ["a"]])
def test_an_id_that_is_none_ends_no_run(bad_id: object):
    assert rejected_run_id(json_of(id=bad_id, model=5)) is None


def test_a_refused_cancel_ends_no_run():
    assert rejected_run_id(entry(msgspec.json.encode({"type": "cancel", "run": "a", "id": "a", "reason": 5}))) is None


def test_the_id_of_an_oversized_request_can_be_read():
    fields = json_of(system="x" * 100_000)
    with pytest.raises(RequestTooLarge):
        decode_request(fields, limit=1000)
    assert rejected_run_id(fields) == "run-1"
