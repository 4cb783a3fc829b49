"""Reading a client's body: what is read is of its type, and what nothing reads is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.services.gateway.rules import gateway_request, rules
from tokenbus.events.requests import Message
from tokenbus_services.gateway.problem import Problem, Refusal
from tokenbus_services.gateway.surfaces.contract import Translated, TranslationRules
from tokenbus_services.gateway.surfaces.fields import Fields, Reading, json_body
from tokenbus_services.gateway.surfaces.surface import SurfaceRequest


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
    fields = Fields({"list": [{"odd": 2}], "n": 3}, reading=Reading(["list.odd", "n"]))
    assert [each.has("other") for each in fields.each("list")] == [False]
    fields.only("n", 1)
    fields.end()
    assert [*fields.reading.left_out] == ["list.odd", "n"]


def test_an_object_inside_that_nothing_has_read_is_refused_with_the_whole() -> None:
    fields = Fields({"inside": {"deep": {"odd": 1}}})
    inside = fields.fields("inside")
    assert inside
    assert inside.fields("deep")
    assert problem_of(fields.end).param == "inside.deep.odd"


def test_a_value_that_changes_nothing_passes_and_another_is_refused() -> None:
    Fields({"n": 1}).only("n", 1)
    assert problem_of(lambda: Fields({"n": True}).only("n", 1)).param == "n"


def asked(options: dict[str, Any], headers: dict[str, str], allowed: TranslationRules) -> Translated:
    """A request with these options of the bus, on a surface without any of its own."""
    body = Fields({"tokenbus": options})
    ask = SurfaceRequest(gateway_request({}, headers=headers), allowed, body, model="gemini/m", stream=False)
    return ask.translated({"messages": [Message(role="user", content="Hi")]})


def test_the_body_and_the_headers_say_what_is_asked_of_the_bus() -> None:
    headers = {"x-tokenbus-policies": "a, b", "x-tokenbus-visible": "false", "x-tokenbus-max-tool-depth": "3"}
    read = asked({"policies": ["c"], "deadline_s": 2, "tools": ["weather"]}, headers, rules(tools=None)).generate
    assert (read.policies, read.visible, read.max_tool_depth, read.deadline_s) == (["c"], False, 3, 2)


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
    assert problem_of(lambda: asked(extra, headers, rules())).param == param


def test_what_the_key_allows_is_taken() -> None:
    allowed = rules(tools=frozenset({"weather"}), allow_extra=frozenset({"top_k"}))
    read = asked({"tools": ["weather"], "extra": {"top_k": 4}}, {}, allowed).generate
    assert ([tool.name for tool in read.tools], read.extra) == (["weather"], {"top_k": 4})
