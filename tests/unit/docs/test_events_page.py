"""docs/reference/events.md has exactly the public events, each with its topics, its fields and a valid example."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
from msgspec import inspect

from tests.unit.docs.pages import page, quoted, rows, sections
from tokenbus.bus.dead_letters import DeadLetter
from tokenbus.bus.keys import PUBLIC_TOPICS, Keys
from tokenbus.events import decisions, public
from tokenbus.events.decisions import Decided
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.public import AudioRef, Event, ImageRef, ProviderModel, PublicEvent, Timing, UnknownEvent
from tokenbus.events.usage import Usage
from tokenbus_services.parser.logic import PublicTopics

PAGE = sections(page("reference/events.md"))
COMMON = "Every event"
OBJECTS: dict[type[msgspec.Struct], str] = {
    ImageRef: "an image",
    AudioRef: "a sound",
    ProviderModel: "a provider and a model",
    Timing: "times",
    ErrorInfo: "an error",
    Usage: "token counts",
}


def members(union: Any) -> Iterator[type[Event]]:
    for one in get_args(union):
        if get_args(one):
            yield from members(one)
        else:
            yield one


WRITTEN = [event for event in members(PublicEvent) if event is not UnknownEvent]
EVENTS: dict[str, type[Event]] = {str(event.__struct_config__.tag): event for event in WRITTEN}
BESIDE: dict[str, type[msgspec.Struct]] = {"decision": Decided, "a dead entry": DeadLetter}
STRUCTS: dict[str, type[msgspec.Struct]] = {**EVENTS, **BESIDE, **{name: cls for cls, name in OBJECTS.items()}}


def fields(cls: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    kind = inspect.type_info(cls)
    assert isinstance(kind, inspect.StructType)
    return kind.fields


def value(kind: inspect.Type) -> str:
    """What a field may hold, in the page's words."""
    match kind:
        case inspect.UnionType():
            kinds = [value(one) for one in kind.types if not isinstance(one, inspect.NoneType)]
            return " or ".join(dict.fromkeys(kinds))
        case inspect.StructType():
            name = OBJECTS[kind.cls]
            return f"[{name}](#{name.replace(' ', '-')})"
        case inspect.ListType():
            return f"list: {value(kind.item_type)}"
        case inspect.LiteralType():
            return ", ".join(f"`{one}`" for one in kind.values)
        case _:
            return {
                inspect.DictType: "object",
                inspect.BytesType: "base64",
                inspect.IntType: "whole number",
                inspect.FloatType: "number",
                inspect.BoolType: "true or false",
                inspect.StrType: "text",
            }[type(kind)]


def example(name: str) -> bytes:
    found = re.search(r"```json\n(.+)\n```", PAGE[name])
    assert found, name
    return found[1].encode()


def topics(event: PublicEvent) -> set[str]:
    """The topics on which the parser writes it."""
    return {stream.rpartition(":")[2] for stream in PublicTopics(0, Keys("p", 1), PUBLIC_TOPICS).of(event)}


def test_each_event_is_on_the_page_and_no_other() -> None:
    assert set(PAGE) == {COMMON, *STRUCTS}


def test_common_fields_of_every_event_come_first() -> None:
    assert [quoted(name) for name, *_ in rows(PAGE[COMMON])] == [
        "type",
        *(field.encode_name for field in fields(Event)),
    ]


@pytest.mark.parametrize("name", sorted(STRUCTS))
def test_the_fields_are_those_of_the_code(name: str) -> None:
    cls = STRUCTS[name]
    common = {field.encode_name for field in fields(Event)} if issubclass(cls, Event) else set[str]()
    expected = {
        field.encode_name: (value(field.type), "yes" if field.required else "")
        for field in fields(cls)
        if field.encode_name not in common
    }
    documented = {quoted(field): (kind, always) for field, kind, always, what in rows(PAGE[name]) if what}
    assert documented == expected


@pytest.mark.parametrize("name", sorted(EVENTS))
def test_the_example_is_exactly_such_an_event_on_these_topics(name: str) -> None:
    text = example(name)
    event = public.decode(text)
    assert type(event) is EVENTS[name]
    assert json.loads(public.encode(event)) == json.loads(text)
    where = re.search(r"(?m)^On (`.+?)\.", PAGE[name])
    assert where
    assert set(re.findall(r"`([a-z]+)`", where[1])) & set(PUBLIC_TOPICS) == topics(event)


def test_the_examples_of_other_messages_are_exact_too() -> None:
    decision, dead = example("decision"), example("a dead entry")
    assert json.loads(decisions.encode(decisions.decoder.decode(decision))) == json.loads(decision)
    assert json.loads(msgspec.json.encode(msgspec.json.decode(dead, type=DeadLetter))) == json.loads(dead)
