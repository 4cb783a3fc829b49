"""The table of what each surface does with each option is true: `python -m tests.services.gateway.conformance`."""

from __future__ import annotations

import pytest

from tests.services.gateway.conformance import FIELDS, SURFACES, TABLES, ask, published
from tokenbus_services.gateway.problem import Refusal


@pytest.mark.parametrize("name", TABLES)
def test_a_published_table_is_what_the_gateway_does(name: str) -> None:
    assert published(name) == TABLES[name]()


@pytest.mark.parametrize("name", SURFACES)
def test_an_option_that_nothing_reads_is_an_error(name: str) -> None:
    where = {"forwardedProps": {"tokenbus": {"odd": 1}}} if name == "AG-UI" else {"tokenbus": {"odd": 1}}
    with pytest.raises(Refusal) as caught:
        ask(name, "openai", where)
    assert caught.value.problem.param in ("tokenbus.odd", "forwardedProps.tokenbus.odd")


def test_each_surface_is_in_the_table() -> None:
    assert {name for cells in FIELDS.values() for name in cells} == {*SURFACES}
