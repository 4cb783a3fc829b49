"""What of a request this version does not know: fields with a name, and words in place of others. Pure.

Whoever writes a request with this version hears of a misspelt name before it is sent. Intake must bear requests of
newer versions: there a field that is not known is only noted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import cast

import msgspec

from tokenbus.core.nearest_name import nearest, unknown_name
from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import Request

MAX_NOTES = 16
"""Most fields of one request of which it is noted that they are not known."""
_FEW = 8
"""So many names are told where none is close."""
_NAME_CHARS = 64


class UnknownField(msgspec.Struct, frozen=True):
    """A field that nothing reads."""

    where: str
    """The object that holds it; empty: the request."""
    name: str
    known: tuple[str, ...]
    """The fields that there are."""

    @property
    def path(self) -> str:
        """Its place in the request."""
        return _at(self.where, self.name[:_NAME_CHARS])

    @property
    def problem(self) -> str:
        """What is wrong with it, and what was probably meant."""
        if close := nearest(self.name, self.known):
            return f"there is no such field; did you mean {close!r}?"
        if len(self.known) <= _FEW:
            return f"there is no such field, only {', '.join(map(repr, self.known))}"
        return "there is no such field"


class _Shape(msgspec.Struct):
    """What may stand in one place of a request, as far as names go: an object, one of several by their tag, a list, a
    word."""

    fields: dict[str, _Shape | None] | None = None
    """Of an object; None: its members are the caller's own."""
    tag_field: str = ""
    by_tag: dict[str, _Shape] = {}
    items: _Shape | None = None
    words: tuple[str, ...] | None = None
    """None: any text."""


def unknown_fields(value: object) -> Iterator[UnknownField]:
    """The fields of a plain request that this version does not know, in order.

    Raises RequestInvalid for a text that must be one of a few and is none of them.
    """
    return _walk(value, _request(), "")


def check_known(value: object) -> None:
    """Raises RequestInvalid for the first field or word of a plain request that this version does not know."""
    for field in unknown_fields(value):
        raise RequestInvalid(field.path, field.problem)


def notes_of(value: object) -> list[str]:
    """A sentence for each field that has no effect here, `MAX_NOTES` at the most. Raises as `unknown_fields`."""
    notes: list[str] = []
    for field in unknown_fields(value):  # to the end: a word that is none is an error wherever it stands
        if len(notes) < MAX_NOTES:
            notes.append(f"{field.path} has no effect: {field.problem}")
    return notes


def _walk(value: object, shape: _Shape, where: str) -> Iterator[UnknownField]:
    match value:
        case str() if shape.words is not None and value not in shape.words:
            raise RequestInvalid(where or "$", unknown_name(value[:_NAME_CHARS], shape.words))
        case dict():
            yield from _members(cast("Mapping[str, object]", value), shape, where)
        case list() | tuple() if shape.items is not None:
            for i, item in enumerate(cast("list[object]", value)):
                yield from _walk(item, shape.items, f"{where}[{i}]")
        case _:
            pass


def _members(value: Mapping[str, object], shape: _Shape, where: str) -> Iterator[UnknownField]:
    if shape.tag_field:
        tag = value.get(shape.tag_field)
        if not isinstance(tag, str):
            return  # what is wrong with it, its conversion says
        if tag not in shape.by_tag:
            raise RequestInvalid(_at(where, shape.tag_field), unknown_name(tag[:_NAME_CHARS], shape.by_tag))
        shape = shape.by_tag[tag]
    if shape.fields is None:
        return
    for name, inner in value.items():
        if name not in shape.fields:
            yield UnknownField(where, name, tuple(shape.fields))
        elif of_field := shape.fields[name]:
            yield from _walk(inner, of_field, _at(where, name))


def _at(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


@cache
def _request() -> _Shape:
    from msgspec import inspect  # only where a request is written or taken in

    made: dict[type, _Shape] = {}

    def of(kind: inspect.Type) -> _Shape | None:
        """None where nothing of it is a name of ours."""
        match kind:
            case inspect.StructType():
                return of_struct(kind)
            case inspect.UnionType():
                return of_union(kind)
            case inspect.ListType() | inspect.VarTupleType():
                items = of(kind.item_type)
                return _Shape(items=items) if items else None
            case inspect.LiteralType():
                return _Shape(words=tuple(str(word) for word in kind.values))
            case _:
                return None

    def of_struct(kind: inspect.StructType) -> _Shape:
        if kind.cls not in made:
            shape = made[kind.cls] = _Shape(fields={})
            fields = {kind.tag_field: None} if kind.tag_field else {}
            shape.fields = {**fields, **{field.encode_name: of(field.type) for field in kind.fields}}
        return made[kind.cls]

    def of_union(kind: inspect.UnionType) -> _Shape | None:
        shape = _Shape()
        structs = [one for one in kind.types if isinstance(one, inspect.StructType)]
        for one in kind.types:
            if isinstance(one, inspect.ListType | inspect.LiteralType) and (found := of(one)):
                shape.items, shape.words = found.items or shape.items, found.words or shape.words
        if len(structs) == 1:
            shape.fields = of_struct(structs[0]).fields
        elif structs:
            shape.tag_field = structs[0].tag_field or ""
            shape.by_tag = {str(one.tag): of_struct(one) for one in structs}
        return shape if shape != _Shape() else None

    request = of(inspect.type_info(Request))
    assert request
    return request
