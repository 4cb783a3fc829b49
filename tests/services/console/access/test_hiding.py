"""Viewers without `see_content` get no text of any event."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from msgspec import inspect

from tokenbus.events.public import PublicEvent, UnknownEvent
from tokenbus.events.requests import Configure, Interrupt, SessionMessage, Withdraw
from tokenbus.events.sessions import AnySessionEvent, Configured
from tokenbus_services.console.access import hiding
from tokenbus_services.console.access.hiding import hidden, hidden_of_session

SECRET = "the secret words"
OF_SESSIONS: tuple[type[AnySessionEvent], ...] = get_args(AnySessionEvent)
EVENTS: tuple[type[msgspec.Struct], ...] = get_args(PublicEvent)
NAMES = frozenset(
    {"run", "child", "wait", "tool_id", "tool_name", "provider", "model", "response_id", "media_type", "code", "status"}
)
"""Fields with free text that count as no content."""


def filled(kind: inspect.Type, field: str = "") -> Any:
    """A value with the secret in every text that may be free."""
    match kind:
        case inspect.UnionType():
            return filled(next(one for one in kind.types if not isinstance(one, inspect.NoneType)), field)
        case inspect.StructType():
            return kind.cls(**{each.name: filled(each.type, each.encode_name) for each in kind.fields})
        case inspect.ListType():
            return [filled(kind.item_type, field)]
        case inspect.DictType():
            return {f"{SECRET} as a name": filled(kind.value_type, field)}
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.StrType():
            return "name" if field in NAMES else SECRET
        case inspect.IntType() | inspect.FloatType():
            return 7
        case inspect.BoolType():
            return True
        case _:
            return SECRET


def event_of(kind: type[msgspec.Struct]) -> Any:
    if kind is UnknownEvent:
        return UnknownEvent(run="r", seq=1, turn=0, attempt=1, event_type="newer", fields={"text": [{"a": SECRET}]})
    return filled(inspect.type_info(kind))


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_no_field_of_any_event_leaves_with_its_text(kind: type[msgspec.Struct]) -> None:
    shown = hidden(event_of(kind))
    assert SECRET not in msgspec.json.encode(shown).decode()
    assert shown["seq"]


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_an_event_shows_how_many_characters_it_hides(kind: type[msgspec.Struct]) -> None:
    whole = msgspec.json.encode(event_of(kind)).decode()
    assert (hidden(event_of(kind))["hidden"] > 0) == (SECRET in whole)


def test_every_type_of_event_has_a_list_of_what_is_shown() -> None:
    assert set(hiding.SHOWN) == {str(kind.__struct_config__.tag) for kind in EVENTS}


def test_what_is_shown_exists() -> None:
    for kind in EVENTS:
        fields = {field.encode_name for field in msgspec.structs.fields(kind)}
        assert hiding.SHOWN[str(kind.__struct_config__.tag)] <= fields


@pytest.mark.parametrize("kind", OF_SESSIONS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("item", [SessionMessage, Configure, Interrupt, Withdraw], ids=lambda item: item.__name__)
def test_no_event_of_a_session_leaves_with_what_was_said(kind: Any, item: type[msgspec.Struct]) -> None:
    fields = {each.name: filled(each.type, each.encode_name) for each in inspect.type_info(kind).fields}  # pyright: ignore
    fields |= {name: "a" for name in ("append", "run", "event_type") if name in fields}
    if "item" in fields:
        fields["item"] = item(**{f.name: filled(f.type, f.encode_name) for f in inspect.type_info(item).fields})  # pyright: ignore
        if item is Withdraw:
            fields["item"] = Withdraw(append="b")
    event = kind(**fields)
    shown = hidden_of_session(event)
    assert SECRET not in msgspec.json.encode(shown).decode()
    assert (shown["hidden"] > 0) == (SECRET in msgspec.json.encode(event).decode())
    assert shown["session_seq"] == 7


def test_of_a_configuration_provider_and_model_are_shown() -> None:
    item = Configure(request={"provider": "p", "model": "m", "system": SECRET}, when_busy="steer")
    shown = hidden_of_session(Configured(session_seq=0, at_ms=1, append="a", item=item))
    assert shown["item"] == {"type": "configure", "when_busy": "steer", "request": {"provider": "p", "model": "m"}}
    assert shown["hidden"] > len(SECRET)
