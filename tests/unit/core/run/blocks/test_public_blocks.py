"""The rules of a public block, which the run, its gate and the policies' writer share."""

from __future__ import annotations

import json

import msgspec
import pytest

from tokenbus.core.run.blocks.public_blocks import (
    CALL_CUT,
    LONG_ARGUMENTS,
    NOT_PACKABLE,
    changed_fields,
    content_fields,
    first_void,
    fitting_finish,
    parse_arguments,
    write_result,
)
from tokenbus.core.run.outbox import Outbox
from tokenbus.events.normalized import FinishReason
from tokenbus.events.public import BlockComplete, BlockStarted, Chunk, decode, encode

END = BlockComplete(
    run="r", seq=0, turn=0, attempt=1, block=0, kind="text", content="said", signature="s", opaque={"o": "v"}
)
CALL = msgspec.structs.replace(END, kind="tool_call", content=None, arguments='{"a":1}', input={"a": 1})


def test_a_call_ends_with_its_arguments_as_an_object_or_with_what_is_wrong_with_them() -> None:
    assert content_fields("tool_call", '{"a":1}') == {"arguments": '{"a":1}', "input": {"a": 1}, "input_error": None}
    assert content_fields("tool_call", "")["input"] == {}
    assert "not a JSON object" in content_fields("tool_call", "[1]")["input_error"]
    assert content_fields("tool_call", "{}", problem="no name")["input_error"] == "no name"


@pytest.mark.parametrize("number", [2**64 - 1, -(2**63), 2**64, -(2**63) - 1, 10**40])
@pytest.mark.parametrize("as_json", [True, False])
def test_any_number_in_a_call_can_be_sent_and_none_changes(number: int, as_json: bool) -> None:
    arguments = json.dumps({"n": [{"of": number}]})
    fields = content_fields("tool_call", arguments, as_json=as_json)
    if as_json:
        assert msgspec.json.decode(msgspec.json.encode(fields))["input"] == json.loads(arguments)
        return
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(fields))
    assert again["arguments"] == arguments
    if -(2**63) <= number < 2**64:
        assert again["input"] == json.loads(arguments)
    else:
        assert (again["input"], again["input_error"]) == (None, NOT_PACKABLE)


def test_a_call_that_was_cut_has_no_input() -> None:
    assert content_fields("tool_call", "{}", cut=True) == {"arguments": "{}", "input": None, "input_error": CALL_CUT}


def test_an_end_whose_content_went_out_as_it_is_is_not_changed() -> None:
    assert changed_fields(END, "text", "said") == {}
    assert changed_fields(CALL, "tool_call", '{"a":1}') == {}


def test_the_signature_of_a_block_is_dropped_if_its_content_was_changed() -> None:
    changed = msgspec.structs.replace(END, **changed_fields(END, "text", "masked"))
    assert (changed.content, changed.signature, changed.opaque) == ("masked", None, None)
    called = msgspec.structs.replace(CALL, **changed_fields(CALL, "tool_call", '{"b":2}'))
    assert (called.arguments, called.input, called.signature) == ('{"b":2}', {"b": 2}, None)


def test_the_arguments_of_a_cut_call_are_not_read_though_they_were_changed() -> None:
    cut = msgspec.structs.replace(CALL, cut=True, input=None, input_error=CALL_CUT)
    changed = msgspec.structs.replace(cut, **changed_fields(cut, "tool_call", "{}"))
    assert (changed.arguments, changed.input, changed.input_error, changed.signature) == ("{}", None, CALL_CUT, None)


def test_the_first_void_block_is_the_lowest_of_those_that_were_void_before_the_writer() -> None:
    assert first_void([(0, 0), (2, 1), (3, 2)], 2, 3) == 1
    assert first_void([(0, 0), (2, 1)], 5, 2) == 2


@pytest.mark.parametrize(
    ("finish", "calls", "fits"),
    [("stop", True, "tool_use"), ("tool_use", False, "stop"), ("stop", False, "stop"), ("length", True, "length")],
)
def test_a_turn_finishes_for_its_calls_if_it_has_any(finish: FinishReason, calls: bool, fits: FinishReason) -> None:
    assert fitting_finish(finish, calls=calls) == fits


def test_a_result_is_a_block_from_its_beginning_to_its_end() -> None:
    out = Outbox()
    write_result(out, 1, 2, 7, tool_id="id", tool_name="add", content="3", is_error=False)
    begin, chunk, end = out.number("r", 0)
    assert isinstance(begin, BlockStarted)
    assert isinstance(chunk, Chunk)
    assert isinstance(end, BlockComplete)
    assert {event.block for event in (begin, chunk, end)} == {7}
    assert (chunk.text, end.content, end.is_error) == ("3", "3", None)


LONG = LONG_ARGUMENTS * "x"


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        '{"a":1}',
        json.dumps({"a": "LONG", "b": [1, 2.5, None, {"c": "é\n\t\U0001f600"}]}, indent="\t"),
        '{"a":"LONG","b":"no exponent: 1e999, deadbeef0001"}',
        '{"a":"LONG","b":1e300,"a":2}\r\n',
        '{"a":"LONG","b":DIGITS}',
        '{"a":"LONG","b":DIGITS.5}',
        '{"a":"LONG","b":1E+400}',
        '{"a":"LONG","b":FEWERe99}',
        '["LONG"]',
        '{"a":"LONG"',
        '{"a":"LONG","b":"\\ud800"}',
        '{"a":"LONG","b":NESTED}',
        '{"a":"LONG\ud800"}',
    ],
    ids=str.__len__,
)
def test_long_arguments_of_an_event_that_is_only_json_are_the_same_object(arguments: str) -> None:
    arguments = arguments.replace("LONG", LONG).replace("DIGITS", "9" * 400).replace("FEWER", "9" * 250)
    arguments = arguments.replace("NESTED", "[" * 3000 + "]" * 3000)
    built = dict(zip(("input", "input_error"), parse_arguments(arguments), strict=True))
    checked = content_fields("tool_call", arguments, as_json=True)
    assert (checked["input_error"] is None) == (built["input_error"] is None)
    if "\ud800" not in arguments:
        ends = [msgspec.structs.replace(CALL, **fields) for fields in (built, checked)]
        assert b"\n" not in encode(ends[1])
        assert decode(encode(ends[1])).input == decode(encode(ends[0])).input  # pyright: ignore[reportAttributeAccessIssue]


def test_long_arguments_are_not_built_for_json_and_are_for_drafts() -> None:
    arguments = json.dumps({"a": LONG, "b": {"c": [1, 2]}})
    assert isinstance(content_fields("tool_call", arguments, as_json=True)["input"], msgspec.Raw)
    assert content_fields("tool_call", arguments)["input"] == json.loads(arguments)
