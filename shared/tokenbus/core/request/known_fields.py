"""Find names in a request that this version does not know: fields, and words where only certain ones are valid. Pure.

A client of this version gets an error for a misspelt name before the request is sent. Intake must accept requests of
newer versions, so it only notes an unknown field, unless the name that was meant is one of `SAFETY`.
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
"""Maximum notes about unknown fields per request."""
SAFETY = ("policies", "visible")
"""Fields that keep output from being published. A request with a misspelt one is refused, never run without it."""
_FEW = 8
"""If no known name is close, list the known names only if there are at most this many."""
_NAME_CHARS = 64


class UnknownField(msgspec.Struct, frozen=True):
    """A field that this version ignores."""

    where: str
    """Path of the object that holds it; empty: the request."""
    name: str
    known: tuple[str, ...]
    """The fields that exist there."""

    @property
    def path(self) -> str:
        """Path of the field in the request."""
        return _at(self.where, self.name[:_NAME_CHARS])

    @property
    def problem(self) -> str:
        """What is wrong, and the name that was probably meant."""
        if close := nearest(self.name, self.known):
            return f"there is no such field; did you mean {close!r}?"
        if len(self.known) <= _FEW:
            return f"there is no such field, only {', '.join(map(repr, self.known))}"
        return "there is no such field"


class _Shape(msgspec.Struct):
    """Names that are valid at one place of a request: an object, one of several objects by tag, a list, or a word."""

    fields: dict[str, _Shape | None] | None = None
    """Fields of an object; None: any member name."""
    tag_field: str = ""
    by_tag: dict[str, _Shape] = {}
    items: _Shape | None = None
    words: tuple[str, ...] | None = None
    """None: any text."""


def unknown_fields(value: object) -> Iterator[UnknownField]:
    """Fields of a plain request that this version does not know, in order.

    Raises RequestInvalid for a text that must be one of certain words and is not.
    """
    return _walk(value, _request(), "")


def check_known(value: object) -> None:
    """Raise RequestInvalid for the first field or word of a plain request that this version does not know."""
    for field in unknown_fields(value):
        raise RequestInvalid(field.path, field.problem)


def notes_of(value: object) -> list[str]:
    """One sentence for each ignored field, at most `MAX_NOTES`. Raises like `unknown_fields`, and for a misspelt one
    of `SAFETY`.
    """
    notes: list[str] = []
    for field in unknown_fields(value):  # walk to the end: an invalid word anywhere is an error
        if not field.where and nearest(field.name, field.known) in SAFETY:
            raise RequestInvalid(field.path, f"{field.problem} A run without it could publish what it is to keep back")
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
            return  # the conversion reports what is wrong with it
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
    from msgspec import inspect  # only needed to write or accept requests

    made: dict[type, _Shape] = {}

    def of(kind: inspect.Type) -> _Shape | None:
        """None if it contains no names to check."""
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
