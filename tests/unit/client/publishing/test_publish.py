"""A request is checked by the client as intake will check it, and errors keep it whole."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from tokenbus.client.publishing import carrying, encoded, with_id
from tokenbus.core.request.parse import decode_request
from tokenbus.errors import RequestInvalid, RequestTooLarge
from tokenbus.events.requests import Cancel, Generate, Message

REQUEST = Generate(provider="p", model="m", messages=[Message(role="user", content="Hi")])
PLAIN: dict[str, Any] = {"provider": "p", "model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def new_id() -> str:
    return "new"


@pytest.mark.parametrize("request_", [REQUEST, PLAIN, {**PLAIN, "type": "generate", "id": None}])
def test_a_request_without_an_id_is_given_one(request_: Generate | dict[str, object]):
    run, with_its_id = with_id(request_, new_id)
    sent = decode_request({b"__data__": encoded(with_its_id, limit=1000)})
    assert (run, sent) == ("new", msgspec.structs.replace(REQUEST, id="new"))


def test_a_request_that_is_no_mapping_is_refused():
    anything: Any = 3
    with pytest.raises(RequestInvalid, match="a mapping, got `int`"):
        with_id(anything, new_id)


@pytest.mark.parametrize("request_", [msgspec.structs.replace(REQUEST, id="mine"), {**PLAIN, "id": "mine"}])
def test_a_request_with_an_id_keeps_it(request_: Generate | dict[str, object]):
    run, with_its_id = with_id(request_, new_id)
    assert run == "mine"
    assert decode_request({b"__data__": encoded(with_its_id, limit=1000)}) == msgspec.structs.replace(
        REQUEST, id="mine"
    )


def test_the_callers_own_request_is_left_as_it_is():
    plain = dict(PLAIN)
    with_id(plain, new_id)
    assert plain == PLAIN


def test_structs_inside_a_mapping_are_taken():
    data = encoded({**PLAIN, "type": "generate", "messages": [Message(role="user", content="Hi")]}, limit=1000)
    assert decode_request({b"__data__": data}) == REQUEST


def test_an_unknown_field_is_refused_with_the_name_that_was_probably_meant():
    with pytest.raises(RequestInvalid, match=r"max_token: .*did you mean 'max_tokens'\?") as caught:
        encoded({**PLAIN, "type": "generate", "max_token": 1}, limit=1000)
    assert caught.value.where == "max_token"


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"type": "generat"}, "type"),
        ({"id": "a b"}, "id"),
        ({"metadata": {"at": datetime(2026, 1, 1, tzinfo=UTC)}}, "metadata.at"),
        ({"metadata": {"price": Decimal(1)}}, "metadata.price"),
        ({"metadata": {"blob": b"x"}}, "metadata.blob"),
        ({"metadata": {"x": float("nan")}}, "metadata.x"),
        ({"metadata": {"x": "\ud800"}}, "metadata.x"),
        ({"metadata": {1: 2}}, "metadata"),
        ({"metadata": {"x": object()}}, "$"),
        ({"metadata": {"x": endless()}}, "$"),
        ({"metadata": {"x": nested(200)}}, "metadata.x" + "[0]" * 99),
        ({"tool_choice": {"name": "none"}}, "tool_choice.name"),
    ],
)
def test_what_intake_would_refuse_is_refused_before_it_is_sent(changes: dict[str, Any], where: str):
    with pytest.raises(RequestInvalid) as caught:
        encoded({**PLAIN, "type": "generate", **changes}, limit=10_000)
    assert caught.value.where == where


def test_a_struct_with_fields_of_the_wrong_type_is_refused():
    wrong: Any = 5
    with pytest.raises(RequestInvalid) as caught:
        encoded(msgspec.structs.replace(REQUEST, model=wrong), limit=1000)
    assert caught.value.where == "model"


def test_an_id_that_is_no_text_is_refused():
    with pytest.raises(RequestInvalid) as caught:
        with_id({**PLAIN, "id": 5}, new_id)
    assert caught.value.where == "id"


def test_a_cancel_is_no_request_to_publish():
    with pytest.raises(RequestInvalid, match=r"Client\.cancel"):
        with_id({"type": "cancel", "run": "a"}, new_id)


def test_the_size_limit_is_in_bytes_of_the_json():
    size = len(encoded(REQUEST, limit=1000))
    assert encoded(REQUEST, limit=size)
    with pytest.raises(RequestTooLarge) as caught:
        encoded(REQUEST, limit=size - 1)
    assert (caught.value.size, caught.value.limit) == (size, size - 1)


def test_an_error_carries_the_request_with_its_id():
    run, request = with_id({**PLAIN, "model": None}, new_id)
    with pytest.raises(RequestInvalid) as caught, carrying(request):
        encoded(request, limit=1000)
    assert caught.value.request == {"type": "generate", **PLAIN, "model": None, "id": run}


def test_a_cancel_is_encoded_and_checked_like_a_request():
    assert encoded(Cancel(run="a", heard_through=3), limit=100) == b'{"type":"cancel","run":"a","heard_through":3}'
    with pytest.raises(RequestInvalid) as caught:
        encoded(Cancel(run="a", heard_through=-2), limit=100)
    assert caught.value.where == "heard_through"
