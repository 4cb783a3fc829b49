"""What is a schema, and what it says of arguments; hostile ones of either kind included."""

from __future__ import annotations

import socket

import pytest

from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import OutputSchema, Tool
from tokenbus_services import json_schema
from tokenbus_services.json_schema import (
    MAX_ARGUMENT_DEPTH,
    MAX_PATTERNS,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    SchemaError,
    check_output,
    check_tools,
    compile_schema,
)

WEATHER: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 1}, "days": {"type": "array", "items": {"type": "integer"}}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(parameters: dict[str, object]) -> Tool:
    return Tool(name="t", parameters=parameters)


def nested(levels: int) -> dict[str, object]:
    schema: dict[str, object] = {}
    for _ in range(levels - 1):
        schema = {"not": schema}
    return schema


def doubling(levels: int) -> dict[str, object]:
    """Each level refers twice to the next: 2**levels when followed."""
    definitions: dict[str, object] = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(levels)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{levels}": {"type": "object"}}}


def test_arguments_that_meet_the_schema_have_no_problems() -> None:
    assert compile_schema(WEATHER).problems({"city": "Oslo", "days": [1, 2]}) == []
    assert compile_schema({}).problems({"anything": None}) == []


def test_each_problem_names_its_place() -> None:
    problems = compile_schema(WEATHER).problems({"days": [1, "two"], "wind": 3})
    assert sorted(problem.split(": ")[0] for problem in problems) == ["arguments", "arguments", "arguments.days[1]"]
    assert any("'wind'" in problem or '"wind"' in problem for problem in problems)
    assert any("city" in problem for problem in problems)


def test_the_text_sent_to_the_model_is_bounded() -> None:
    problems = compile_schema({"items": {}, "additionalProperties": {"type": "integer"}}).problems(
        {f"k{i}" * 500: "x" * 10_000 for i in range(50)}
    )
    assert 0 < len(problems) <= 5
    assert sum(map(len, problems)) < 5000


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "objekt"}, r"\$\.type"),
        ({"properties": []}, r"\$\.properties"),
        ({"properties": {"a": {"minimum": "3"}}}, r"\$\.properties\.a\.minimum"),
        ({"pattern": "("}, r"\$\.pattern"),
        ({"required": "city"}, r"\$\.required"),
        ({"$schema": "http://example.com/my-own"}, "meta-schema"),
        ({"$ref": "#/$defs/none"}, "does not resolve"),
        ({"$ref": "#none"}, "does not resolve"),
        ({"$ref": "#/required/x", "required": ["a"]}, "does not resolve"),
        ({"$ref": "#/type/x", "type": "object"}, "does not resolve"),
        ({"properties": {"a": {"$id": "other"}}}, r"\$id"),
    ],
)
def test_what_is_no_schema_is_refused_with_its_place(schema: dict[str, object], place: str) -> None:
    with pytest.raises(SchemaError, match=place):
        compile_schema(schema)


def test_the_error_of_a_request_names_the_tool_at_fault() -> None:
    with pytest.raises(RequestInvalid) as refused:
        check_tools([tool(WEATHER), tool({}), tool({"type": 7})])
    assert refused.value.where == "tools[2].parameters"
    check_tools([tool(WEATHER), tool({})])


@pytest.mark.parametrize(
    "schema",
    [
        {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a": {"type": "integer"}}},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": {"a": {"type": "integer"}}},
    ],
)
def test_a_schema_says_which_draft_it_follows(schema: dict[str, object]) -> None:
    (definitions,) = (key for key in schema if key != "$schema")
    compiled = compile_schema({**schema, "properties": {"x": {"$ref": f"#/{definitions}/a"}}})
    assert compiled.problems({"x": "no"})
    assert not compiled.problems({"x": 1})


@pytest.mark.parametrize("reference", ["#/$defs/a~1b%20c", "#here", "#/properties/list/items/0"])
def test_references_into_the_schema_are_followed(reference: str) -> None:
    integer = {"type": "integer"}
    schema = compile_schema(
        {
            "properties": {"x": {"$ref": reference}, "list": {"items": [integer]}},
            "$schema": "https://json-schema.org/draft/2019-09/schema",
            "$defs": {"a/b c": integer, "n": {"$anchor": "here", **integer}},
        }
    )
    assert schema.problems({"x": "no"})
    assert not schema.problems({"x": 1})


def test_no_reference_is_ever_fetched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        for reference in (f"http://127.0.0.1:{listener.getsockname()[1]}/s.json", "file:///etc/hostname", "other.json"):
            for key in ("$ref", "$dynamicRef", "$recursiveRef"):
                with pytest.raises(SchemaError, match="points outside the schema"):
                    compile_schema({"properties": {"a": {key: reference}}})
            with pytest.raises(SchemaError):
                compile_schema({"$schema": reference})
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_schema_over_a_bound_is_refused() -> None:
    with pytest.raises(SchemaError, match=str(MAX_SCHEMA_BYTES)):
        compile_schema({"description": "x" * MAX_SCHEMA_BYTES})
    compile_schema(nested(MAX_SCHEMA_DEPTH))
    with pytest.raises(SchemaError, match="nested"):
        compile_schema(nested(MAX_SCHEMA_DEPTH + 1))
    with pytest.raises(SchemaError, match="patterns"):
        compile_schema({"patternProperties": {f"^{i}$": {} for i in range(MAX_PATTERNS + 1)}})
    with pytest.raises(RequestInvalid, match="patterns"):
        check_tools([tool({"properties": {"a": {"pattern": f"^{i}"}}}) for i in range(MAX_PATTERNS + 1)])


def test_references_that_multiply_are_refused_in_every_place_of_a_schema() -> None:
    bomb = doubling(15)
    hidden = {"properties": {"definitions": {"$ref": "#/$defs/d0"}}, "$defs": bomb["$defs"]}
    for schema in (bomb, hidden):
        with pytest.raises(SchemaError, match="parts when each reference is followed"):
            compile_schema(schema)
    assert compile_schema(doubling(8)).problems({}) == []


def test_a_long_chain_of_references_is_refused_and_not_a_crash() -> None:
    chain: dict[str, object] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(4000)}
    forwards = {"$ref": "#/$defs/d0"}
    backwards = {"allOf": [{"$ref": f"#/$defs/d{i}"} for i in range(4000, 0, -1)]}
    for start in (forwards, backwards):
        with pytest.raises(SchemaError, match="deeper than"):
            compile_schema({**start, "$defs": {**chain, "d4000": {}}})


def test_a_schema_that_refers_to_itself_is_checked_all_the_way_down() -> None:
    tree = compile_schema(
        {
            "type": "object",
            "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}, "value": {"type": "integer"}},
            "allOf": [{"anyOf": [{"$ref": "#"}, {}]}],
        }
    )
    deep: dict[str, object] = {"value": 1}
    wrong: dict[str, object] = {"value": "x"}
    for _ in range(40):
        deep, wrong = {"left": deep, "right": {}}, {"right": wrong}
    assert tree.problems(deep) == []
    assert tree.problems(wrong) == ["arguments: they do not match the tool's schema"]
    assert tree.problems({"value": "x"})[0].startswith("arguments.value: ")


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf"])
def test_wrong_arguments_of_a_recursive_union_are_reported_at_once(keyword: str) -> None:
    """Naming each alternative's errors takes the validator 4**depth steps."""
    child = {"properties": {"x": {"$ref": "#/$defs/a"}}}
    schema = compile_schema({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", keyword: [child, child]}}})
    deep: object = 5
    for _ in range(MAX_ARGUMENT_DEPTH - 1):
        deep = {"x": deep}
    assert schema.problems({"x": deep}), "it returns: 4**depth steps would not"


def test_keywords_that_validate_twice_are_refused_if_they_multiply() -> None:
    schema: dict[str, object] = {"properties": {"a": {"type": "integer"}}}
    for _ in range(25):
        schema = {"anyOf": [schema], "unevaluatedProperties": False}
    with pytest.raises(SchemaError, match="parts when each reference is followed"):
        compile_schema(schema)
    once = compile_schema({"properties": {"a": {"type": "integer"}}, "unevaluatedProperties": False})
    assert once.problems({"a": 1}) == []
    assert once.problems({"b": 1})


@pytest.mark.parametrize("pattern", ["^(a+)+$", "^(?=a)(a+)+$", r"(a+a+)+y\b(?<=y)"])
def test_a_pattern_cannot_run_away(pattern: str) -> None:
    schema = compile_schema({"additionalProperties": {"pattern": pattern}})
    assert schema.problems({"k": "a" * 50_000 + "!"}), "it returns: catastrophic backtracking would not"


def test_arguments_nested_beyond_all_measure_are_a_problem_and_not_a_crash() -> None:
    schema = compile_schema({"additionalProperties": {"allOf": [{"$ref": "#"}]}, "type": "object"})
    deep: dict[str, object] = {}
    for _ in range(MAX_ARGUMENT_DEPTH - 1):
        deep = {"left": deep}
    assert schema.problems(deep) == []
    assert schema.problems({"left": deep, "right": 1}) != []
    for _ in range(100_000):
        deep = {"left": deep}
    assert schema.problems(deep) == [f"arguments: nested deeper than {MAX_ARGUMENT_DEPTH} levels"]


@pytest.mark.parametrize("schema", [{"type": "banana"}, {"pattern": "("}, {"$ref": "https://example.org/a.json"}])
def test_a_schema_of_the_answer_that_is_none_is_refused_by_name(schema: dict[str, object]) -> None:
    with pytest.raises(RequestInvalid) as caught:
        check_output(OutputSchema(schema=schema))
    assert caught.value.where == "output_schema.schema"


def test_an_answer_may_have_any_schema_or_none() -> None:
    check_output(None)
    check_output(OutputSchema(schema=WEATHER))
    check_output(OutputSchema(schema={"type": "array", "items": {"enum": [1, 2]}}))


class PanicException(BaseException):
    """As a library written in Rust raises it."""


def test_a_panic_of_the_validator_refuses_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: object, **__: object) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(json_schema, "validator_for", panic)
    with pytest.raises(RequestInvalid, match="the validator failed: index out of bounds"):
        check_tools([tool({"type": "object", "title": "panics"})])


def test_a_panic_of_the_validator_refuses_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    class Validator:
        def is_valid(self, arguments: object) -> bool:
            raise PanicException("index out of bounds")

    schema = compile_schema(WEATHER)
    monkeypatch.setattr(schema, "_validator", Validator())
    assert schema.problems({}) == ["arguments: they cannot be checked: the validator failed: index out of bounds"]
