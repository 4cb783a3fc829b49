"""Reading a client's body: what is read is of its type, and what nothing reads is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.services.gateway.rules import rules
from tokenbus_services.gateway.problem import Problem, Refusal
from tokenbus_services.gateway.surfaces.extension import extension
from tokenbus_services.gateway.surfaces.fields import Fields, json_body


def problem_of(call: Callable[[], object]) -> Problem:
    with pytest.raises(Refusal) as caught:
        call()
    return caught.value.problem


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"3", b"\xff", b'{"a":' * 100_000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    assert problem_of(lambda: json_body(body)).status == 400


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (1, Fields.text),
        ("x", Fields.flag),
        ("1", Fields.number),
        (True, Fields.number),
        (10**400, Fields.number),
        (1.5, Fields.whole),
        (-1, Fields.whole),
        ([], Fields.json),
        ({}, Fields.texts),
        ([1], Fields.texts),
        ([1], lambda fields, name: list(fields.each(name))),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_place(value: object, read: Callable[..., object]) -> None:
    problem = problem_of(lambda: read(Fields({"a": value}, "here"), "a"))
    assert (problem.param or "").startswith("here.a")


def test_a_field_that_nothing_reads_is_refused_by_its_place() -> None:
    fields = Fields({"list": [{"known": 1, "odd": 2}]})
    problem = problem_of(lambda: [each.take("known") for each in fields.each("list")])
    assert (problem.param, problem.code) == ("list[0].odd", "unsupported_parameter")


def test_null_is_as_good_as_absent() -> None:
    fields = Fields({"a": None})
    assert fields.text("a") is None
    fields.end()


def test_an_operator_may_have_unsupported_fields_dropped() -> None:
    fields = Fields({"list": [{"odd": 2}], "n": 3}, drop=["list.odd", "n"])
    assert [each.has("other") for each in fields.each("list")] == [False]
    fields.only("n", 1)
    fields.end()


def test_a_value_that_changes_nothing_passes_and_another_is_refused() -> None:
    Fields({"n": 1}).only("n", 1)
    assert problem_of(lambda: Fields({"n": True}).only("n", 1)).param == "n"


def test_the_body_and_the_headers_say_what_is_asked_of_the_bus() -> None:
    headers = {"x-tokenbus-policies": "a, b", "x-tokenbus-visible": "false", "x-tokenbus-max-tool-depth": "3"}
    read = extension(Fields({"tokenbus": {"policies": ["c"], "deadline_s": 2}}), headers, rules())
    assert (read.policies, read.visible, read.max_tool_depth, read.deadline_s) == (["c"], False, 3, 2)
    assert read.generate == {"policies": ["c"], "visible": False, "deadline_s": 2}


@pytest.mark.parametrize(
    ("extra", "headers", "param"),
    [
        ({"tools": ["shell"]}, {}, "tokenbus.tools[0]"),
        ({"extra": {"a": 1}}, {}, "tokenbus.extra.a"),
        ({"deadline_s": 0}, {}, "tokenbus.deadline_s"),
        ({"on_failure": "explode"}, {}, "tokenbus.on_failure"),
        ({"odd": 1}, {}, "tokenbus.odd"),
        ({}, {"x-tokenbus-record": "yes"}, "x-tokenbus-record"),
        ({}, {"x-tokenbus-deadline-s": "nan"}, "x-tokenbus-deadline-s"),
    ],
)
def test_what_is_not_allowed_or_not_known_is_refused(
    extra: dict[str, Any], headers: dict[str, str], param: str
) -> None:
    assert problem_of(lambda: extension(Fields({"tokenbus": extra}), headers, rules())).param == param


def test_what_the_key_allows_is_taken() -> None:
    allowed = rules(tools=frozenset({"weather"}), allow_extra=frozenset({"top_k"}))
    read = extension(Fields({"tokenbus": {"tools": ["weather"], "extra": {"top_k": 4}}}), {}, allowed)
    assert ([tool.name for tool in read.tools], read.extra) == (["weather"], {"top_k": 4})
