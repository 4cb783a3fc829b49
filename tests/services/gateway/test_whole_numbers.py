"""Whole numbers in texts of clients: one that no program can mean is refused like any other wrong value."""

from __future__ import annotations

import pytest

from tokenbus_services.gateway.problem import Refusal
from tokenbus_services.gateway.routes.run_list import RunQuery
from tokenbus_services.gateway.surfaces.fields import is_whole
from tokenbus_services.gateway.surfaces.gemini.request import json_schema
from tokenbus_services.gateway.surfaces.openai_responses.listing import listed

WRONG = ["9" * 5000, "²", "", "-1", "1.0"]


@pytest.mark.parametrize("text", WRONG)
def test_a_text_that_int_does_not_read_is_no_whole_number(text: str) -> None:
    assert not is_whole(text)
    with pytest.raises(Refusal):
        RunQuery.of([("limit", text)])
    with pytest.raises(Refusal):
        listed([], {"limit": text})
    assert json_schema({"maxLength": text}, "schema") == {"maxLength": text}, "what reads the schema refuses it"


def test_a_whole_number_is_read() -> None:
    assert is_whole("007")
    assert RunQuery.of([("limit", "7")]).limit == 7
    assert json_schema({"maxLength": "7"}, "schema") == {"maxLength": 7}
