"""The JSON Schemas in the wheel are those of the code, and say what the code says of a value."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest

from tests.unit.docs.pages import ROOT
from tests.unit.docs.test_events_page import EVENTS, example
from tokenbus.events.requests import Request
from tokenbus.events.schemas import UNIONS, SchemaName, standalone, text

FILES = ROOT / "shared" / "tokenbus" / "schemas"


def file(name: SchemaName) -> dict[str, Any]:
    return json.loads((FILES / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", UNIONS)
def test_a_file_equals_the_generated_one(name: SchemaName) -> None:
    assert (FILES / f"{name}.json").read_text(encoding="utf-8") == text(name), "run make schemas"


def test_the_folder_has_no_file_that_nothing_writes() -> None:
    assert {path.name for path in FILES.iterdir()} == {f"{name}.json" for name in UNIONS}


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_of_the_events_page_is_valid_and_one_without_a_run_is_not(name: str) -> None:
    validator = jsonschema_rs.validator_for(file("events"))
    event = json.loads(example(name))
    validator.validate(event)
    del event["run"]
    assert not validator.is_valid(event)


@pytest.mark.parametrize(
    ("given", "valid"),
    [
        ({}, True),
        ({"temperature": -1}, False),
        ({"messages": []}, False),
        ({"id": "no blanks"}, False),
        ({"type": "generation"}, False),
        ({"images": {"count": 11}}, False),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, True),
    ],
)
def test_a_request_is_valid_as_the_code_says(given: dict[str, Any], valid: bool) -> None:
    base = {"type": "generate", "provider": "p", "model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    for schema in (file("requests"), standalone(Request)):
        assert jsonschema_rs.validator_for(schema).is_valid(base | given) is valid


def test_a_cancel_is_a_request_too() -> None:
    assert jsonschema_rs.validator_for(file("requests")).is_valid({"type": "cancel", "run": "umbrella"})


def test_a_schema_without_references_refers_to_nothing() -> None:
    assert "$ref" not in json.dumps(standalone(Request))
