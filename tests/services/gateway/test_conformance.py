"""The table of what each surface does with each option is true: `python -m tests.services.gateway.conformance`."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import msgspec
import pytest

from tests.services.gateway.conformance import FIELDS, SURFACES, TABLES, ask, published
from tests.services.gateway.rules import APIS
from tokenbus.core.request.validate import all_choices, check_request
from tokenbus.providers import registry
from tokenbus.providers.api import Quirks
from tokenbus_services.gateway.models import RoutedModel
from tokenbus_services.gateway.problem import Problem, Refusal


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


PAIRS = {f"{one}-{other}": [RoutedModel(one, "m"), RoutedModel(other, "m")] for one, other in permutations(APIS, 2)}


@pytest.mark.parametrize("name", [name for name in SURFACES if name != "Images"])
def test_an_option_that_an_alias_takes_is_taken_by_each_of_its_providers(name: str) -> None:
    """Nothing fails at intake or in a fallback for a field that the surface took, or made."""
    taken = 0
    for field, of_surface in FIELDS.items():
        for alias in PAIRS if name in of_surface else ():
            try:
                generate = ask(name, alias, of_surface[name], aliases=PAIRS).generate
            except Refusal:
                continue
            taken += 1
            check_request(generate)
            for one in all_choices(generate):
                assert registry.get(APIS[one.provider]).build(one, [], Quirks()).call.body, (field, alias)
    assert taken >= len(PAIRS)


WORDS: dict[int, tuple[str, str, str]] = {
    400: ("invalid_request_error", "invalid_request_error", "INVALID_ARGUMENT"),
    401: ("authentication_error", "authentication_error", "UNAUTHENTICATED"),
    402: ("insufficient_quota", "billing_error", "FAILED_PRECONDITION"),
    403: ("permission_error", "permission_error", "PERMISSION_DENIED"),
    413: ("invalid_request_error", "request_too_large", "INVALID_ARGUMENT"),
    429: ("rate_limit_error", "rate_limit_error", "RESOURCE_EXHAUSTED"),
}
"""What each status is called: by OpenAI, Anthropic and Google."""


@pytest.mark.parametrize("status", WORDS)
def test_one_cause_has_one_name_on_each_surface_in_the_words_of_its_protocol(status: int) -> None:
    problem = Problem(status=status, code="the_code", message="why", kind="invalid_request")
    of_openai, of_anthropic, of_google = WORDS[status]

    def error(name: str) -> Any:
        answer = SURFACES[name][0].refusal(problem)
        assert answer.status == status
        return msgspec.json.decode(answer.body)["error"]

    for name in ("Chat", "Responses", "Images"):
        assert (error(name)["type"], error(name)["code"]) == (of_openai, "the_code")
    assert (error("Messages")["type"], error("Messages")["code"]) == (of_anthropic, "the_code")
    assert (error("Gemini")["status"], error("Gemini")["details"][0]["reason"]) == (of_google, "the_code")
